"""What a reconcile decides, from what real node stores say of themselves; without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llm_prefetch.cluster.asking import Answer
from llm_prefetch.cluster.inspection import live_bundle, wanted_by
from llm_prefetch.cluster.reconcile import Decision, decide, keep_hold
from llm_prefetch.cluster.reports import Node
from llm_prefetch.errors import (
    ClusterError,
    NotReadyError,
    OriginAccessError,
    OriginUnavailableError,
    PrefetchError,
)
from llm_prefetch.live import rollback
from llm_prefetch.spec import Spec
from llm_prefetch.stage import committed_manifests, stage
from llm_prefetch.store import NodeStore, open_store
from tests.samples import FILES, flip_byte, make_artifact, make_folder, make_published, make_spec, raises

AWAY = OriginUnavailableError("no answer", where="s3://b/m", hint="try again later")


class Fleet:
    """Node stores, and an origin that changes."""

    def __init__(self, folder: Path, nodes: int = 3) -> None:
        self.folder = folder
        self.origin = folder / "origin"
        self.spec = make_spec(make_published(self.origin))
        self.stores = [self.store(number) for number in range(nodes)]

    def store(self, number: int) -> NodeStore:
        return open_store(self.folder / f"node{number}", create=True)

    def publish(self, text: bytes) -> None:
        make_published(self.origin, {**FILES, "config.json": text})

    def stage(self, *numbers: int, spec: Spec | None = None) -> None:
        """Stage as a run does: the first node pins the others."""
        found: dict[str, Any] = {}
        for number in numbers or range(len(self.stores)):
            report = stage(spec or self.spec, self.stores[number], manifests=found)
            found = committed_manifests(self.stores[number], report)

    def join(self) -> int:
        self.stores.append(self.store(len(self.stores)))
        return len(self.stores) - 1

    def decide(
        self, spec: Spec | None = None, error: PrefetchError | None = None, lost: int = -1
    ) -> Decision:
        spec = spec or self.spec
        answers = [
            Answer(node, error=ClusterError("died", where=node.address, hint="wait"))
            if number == lost
            else Answer(node, live_bundle(spec.deployment, store.root))
            for number, store in enumerate(self.stores)
            for node in [Node(f"id{number}", f"10.0.0.{number}", f"host{number}")]
        ]
        return decide(spec, answers, error or wanted_by(spec))

    def lacking(self, **how: Any) -> dict[int, str]:
        """Number of each node to stage, and why."""
        return {int(one.node.id[2:]): one.reason for one in self.decide(**how).lacking}


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def test_a_fleet_that_holds_what_the_origin_holds_needs_nothing(fleet):
    fleet.stage()
    decision = fleet.decide()
    assert (decision.lacking, decision.outcome.changed, decision.outcome.ready_nodes) == ([], False, 3)


def test_only_nodes_that_lack_it_are_staged_and_each_says_why(fleet):
    fleet.stage(0, 1)
    assert fleet.lacking() == {2: "nothing is live on this node"}
    (fleet.stores[0].engine_path("llama", "weights") / "config.json").unlink()
    assert set(fleet.lacking()) == {0, 2}
    assert "'config.json' cannot be found" in fleet.lacking()[0]


def test_a_node_without_a_store_lacks_it_and_looking_makes_none(fleet, tmp_path):
    fleet.stage()
    fleet.stores.append(NodeStore(tmp_path / "never-staged"))
    assert set(fleet.lacking()) == {3}
    assert not (tmp_path / "never-staged").exists()


def test_a_new_version_at_the_origin_is_lacking_everywhere(fleet):
    fleet.stage()
    fleet.publish(b"two")
    assert set(fleet.lacking()) == {0, 1, 2}
    fleet.stage(1)
    reasons = fleet.lacking()
    assert set(reasons) == {0, 2}
    assert "weights is b3-" in reasons[0]
    assert ", not b3-" in reasons[0]


def test_a_pinned_version_is_wanted_whatever_the_origin_says(fleet):
    fleet.stage()
    version = live_bundle("llama", fleet.stores[0].root).members[0].member.version
    fleet.publish(b"two")
    pinned = make_spec(fleet.spec.artifacts[0].uri, version=version)
    assert fleet.lacking(spec=pinned) == {}
    fleet.origin.rename(fleet.origin.with_name("gone"))
    assert fleet.lacking(spec=pinned) == {}, "nothing was asked"


def test_artifacts_that_come_and_go_in_the_spec_are_noticed(fleet, tmp_path):
    fleet.stage()
    more = make_spec(fleet.spec.artifacts[0].uri, make_published(tmp_path / "more", {"a": b"a"}))
    assert fleet.lacking(spec=more)[0] == "weights1 is not in the live bundle"
    fleet.stage(spec=more)
    assert fleet.lacking(spec=more) == {}
    other_kind = more.model_copy(
        update={"artifacts": [more.artifacts[0], more.artifacts[1].model_copy(update={"kind": "files"})]}
    )
    assert fleet.lacking(spec=other_kind)[0] == "weights1 is of another kind, or pinned otherwise"
    assert fleet.lacking()[0] == "weights1 is live, and not in the spec"


def test_without_a_manifest_the_node_that_read_the_origin_vouches_for_the_others(fleet, tmp_path):
    spec = make_spec(f"file://{make_folder(tmp_path / 'plain')}")
    assert set(fleet.lacking(spec=spec)) == {0, 1, 2}
    fleet.stage(spec=spec)
    assert fleet.lacking(spec=spec) == {}
    joined = fleet.join()
    assert set(fleet.lacking(spec=spec)) == {joined}
    (tmp_path / "plain" / "config.json").write_bytes(b"changed")
    assert set(fleet.lacking(spec=spec)) == {0, 1, 2, 3}


def test_a_cache_that_a_staging_left_out_is_not_missed_again(fleet, tmp_path):
    uri = make_published(tmp_path / "cache", {"kernels": b"of another device"})
    version = wanted_by(make_spec(uri))[0].member.version
    cache = make_artifact(uri, "compile", kind="compile-cache", version=version)
    spec = fleet.spec.model_copy(update={"artifacts": [*fleet.spec.artifacts, cache]})
    unpinned = spec.model_copy(
        update={"artifacts": [*fleet.spec.artifacts, cache.model_copy(update={"version": None})]}
    )
    fleet.stage()
    assert fleet.lacking(spec=unpinned) == {}, "it would not be staged"
    assert fleet.lacking(spec=spec)[0] == "compile is not in the live bundle"
    fleet.stage(spec=spec)
    assert fleet.lacking(spec=spec) == {}


def test_a_node_that_does_not_answer_is_named_and_not_staged(fleet):
    fleet.stage()
    decision = fleet.decide(lost=1)
    assert decision.lacking == []
    with raises(ClusterError, 3, "2 of 3 nodes are ready, 3 are needed; died", "10.0.0.1"):
        decision.outcome.require_ready()
    fewer = fleet.spec.model_copy(
        update={"policy": fleet.spec.policy.model_copy(update={"min_ready": "60%"})}
    )
    fleet.decide(spec=fewer, lost=1).outcome.require_ready()


def test_while_the_origin_is_away_nodes_that_agree_are_ready_and_that_is_said(fleet):
    fleet.stage()
    decision = fleet.decide(error=AWAY)
    assert (decision.lacking, decision.outcome.ready, decision.outcome.changed) == ([], True, False)
    assert "the origin does not answer" in decision.outcome.note
    assert "no answer" in decision.outcome.note


def test_while_the_origin_is_away_what_lacks_fails_and_nothing_is_unstaged(fleet):
    fleet.stage()
    fleet.publish(b"two")
    fleet.stage(0)
    joined = fleet.join()
    decision = fleet.decide(error=AWAY)
    assert decision.lacking == []
    assert [one.ready for one in decision.outcome.nodes] == [False, True, True, False]
    assert decision.outcome.nodes[0].reason == "it holds other versions than most nodes"
    assert str(decision.outcome.nodes[joined].verdict) == "MISSING"
    with raises(OriginUnavailableError, 3, "2 of 4 nodes are ready, 4 are needed; no answer"):
        decision.outcome.require_ready()


def test_an_origin_that_will_never_answer_fails_it_at_once(fleet):
    fleet.stage()
    no = OriginAccessError("may not read", where="s3://b/m", hint="ask for access")
    with raises(OriginAccessError, 3, "nothing tells what is wanted", "may not read"):
        fleet.decide(error=no)


def test_while_the_origin_is_away_an_empty_fleet_is_an_error(fleet):
    with raises(OriginUnavailableError, 3, "nothing tells what is wanted"):
        fleet.decide(error=AWAY)


def _rolled_back(fleet: Fleet, *numbers: int) -> None:
    fleet.stage()
    fleet.publish(b"two")
    fleet.stage()
    for number in numbers or range(len(fleet.stores)):
        rollback(fleet.stores[number], "llama", by="ada", why="it rhymes")


def test_a_rollback_is_not_undone_and_the_run_says_who_did_it(fleet):
    _rolled_back(fleet)
    decision = fleet.decide()
    assert (decision.lacking, decision.outcome.ready) == ([], True)
    assert "rolled back on" in decision.outcome.note
    assert "by ada: it rhymes" in decision.outcome.note
    assert fleet.decide(error=AWAY).outcome.ready, "the origin has no say in it"


def test_a_node_that_joins_after_a_rollback_gets_what_was_gone_back_to_and_is_held_too(fleet):
    _rolled_back(fleet)
    make_published(fleet.origin.with_name("first"))
    for store in fleet.stores:  # as if each version had a prefix of its own
        for record in (store.root / "artifacts/weights").glob("*.json"):
            record.write_bytes(record.read_bytes().replace(b"/origin", b"/first"))
    joined = fleet.join()
    decision = fleet.decide()
    assert [one.node.id for one in decision.lacking] == [f"id{joined}"]
    assert decision.spec.artifacts[0].uri == f"file://{fleet.origin.with_name('first')}"
    assert decision.hold is not None
    report = stage(decision.spec, fleet.stores[joined])
    assert report.bundle == decision.hold.bundle
    keep_hold("llama", decision.hold, fleet.stores[joined].root)
    assert fleet.decide().lacking == []
    with raises(NotReadyError, 1, "by ada"):
        stage(fleet.spec, fleet.stores[joined])


def test_a_held_node_that_is_damaged_is_staged_with_what_it_is_held_on(fleet):
    _rolled_back(fleet)
    held = live_bundle("llama", fleet.stores[0].root)
    (fleet.stores[0].engine_path("llama", "weights") / "empty").unlink()
    decision = fleet.decide()
    assert [one.node.id for one in decision.lacking] == ["id0"]
    assert decision.spec.artifacts[0].version == held.members[0].member.version


def test_where_only_some_nodes_are_held_those_are_left_alone(fleet):
    _rolled_back(fleet, 0)
    joined = fleet.join()
    decision = fleet.decide()
    assert [one.node.id for one in decision.lacking] == [f"id{joined}"]
    assert decision.hold is None
    assert decision.spec == fleet.spec
    assert decision.outcome.nodes[0].ready
    assert "by ada" in decision.outcome.nodes[0].reason
    flip_byte(fleet.stores[0].engine_path("llama", "weights") / "config.json")
    (fleet.stores[0].engine_path("llama", "weights") / "empty").unlink()
    again = fleet.decide()
    assert [one.node.id for one in again.lacking] == [f"id{joined}"]
    assert not again.outcome.nodes[0].ready


def test_a_node_that_holds_the_same_without_a_rollback_is_no_reason_to_keep_it(fleet):
    fleet.stage()
    fleet.publish(b"two")
    fleet.stage(0)
    rollback(fleet.stores[0], "llama")
    decision = fleet.decide()
    assert [one.node.id for one in decision.lacking] == ["id1", "id2"]
    assert decision.spec == fleet.spec


def test_nodes_that_are_held_on_different_bundles_are_each_left_alone(fleet):
    _rolled_back(fleet, 0)
    fleet.publish(b"three")
    fleet.stage(1, 2)
    for number in (1, 2):
        rollback(fleet.stores[number], "llama")
    joined = fleet.join()
    decision = fleet.decide()
    assert [one.node.id for one in decision.lacking] == [f"id{joined}"]
    assert decision.spec == fleet.spec


def test_a_new_version_that_a_person_stages_ends_the_hold(fleet):
    _rolled_back(fleet)
    fleet.publish(b"three")
    assert fleet.lacking() == {}
    fleet.stage(0)
    decision = fleet.decide()
    assert decision.lacking == [], "the other two are still held"
    assert decision.outcome.note == ""
    fleet.stage()
    assert fleet.decide().outcome.nodes[0].reason == ""
