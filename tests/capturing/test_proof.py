"""The proof that a cache is found: of the live generation, and kept on the node."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_prefetch import ledger
from llm_prefetch.caches.evidence import Outcome
from llm_prefetch.caches.identity import Identity
from llm_prefetch.caches.proof import Proof, proof, record_proof
from llm_prefetch.capturing.capture_node import Candidate
from llm_prefetch.capturing.prove import (
    Proven,
    _kinds,
    _proof,
    keepers,
    remember,
    require_proof,
    what_it_had,
)
from llm_prefetch.cluster.asking import Answer
from llm_prefetch.cluster.reports import Node
from llm_prefetch.errors import ClusterError, NotReadyError
from llm_prefetch.live import current_bundle, rollback
from llm_prefetch.spec import Spec
from llm_prefetch.stage import stage
from llm_prefetch.store import NodeStore
from tests.samples import make_published


def stage_weights(store: NodeStore, origin: Path) -> str:
    uri = make_published(origin)
    stage(Spec.model_validate({"deployment": "m", "artifacts": [{"name": "weights", "uri": uri}]}), store)
    return str(current_bundle(store, "m"))


def found(bundle: str, outcome: Outcome = Outcome.HIT, **more: object) -> Proof:
    return Proof("m", bundle, outcome, "why", outcome is Outcome.HIT, "10.0.0.1", 12.5, **more)


def test_nothing_is_proven_before_an_engine_was_booted(store, tmp_path):
    stage_weights(store, tmp_path / "a")
    assert proof(store, "m") is None


def test_the_newest_proof_counts_and_survives_as_it_was(store, tmp_path):
    bundle = stage_weights(store, tmp_path / "a")
    miss = found(bundle, Outcome.MISS, differences=("max_num_seqs: 4 -> 8",))
    record_proof(store, found(bundle))
    record_proof(store, miss)
    assert proof(store, "m") == miss


def test_another_generation_has_to_be_proven_anew_and_a_rollback_needs_not(store, tmp_path):
    bundle = stage_weights(store, tmp_path / "a")
    record_proof(store, found(bundle))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "more").write_text("x")
    stage(
        Spec.model_validate(
            {"deployment": "m", "artifacts": [{"name": "other", "uri": f"file://{tmp_path / 'b'}"}]}
        ),
        store,
    )
    assert current_bundle(store, "m") != bundle
    assert proof(store, "m") is None
    rollback(store, "m", to=bundle)
    assert proof(store, "m") == found(bundle)


def test_a_row_of_another_version_is_no_proof(store, tmp_path):
    bundle = stage_weights(store, tmp_path / "a")
    ledger.append(store, "proof", deployment="m", bundle=bundle, outcome="splendid")
    ledger.append(store, "proof", deployment="m", bundle=bundle)
    assert proof(store, "m") is None


def test_what_a_replica_had_is_read_from_the_row_of_its_newest_start(store):
    for start, replica, outcome in (
        ("a", "x::app#1", "miss"),
        ("b", "x::app#2", "hit"),
        ("c", "x::else#1", "none"),
    ):
        ledger.append(store, "start", start=start, replica=replica)
        ledger.append(store, "engine", start=start, compile={"outcome": outcome})
    assert what_it_had("app", store.root) == {"outcome": "hit"}


def test_nodes_with_the_same_identity_and_bundle_are_one_kind():
    nodes = [Node(str(n), f"10.0.0.{n}", f"h{n}") for n in range(4)]
    a10, l4 = Identity(gpu_name="A10G"), Identity(gpu_name="L4")
    kinds = _kinds({
        nodes[0]: Candidate("", "bundle-1", 0, a10),
        nodes[1]: Candidate("", "bundle-1", 2, l4),
        nodes[2]: Candidate("", "bundle-1", 1, a10),
        nodes[3]: Candidate("", "bundle-2", 0, a10),
    })  # fmt: skip
    assert kinds == [[nodes[0], nodes[2]], [nodes[1]], [nodes[3]]]


def test_a_scale_up_may_insist_on_it():
    require_proof("m", [Proven(found("b"), ("10.0.0.1",))])
    miss = Proven(found("b", Outcome.MISS, differences=("tp: 1 -> 2 (capture again)",)), ("10.0.0.1",))
    with pytest.raises(NotReadyError, match=r"m: 10\.0\.0\.1: miss: why .*tp: 1 -> 2"):
        require_proof("m", [miss])


ONE, OTHER = (Node(str(n), f"10.0.0.{n}", f"h{n}") for n in (1, 2))


def test_it_holds_for_the_nodes_that_have_written_it_down_and_the_others_are_named():
    lost = ClusterError("no answer within 60 s", where="10.0.0.2")
    said: list[str] = []
    assert keepers([Answer(ONE, True), Answer(OTHER, error=lost)], said.append) == ("10.0.0.1",)
    assert said == ["not proven on 10.0.0.2: no answer within 60 s (10.0.0.2)"]
    with pytest.raises(ClusterError, match="no node has kept the proof: no answer"):
        keepers([Answer(OTHER, error=lost)], said.append)


def test_a_node_that_cannot_keep_it_or_runs_another_generation_says_so(store, tmp_path):
    bundle = stage_weights(store, tmp_path / "a")
    assert remember(found(bundle), store.root)
    with pytest.raises(NotReadyError, match="not in the ledger, or is not of what is live"):
        remember(found("bundle-of-before"), store.root)
    store.ledger.unlink()
    store.ledger.mkdir()
    with pytest.raises(Exception, match="ledger"):
        remember(found(bundle), store.root)


@pytest.mark.parametrize(
    ("outcome", "new_kernels", "used"),
    [("hit", 0, True), ("partial", 0, True), ("partial", 3, False), ("miss", 0, False)],
)
def test_a_proof_says_what_the_replica_has_written_down(outcome, new_kernels, used):
    difference = {"field": "tp", "produced": "1", "here": "2", "fix": "capture again"}
    had = {"outcome": outcome, "reason": "why", "new_kernels": new_kernels, "init_seconds": 12.5}
    assert _proof("m", "b", ONE, {**had, "differences": [difference]}) == Proof(
        "m", "b", Outcome(outcome), "why", used, "10.0.0.1", 12.5, ("tp: 1 -> 2 (capture again)",)
    )
    silent = _proof("m", "b", ONE, {})
    assert (silent.outcome, silent.used, silent.reason) == (
        Outcome.NONE, False, "the replica could not tell",
    )  # fmt: skip
