"""A Ray Serve application without an engine, for what only needs replicas: it starts in a second.

Each replica checks its node as a replica with our callback does, and signs in the ledger.
"""

from __future__ import annotations

import os
from typing import Any

from ray import serve

from llm_prefetch.serve.options import parse_options
from llm_prefetch.serve.ray_api import replica_name
from llm_prefetch.serve.start import Start

NAME = "TinyServer:tiny"
"""With a colon, as Ray Serve LLM names its deployments."""


class TinyServer:
    """Answers with its process id."""

    def __init__(self, live: str) -> None:
        start = Start(parse_options({"deployment": f"stage/{live}"}), replica_name())
        check = start.check()
        start.record(check, check.bundle, "hit" if check.ready else "fail", ())
        start.let_go()

    def __call__(self) -> int:
        return os.getpid()


def build(args: dict[str, Any]) -> serve.Application:
    """`live` names our deployment, `resources` is what a replica takes of its node, `env` its own variables."""
    options = {"num_cpus": 0, "resources": args["resources"]}
    if "env" in args:
        options["runtime_env"] = {"env_vars": args["env"]}
    deployment = serve.deployment(TinyServer, name=NAME, ray_actor_options=options)
    return deployment.bind(args["live"])
