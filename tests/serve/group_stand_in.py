"""A placement group without Ray: its nodes are stores in this process, each asked as Ray's actors are."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llm_prefetch.errors import LockTimeoutError
from llm_prefetch.live import DeploymentCheck, start_lock
from llm_prefetch.serve.group import Group
from llm_prefetch.serve.group_node import NodeActor
from llm_prefetch.serve.ladder import Ladder, Rung
from llm_prefetch.serve.options import CallbackOptions
from llm_prefetch.serve.start import Start
from llm_prefetch.spec import Spec
from llm_prefetch.stage import stage
from llm_prefetch.store import NodeStore, locked, open_store


@pytest.fixture
def stores(tmp_path: Path) -> list[NodeStore]:
    """The disks of three nodes."""
    return [open_store(tmp_path / f"disk-{number}", create=True) for number in range(3)]


@pytest.fixture
def nodes(stores: list[NodeStore], caplog: pytest.LogCaptureFixture) -> Nodes:
    """The group of `stores`, and what is logged of it."""
    caplog.set_level(logging.INFO, logger="ray.serve.llm_prefetch")
    return Nodes(stores)


@pytest.fixture
def stage_on(spec: dict[str, Any]) -> Callable[..., None]:
    """Make `llama` live on these stores."""

    def stage_on(*stores: NodeStore, spec: dict[str, Any] = spec) -> None:
        for store in stores:
            stage(Spec.model_validate(spec), store)

    return stage_on


def group(nodes: Nodes | None, store: NodeStore, *, seconds: float = 60.0, **options: Any) -> Group:
    """The group of the replica on the node of `store`; without `nodes`, it is in none."""
    deadlines = {"check": seconds, **options.pop("deadlines", {})}
    given = CallbackOptions.model_validate(
        {"deployment": "llama", "root": store.root, "deadlines": deadlines, **options}
    )
    return Group(Start(given, "replica-7"), nodes)


def begin(
    group: Group,
    *rungs: str,
    then: Callable[[], Awaitable[object]] | None = None,
    seconds: float = 30.0,
) -> tuple[DeploymentCheck, list[str]]:
    """A start: the check, the rungs, the rows in the ledgers, and the engine; the last check, and what rungs said."""

    async def start() -> tuple[DeploymentCheck, list[str]]:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(group.end)
        first = check = await group.check()
        ladder, rung = Ladder("llama", 60.0), "hit" if check.ready else "fail"
        if not check.ready:
            climb = [Rung(name, seconds, partial(group.run, name)) for name in rungs]
            check = await ladder.climb(climb, group.check, check)
            rung = ladder.attempts[-1].rung if check.ready else "fail"
        group.record(first, check.bundle, rung, ladder.attempts)
        if then is not None:
            await then()
        return check, [attempt.outcome for attempt in ladder.attempts]

    async def main() -> tuple[DeploymentCheck, list[str]]:
        task = asyncio.create_task(start())
        try:
            return await task
        finally:
            for _ in range(20):  # what the other nodes were told
                await asyncio.sleep(0)

    return asyncio.run(main())


def free(store: NodeStore) -> bool:
    """Whether a switch may happen on a node now."""
    try:
        with locked(start_lock(store, "llama"), seconds=0, waiting_for="a start"):
            return True
    except LockTimeoutError:
        return False


class Nodes:
    """A placement group: the own node is called `own`, the others `node-1`, `node-2`, ..."""

    own = "own"

    def __init__(self, stores: Sequence[NodeStore]) -> None:
        self.stores = {f"node-{number}" if number else "own": store for number, store in enumerate(stores)}
        self.asked = 0
        self.joined: list[str] = []
        self.given: list[CallbackOptions] = []
        self.handle: Callable[[NodeActor], Any] = Handle

    def nodes(self) -> Mapping[str, str]:
        self.asked += 1
        return {key: "" if key == "own" else f"10.0.0.{key[-1]}" for key in self.stores}

    def join(self, node: str, options: CallbackOptions, replica: str, start: str) -> Any:
        self.joined.append(node)
        self.given.append(pickle.loads(pickle.dumps(options)))
        # On a real node the same path leads to another disk.
        return self.handle(
            NodeActor(options.model_copy(update={"root": self.stores[node].root}), replica, start)
        )


class Handle:
    """As Ray's handle of an actor: what goes there and what comes back is pickled."""

    def __init__(self, actor: NodeActor) -> None:
        self.actor = actor

    def __getattr__(self, method: str) -> Any:
        async def answer(arguments: bytes) -> Any:
            return pickle.loads(pickle.dumps(await getattr(self.actor, method)(*pickle.loads(arguments))))

        return SimpleNamespace(remote=lambda *given: asyncio.ensure_future(answer(pickle.dumps(given))))
