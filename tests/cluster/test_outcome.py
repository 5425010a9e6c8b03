"""How a run over many nodes ended: what counts as ready, and what a person reads."""

from __future__ import annotations

import pytest

from llm_prefetch.cluster import Node, NodeOutcome, Outcome
from llm_prefetch.errors import ClusterError, NotReadyError, OriginNotFoundError
from llm_prefetch.record import Verdict
from tests.samples import raises

NODES = [Node(f"id{number}", f"10.0.0.{number}", f"host{number}") for number in range(70)]
GONE = OriginNotFoundError("no such bucket", where="s3://b", hint="check the uri")


def well(number: int, **rest: object) -> NodeOutcome:
    return NodeOutcome(NODES[number], Verdict.HIT, "bundle-1", **rest)  # type: ignore[arg-type]


def test_enough_nodes_that_hold_it_are_ready():
    bad = NodeOutcome(NODES[1], Verdict.CORRUPT, reason="'a' was changed")
    Outcome((well(0), bad), needed=1).require_ready()
    with raises(NotReadyError, 1, "1 of 2 nodes are ready, 2 are needed; it is CORRUPT: 'a' was", "10.0.0.1"):
        Outcome((well(0), bad), needed=2).require_ready()


def test_fewer_nodes_than_are_needed_are_never_enough():
    with raises(NotReadyError, 1, "1 of 1 nodes are ready, 2 are needed", "select more nodes"):
        Outcome((well(0),), needed=2).require_ready()


def test_a_node_with_an_error_is_not_ready_whatever_its_files_say():
    outcome = Outcome((well(0), well(1, error=GONE)), needed=2)
    assert [node.ready for node in outcome.nodes] == [True, False]
    with raises(OriginNotFoundError, 3, "1 of 2 nodes are ready", "no such bucket", "10.0.0.1 s3://b"):
        outcome.require_ready()


def test_what_was_refused_is_not_ready_though_every_node_is():
    no = ClusterError("they differ", where="llama", hint="name one")
    outcome = Outcome((well(0),), needed=1, refusal=no)
    assert not outcome.ready
    with pytest.raises(ClusterError) as caught:
        outcome.require_ready()
    assert caught.value is no
    assert "they differ" in outcome.markdown("rollback")


def test_nothing_done_and_nothing_wrong_is_nothing_to_show():
    assert not Outcome((well(0), well(1, reason="held")), needed=2).changed
    assert Outcome((well(0), well(1, did="repaired")), needed=2).changed
    assert Outcome((well(0), NodeOutcome(NODES[1])), needed=1).changed


def test_the_page_says_what_was_done_and_names_those_that_are_not_ready_up_to_a_bound():
    bad = [NodeOutcome(node, Verdict.PARTIAL, reason="a | b") for node in NODES[1:]]
    page = Outcome((well(0, did="repaired"), *bad), needed=70, note="mind the gap").markdown(
        "verify: `llama`"
    )
    assert page.startswith("## verify: `llama`\n\n1 of 70 nodes are ready, 70 needed.\n\n**mind the gap**\n")
    assert "1 repaired." in page
    assert "| 10.0.0.1 | PARTIAL | a \\| b |" in page
    assert page.count("PARTIAL") == 64
    assert "5 more are in the table." in page
