"""A compile cache is given to a replica of several nodes only if the workers on each of them may use their own copy."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from llm_prefetch import ledger
from llm_prefetch.caches.install import cache_root, check_installed
from llm_prefetch.caches.quarantine import Mark, mark_broken
from llm_prefetch.serve import PrefetchCallback
from llm_prefetch.serve.group import Group
from llm_prefetch.serve.group_node import NodeActor
from llm_prefetch.stage import stage
from llm_prefetch.store import NodeStore
from tests.caches.made import ANY, CACHE, GRAPH, make_spec, publish_cache
from tests.serve.conftest import LLMConfig
from tests.serve.group_stand_in import Handle, Nodes

MODEL = f"{GRAPH}/rank_0_0/model"
pytestmark = pytest.mark.usefixtures("engine_environment")


@pytest.fixture
def version(stores, tmp_path) -> str:
    """`llama` is live on all three nodes, with this version of a cache that fits."""
    cache = publish_cache(tmp_path / "cache", ANY)
    for store in stores:
        stage(make_spec(tmp_path, cache), store)
    return cache[1]


class Replica(PrefetchCallback):
    """In a placement group that spans the nodes of `placed`."""

    placed: Nodes

    def _group(self, start: Any) -> Group:
        self._start = start.id
        return Group(start, self.placed)


def start(nodes: Nodes, store: NodeStore) -> dict[str, Any]:
    """Start the replica on the node of `store`; the ledger's row of its engine."""
    replica = Replica(LLMConfig(), ctx_kwargs={"runtime_env": {}}, deployment="llama", root=store.root)
    replica.placed = nodes

    async def main() -> None:
        async def hooks() -> None:
            await replica.run_callback("on_before_node_init")
            await replica.run_callback("on_after_node_init")

        await asyncio.create_task(hooks())
        await asyncio.sleep(0)

    asyncio.run(main())
    row = ledger.read(store, "engine")[-1]
    assert row["outcome"] == "ready"
    return row


def refused(row: dict[str, Any]) -> str:
    """Why the engine has started without a cache."""
    assert "VLLM_CACHE_ROOT" not in os.environ
    assert row["cache"] == ""
    return str(row["cache_reason"])


def test_where_all_may_use_it_all_do(stores, nodes, version):
    assert start(nodes, stores[0])["cache"] == version
    assert os.environ["VLLM_CACHE_ROOT"] == str(cache_root(stores[0], "llama"))


def test_what_is_not_installed_on_another_node_is_installed_there(stores, nodes, version):
    shutil.rmtree(cache_root(stores[2], "llama"))
    assert start(nodes, stores[0])["cache"] == version
    assert check_installed(stores[2], "llama", version) == ""


def quarantine(store: NodeStore, version: str) -> None:
    mark_broken(store, Mark("compile", version, "llama", "it crashed", "start1"))


def open_to_others(store: NodeStore, _version: str) -> None:
    cache_root(store, "llama").chmod(0o777)


def damage(store: NodeStore, version: str) -> None:
    path = store.artifact("compile", version) / MODEL
    path.chmod(0o644)
    path.write_bytes(CACHE[MODEL][::-1])


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (quarantine, "compile is UNTRUSTED: 10.0.0.2: it is quarantined on this node: it crashed"),
        (open_to_others, "compile is UNTRUSTED: 10.0.0.2: others may write to it"),
        (damage, "compile is CORRUPT: 10.0.0.2: "),
    ],
)
def test_what_workers_on_one_node_may_not_use_none_gets_and_the_node_is_named(
    stores, nodes, version, trouble: Callable[[NodeStore, str], None], reason
):
    trouble(stores[2], version)
    assert refused(start(nodes, stores[0])).startswith(reason)


class Gone(Handle):
    """An actor that is lost once the check is done."""

    def __getattr__(self, method: str) -> Any:
        if method == "caches":
            raise RuntimeError("The actor died")
        return super().__getattr__(method)


def test_a_node_that_cannot_be_asked_may_not(stores, nodes, version):
    def lost(actor: NodeActor) -> Handle:
        return (Gone if len(nodes.joined) == 1 else Handle)(actor)

    nodes.handle = lost
    reason = refused(start(nodes, stores[0]))
    assert reason == "compile is MISSING: 10.0.0.1: it cannot be asked: RuntimeError: The actor died"
