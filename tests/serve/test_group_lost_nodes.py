"""A node of a group that does not answer, dies, moves or is not known is not ready, and nothing waits for it for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from llm_prefetch import ledger
from llm_prefetch.errors import ClusterError
from llm_prefetch.leases import leased
from llm_prefetch.live import DeploymentCheck, check_deployment
from llm_prefetch.record import Verdict
from llm_prefetch.serve.group_node import NodeActor
from llm_prefetch.serve.ladder import Ladder, Note, Rung
from tests.serve.group_stand_in import Handle, begin, free, group


def test_a_node_that_does_not_answer_is_missing_and_nothing_waits_for_ever(stores, nodes, stage_on):
    stage_on(*stores)

    class Silent(Handle):
        def __getattr__(self, method: str) -> Any:
            return SimpleNamespace(remote=lambda *_given: asyncio.ensure_future(asyncio.sleep(1000)))

    nodes.handle = lambda actor: Silent(actor) if len(nodes.joined) == 1 else Handle(actor)
    check, _ = begin(group(nodes, stores[0], seconds=1.0))
    assert (check.verdict, check.reason) == (Verdict.MISSING, "10.0.0.1: no answer in 1 s")


class Dead(Handle):
    """An actor that has died: Ray raises where its answer is awaited."""

    def __getattr__(self, method: str) -> Any:
        async def answer() -> None:
            raise OSError("the actor\nhas died")

        return SimpleNamespace(remote=lambda *_given: asyncio.ensure_future(answer()))


def unplaceable(actor: NodeActor) -> Handle:
    """Ray may say at once that no actor is to be had."""
    raise OSError("the actor\nhas died")


@pytest.mark.parametrize("first", [Dead, unplaceable])
def test_a_node_that_could_not_be_asked_is_asked_again_after_a_rung(stores, nodes, stage_on, first):
    stage_on(*stores)

    def handle(actor: NodeActor) -> Handle:
        return first(actor) if len(nodes.joined) == 1 else Handle(actor)

    nodes.handle = handle
    check, [said] = begin(group(nodes, stores[0]), "wait")
    assert check.ready
    assert nodes.joined == ["node-1", "node-2", "node-1"]
    assert said.startswith("failed: 10.0.0.1: there is no actor of ours")
    [row] = ledger.read(stores[0], "start")
    assert row["reason"] == "10.0.0.1: it cannot be asked: OSError: the actor has died"


def test_a_node_that_is_lost_in_the_middle_of_a_rung_does_not_hide_what_became_of_the_others(
    stores, nodes, spec
):
    class Lost(Handle):
        def __getattr__(self, method: str) -> Any:
            if method == "run":
                raise OSError("connection reset")
            return super().__getattr__(method)

    nodes.handle = lambda actor: Lost(actor) if len(nodes.joined) == 1 else Handle(actor)
    check, [said] = begin(group(nodes, stores[0], spec=spec, on_miss=["stage", "fail"]), "stage")
    assert check.reason == "10.0.0.1: nothing is live on this node"
    assert said.startswith("failed: this node: staged")
    assert "10.0.0.1: it cannot be asked: OSError: connection reset" in said
    assert check_deployment(stores[2], "llama").ready


def test_a_group_that_ray_puts_elsewhere_is_checked_there(stores, nodes, stage_on):
    stage_on(stores[0], stores[2])
    lost = nodes.stores.pop("node-2")
    one = group(nodes, stores[0])

    async def moves(note: Note) -> str:
        del nodes.stores["node-1"]
        nodes.stores["node-3"] = lost
        return "moved"

    async def main() -> DeploymentCheck:
        missed = await one.check()
        assert missed.reason.startswith("10.0.0.1")
        return await Ladder("llama", 60.0).climb([Rung("wait", 30.0, moves)], one.check, missed)

    assert asyncio.run(main()).ready
    assert list(one.others) == ["node-3"]


def test_a_group_that_is_not_placed_yet_is_waited_for(stores, nodes, stage_on):
    stage_on(*stores)
    placed: Callable[[], Mapping[str, str]] = nodes.nodes

    def later() -> Mapping[str, str]:
        answer = placed()
        if nodes.asked < 3:
            raise ClusterError("the placement group is PENDING", hint="wait")
        return answer

    nodes.nodes = later
    assert begin(group(nodes, stores[0]))[0].ready
    assert nodes.asked == 3


@pytest.mark.parametrize("error", [ClusterError("the placement group is PENDING"), RuntimeError("no GCS")])
def test_where_the_nodes_are_not_known_none_is_ready(stores, nodes, stage_on, error):
    stage_on(*stores)

    def never() -> Mapping[str, str]:
        raise error

    nodes.nodes = never
    check, _ = begin(group(nodes, stores[0], seconds=0.7))
    assert check.verdict is Verdict.MISSING
    assert check.reason.startswith("the nodes of the placement group are not known: ")
    assert str(error) in check.reason
    assert (free(stores[0]), leased(stores[0])) == (True, [])
