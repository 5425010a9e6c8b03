"""Callbacks for a replica that is measured: they run in its process and write what they saw to the file BENCH_CLOCK."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from llm_prefetch.serve import PrefetchCallback
from llm_prefetch.serve.ray_api import CallbackBase
from llm_prefetch.serve.start_log import startup_phases


class Ours(PrefetchCallback):  # type: ignore[misc]
    """`PrefetchCallback`, with the seconds of its two hooks."""

    async def on_before_node_init(self) -> None:
        """The check, and what it leads to."""
        began = time.perf_counter()
        await super().on_before_node_init()
        self.seconds = time.perf_counter() - began

    async def on_after_node_init(self) -> None:
        """Parsers and models."""
        began = time.perf_counter()
        await super().on_after_node_init()
        _write({"added": self.seconds + time.perf_counter() - began})


class Rays(CallbackBase):  # type: ignore[misc]
    """Does nothing: what lies between its hooks is Ray's own node initialisation."""

    async def on_before_node_init(self) -> None:
        """Ray's turn begins."""
        self.began, self.wall = time.perf_counter(), time.time()
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(self._end)

    async def on_after_node_init(self) -> None:
        """Ray's turn is over."""
        self.seconds = time.perf_counter() - self.began

    def _end(self, _task: asyncio.Task[Any]) -> None:
        steps = [("Ray's node initialisation", self.wall, self.seconds)]
        _write({"node_init": self.seconds, **startup_phases(self.wall, self.wall, steps)})


def _write(found: dict[str, Any]) -> None:
    Path(os.environ["BENCH_CLOCK"]).write_text(json.dumps(found))
