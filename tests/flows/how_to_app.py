"""What the how-to serves in the test: `tests.real.tiny_app` under the name that Ray Serve LLM would give it."""

from __future__ import annotations

from typing import Any

from ray import serve

from tests.real.tiny_app import TinyServer


def build(args: dict[str, Any]) -> serve.Application:
    """`live` names the model, `resources` is what a replica takes of its node."""
    options = {"num_cpus": 0, "resources": args["resources"]}
    name = f"LLMServer:{args['live']}"
    return serve.deployment(TinyServer, name=name, ray_actor_options=options).bind(args["live"])
