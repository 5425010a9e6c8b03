"""A replica of several nodes, up to its engine: run on a host with `-m`, it prints what came of the start as JSON.

It makes the placement group that Ray Serve LLM makes, and the replica calls the callback: in the driver, or as an actor
in the group's first bundle, as Serve has it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from llm_prefetch.serve import PrefetchCallback


@dataclass
class Engine:
    """Of Ray's `VLLMEngineConfig`, what the callback uses."""

    hf_model_id: str | None = "from/the-hub"
    mirror_config: Any = None
    engine_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Config:
    """Of Ray's `LLMConfig`, which imports vLLM, what the callback uses."""

    engine: Engine = field(default_factory=Engine)
    engine_kwargs: dict[str, Any] = field(default_factory=dict)

    def get_engine_config(self) -> Engine:
        return self.engine


async def initialize_node(_config: Config) -> None:
    """In the place of Ray's node initialisation, which imports vLLM: what it brings is there already."""


class Replica:
    """Serve's replica."""

    async def start(
        self, group: Any, arguments: dict[str, Any], engine: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        """Start by the callback with these arguments: our process, and what came of it."""
        module = types.ModuleType("ray.llm._internal.serve.utils.node_initialization_utils")
        module.initialize_node = initialize_node  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module
        config = Config(Engine(**engine))
        context = {"placement_group": group, "runtime_env": {"env_vars": {"A_LINE_OF_THE_YAML": "1"}}}
        callback = PrefetchCallback(config, ctx_kwargs=context, **arguments)
        try:
            # A task of its own, as Serve has for what starts the engine.
            await asyncio.ensure_future(callback.on_before_node_init())
            ray.cloudpickle.dumps(callback)  # as Ray does for its tasks
            error = ""
        except Exception as caught:
            error = str(caught)
        came = {"error": error, "model": config.engine.hf_model_id, "by_ray": callback.ctx.run_init_node}
        return os.getpid(), came


def main(addresses: list[str], arguments: dict[str, Any], engine: dict[str, Any], until: str) -> None:
    """Start on the nodes of these addresses; with `until`, kill the replica when this file is there, and live on."""
    bundles = [{f"node:{address}": 0.001} for address in addresses]
    group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
    if not until:
        print(json.dumps(asyncio.run(Replica().start(group, arguments, engine))[1]))
        return
    placed = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    replica = ray.remote(Replica).options(num_cpus=0, scheduling_strategy=placed).remote()
    process, came = ray.get(replica.start.remote(group, arguments, engine))
    print(json.dumps(came), flush=True)
    while not Path(until).exists():
        time.sleep(0.1)
    os.kill(process, signal.SIGKILL)
    print("killed", flush=True)
    time.sleep(1000)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    ray.init(namespace="serve", log_to_driver=False, logging_level=logging.WARNING)
    main(*json.loads(sys.argv[1]))
