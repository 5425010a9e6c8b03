"""`caches` as its user meets it."""

from __future__ import annotations

import pytest
import yaml

from llm_prefetch.caches.evidence import Outcome
from llm_prefetch.caches.proof import Proof, record_proof
from llm_prefetch.caches.quarantine import Mark, mark_broken, marks
from llm_prefetch.errors import OriginNotFoundError
from llm_prefetch.live import current_bundle
from llm_prefetch.stage import stage
from tests.samples import make_artifact, make_published, make_spec

VERSION = "b3-" + "1" * 64


@pytest.fixture
def quarantined(store):
    mark_broken(store, Mark("compile", VERSION, "llama", "the start x that used it failed", "x"))
    return store


def test_without_any_it_says_so(run, store):
    outcome = run("caches", "--root", store.root)
    assert (outcome.code, outcome.out) == (0, "")
    assert "0 quarantined" in outcome.err


def test_each_is_listed_with_its_reason(run, quarantined):
    outcome = run("caches", "--root", quarantined.root)
    assert outcome.code == 0
    assert outcome.rows[-1][0] == "compile"
    assert outcome.rows[-1][-1] == "the start x that used it failed"
    [found] = run("caches", "--root", quarantined.root, "--json").json["quarantined"]
    assert (found["version"], found["deployment"]) == (VERSION, "llama")


def test_one_is_cleared_by_its_name(run, quarantined):
    outcome = run("caches", "--clear", "compile", "--root", quarantined.root)
    assert (outcome.code, marks(quarantined)) == (0, [])
    assert "1 offered again" in outcome.err


def test_a_name_that_is_not_quarantined_is_a_slip(run, quarantined):
    outcome = run("caches", "--clear", "other", "--root", quarantined.root)
    assert outcome.code == 2
    assert "no compile cache 'other' is quarantined" in outcome.err
    assert len(marks(quarantined)) == 1


@pytest.fixture
def proven(store, tmp_path):
    """Write down what an engine had of the cache of `llama`, as `prove` does."""
    make_published(tmp_path / "origin")
    stage(make_spec(f"file://{tmp_path / 'origin'}"), store)
    bundle = current_bundle(store, "llama") or ""

    def proven(outcome, **facts):
        used = outcome is not Outcome.MISS
        record_proof(store, Proof("llama", bundle, outcome, "as it was", used, "10.0.0.1", **facts))

    return proven


def test_a_node_where_no_engine_was_tried_is_not_proven(run, store, proven):
    assert run("verify", "llama", "--root", store.root).code == 0
    outcome = run("verify", "llama", "--proven", "--root", store.root)
    assert outcome.code == 1
    assert "no engine was tried with what is live here" in outcome.err


def test_a_node_where_the_cache_is_found_is_proven(run, store, proven):
    proven(Outcome.PARTIAL)
    assert run("verify", "llama", "--proven", "--root", store.root).code == 0


def test_a_node_where_the_cache_was_missed_is_not_proven_and_says_why(run, store, proven):
    proven(Outcome.HIT)
    proven(Outcome.MISS, differences=("max_num_seqs: 4 -> 8",))
    outcome = run("verify", "llama", "--proven", "--json", "--root", store.root)
    assert (outcome.code, outcome.json["ready"]) == (1, False)
    assert "miss on 10.0.0.1; as it was; max_num_seqs: 4 -> 8" in outcome.json["unproven"]
    assert all(check["verdict"] == "HIT" for check in outcome.json["checks"])


def test_only_a_live_deployment_can_be_proven(run, store, proven):
    for what in ([], ["weights"], ["nobody"]):
        outcome = run("verify", *what, "--proven", "--root", store.root)
        assert outcome.code == 2
        assert f"--proven goes with a deployment that is live here ({store.root})" in outcome.err


def test_a_node_that_does_without_a_cache_is_as_ready_by_its_spec_as_by_its_name(run, store, tmp_path):
    uri = make_published(tmp_path / "origin")
    cache = make_artifact(uri, "compile", kind="compile-cache")  # nothing vouches for it
    spec = make_spec(uri)
    spec = spec.model_copy(update={"artifacts": [*spec.artifacts, cache]})

    def verify(artifacts):
        path = tmp_path / "spec.yaml"
        path.write_text(
            yaml.safe_dump(spec.model_copy(update={"artifacts": artifacts}).model_dump(mode="json"))
        )
        return run("verify", path, "--json", "--root", store.root)

    [left] = stage(spec, store).left_out
    assert left.name == "compile"
    assert run("verify", "llama", "--root", store.root).code == 0
    outcome = verify(spec.artifacts)
    assert (outcome.code, [check["name"] for check in outcome.json["checks"]]) == (0, ["weights"])
    assert "compile was left out on this node" in outcome.err
    gone = make_spec(f"file://{tmp_path}/gone")
    with pytest.raises(OriginNotFoundError):  # a staging that fails has left the node as it was
        stage(gone, store)
    assert verify(spec.artifacts).code == 0
    required = cache.model_copy(update={"required": True, "version": VERSION})
    for missed in (required, cache.model_copy(update={"name": "other"})):
        outcome = verify([*spec.artifacts[:1], missed])
        assert outcome.code == 1
        assert [check["verdict"] for check in outcome.json["checks"]] == ["HIT", "MISSING"]
