"""What a rollback of many nodes decides, from what real node stores answer; without a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llm_prefetch.cluster.asking import Answer
from llm_prefetch.cluster.reports import Node
from llm_prefetch.cluster.rollback import Step, could_go_back, go_back, weigh
from llm_prefetch.errors import NotReadyError, PrefetchError, SpecError
from llm_prefetch.holds import read_hold
from llm_prefetch.live import current_bundle, rollback
from llm_prefetch.stage import stage
from llm_prefetch.store import NodeStore, open_store
from tests.samples import FILES, make_published, make_spec, raises


@pytest.fixture
def stores(tmp_path: Path) -> list[NodeStore]:
    """Three nodes on which `one` and then `two` went live."""
    found = [open_store(tmp_path / f"node{number}", create=True) for number in range(3)]
    for text in (b"one", b"two"):
        for store in found:
            put(store, text)
    return found


def put(store: NodeStore, text: bytes) -> str:
    origin = make_published(store.root.parent / f"origin-{text.decode()}", {**FILES, "config.json": text})
    return stage(make_spec(origin), store).bundle


def each(stores: list[NodeStore], ask: Callable[[Path], Step]) -> list[Answer[Step]]:
    answers = []
    for number, store in enumerate(stores):
        node = Node(f"id{number}", f"10.0.0.{number}", f"host{number}")
        try:
            answers.append(Answer(node, ask(store.root)))
        except PrefetchError as error:
            answers.append(Answer(node, error=error))
    return answers


def before(stores: list[NodeStore], to: str = "") -> list[Answer[Step]]:
    return each(stores, lambda root: could_go_back("llama", to, root))


def live(stores: list[NodeStore]) -> list[str | None]:
    return [current_bundle(store, "llama") for store in stores]


def test_nodes_that_agree_go_back_together(stores):
    two = live(stores)
    outcome = weigh("llama", before(stores))
    assert outcome.refusal is None
    assert {one.did for one in outcome.nodes} == {"would go back"}
    assert live(stores) == two, "so far nothing was changed"
    targets = frozenset(answer.value.target for answer in before(stores) if answer.value)
    [target] = targets
    done = each(stores, lambda root: go_back("llama", "", targets, "ada", "it rhymes", 1.0, root))
    assert [answer.value.target for answer in done if answer.value] == [target] * 3
    assert live(stores) == [target] * 3
    for store in stores:
        hold = read_hold(store, "llama", target)
        assert hold is not None
        assert (hold.by, hold.why, hold.left) == ("ada", "it rhymes", (two[0],))


def test_nodes_that_would_part_are_refused_and_the_table_says_where_each_would_go(stores):
    rollback(stores[1], "llama")
    put(stores[1], b"three")
    rollback(stores[2], "llama")
    put(stores[2], b"two-and-a-half")
    put(stores[2], b"four")
    outcome = weigh("llama", before(stores))
    with raises(NotReadyError, 1, "different bundles", "2 to bundle-", "1 to bundle-"):
        outcome.require_ready()
    assert [row["reason"][:10] for row in outcome.rows()] == ["to bundle-"] * 3
    assert len({row["reason"] for row in outcome.rows()}) == 2


def test_a_node_that_cannot_go_back_keeps_all_from_it(stores, tmp_path):
    joined = open_store(tmp_path / "joined", create=True)
    put(joined, b"two")
    outcome = weigh("llama", before([*stores, joined]))
    with raises(SpecError, 2, "1 of 4 nodes cannot go back, so none did; 10.0.0.3", "no earlier generation"):
        outcome.require_ready()
    assert outcome.nodes[3].error is not None
    assert {one.did for one in outcome.nodes[:3]} == {"would go back"}


def test_a_second_rollback_after_half_of_one_is_refused_and_finished_by_name(stores):
    one = rollback(stores[0], "llama").id
    outcome = weigh("llama", before(stores))
    assert isinstance(outcome.refusal, SpecError)
    outcome = weigh("llama", before(stores, to=one))
    assert outcome.refusal is None
    assert [(row["did"], row["reason"][:9]) for row in outcome.rows()] == [
        ("", "it is liv"),
        ("would go back", "to bundle"),
        ("would go back", "to bundle"),
    ]


def test_a_node_that_was_switched_since_it_was_asked_stays_as_it_is(stores):
    targets = frozenset(answer.value.target for answer in before(stores) if answer.value)
    three = put(stores[0], b"three")
    with raises(NotReadyError, 1, "was switched meanwhile"):
        go_back("llama", "", targets, "ada", "", 1.0, stores[0].root)
    assert current_bundle(stores[0], "llama") == three
