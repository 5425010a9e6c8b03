"""Artifacts of kind `compile-cache`: staged where they are pinned and fit, else left out, and said so."""

from __future__ import annotations

import json

import pytest
from blake3 import blake3
from pydantic import ValidationError

from llm_prefetch import ledger
from llm_prefetch.caches.identity import Identity
from llm_prefetch.caches.install import cache_root, check_installed
from llm_prefetch.errors import DigestError, NotReadyError, OriginChangedError, TrustError
from llm_prefetch.forecast import find_sources, forecast
from llm_prefetch.live import check_deployment, current_bundle, read_bundle
from llm_prefetch.publish import publish
from llm_prefetch.record import Verdict
from llm_prefetch.spec import Spec
from llm_prefetch.stage import stage
from tests.caches.made import ANY, CACHE, GRAPH, make_spec, publish_cache, stage_cache
from tests.samples import FILES, make_folder, make_published

ELSEWHERE = Identity(ordinals=(), engine_path="/another/root/live/llama/weights")


def _members(store):
    bundle = read_bundle(store, current_bundle(store, "llama") or "")
    assert bundle is not None
    return {member.name: member for member in bundle.members}


def test_a_pinned_cache_that_fits_is_staged_installed_and_trusted(store, tmp_path):
    report = stage_cache(store, tmp_path, ANY)
    assert report.left_out == ()
    member = _members(store)["compile"]
    assert (member.kind, member.pinned) == ("compile-cache", True)
    assert check_deployment(store, "llama").verdict is Verdict.HIT
    assert check_installed(store, "llama", member.version) == ""
    [row] = ledger.read(store, "stage")
    assert "install" in [step["step"] for step in row["steps"]]


def test_one_that_does_not_fit_is_not_fetched_and_the_model_goes_live(store, tmp_path):
    report = stage_cache(store, tmp_path, ELSEWHERE)
    [left] = report.left_out
    assert (left.name, left.verdict) == ("compile", Verdict.INCOMPATIBLE)
    [difference] = left.differences
    assert difference.field == "engine_path"
    assert difference.here == str(store.engine_path("llama", "weights"))
    assert not list(store.root.glob("artifacts/compile/*"))
    assert not cache_root(store, "llama").exists()
    assert set(_members(store)) == {"weights"}
    assert check_deployment(store, "llama").verdict is Verdict.HIT
    assert report.verdict is Verdict.HIT


def test_the_ledger_has_the_exact_fields(store, tmp_path):
    stage_cache(store, tmp_path, ELSEWHERE)
    [row] = ledger.read(store, "stage")
    [left] = row["left_out"]
    assert (left["name"], left["verdict"]) == ("compile", "INCOMPATIBLE")
    assert left["differences"][0]["produced"] == "/another/root/live/llama/weights"
    assert row["outcome"] == "ready"


def test_a_cache_of_another_configuration_of_the_model_does_not_fit(store, tmp_path):
    right = Identity(ordinals=(), config=blake3(FILES["config.json"]).hexdigest())
    assert stage_cache(store, tmp_path, right).left_out == ()
    changed = {**FILES, "config.json": b'{"a": 2}'}
    cache = publish_cache(tmp_path / "cache", right)
    again = stage(make_spec(tmp_path, cache, make_published(tmp_path / "changed", changed)), store)
    assert [difference.field for difference in again.left_out[0].differences] == ["config"]


def test_new_weights_of_the_same_configuration_keep_the_installed_cache(store, tmp_path):
    right = Identity(ordinals=(), config=blake3(FILES["config.json"]).hexdigest())
    stage_cache(store, tmp_path, right)
    path = cache_root(store, "llama") / GRAPH / "rank_0_0" / "model"
    before, bundle = path.stat(), current_bundle(store, "llama")
    changed = {**FILES, "layers/1/weights.bin": b"new weights"}
    cache = publish_cache(tmp_path / "cache", right)
    report = stage(make_spec(tmp_path, cache, make_published(tmp_path / "changed", changed)), store)
    assert report.left_out == ()
    assert report.switched
    assert current_bundle(store, "llama") != bundle
    assert path.stat() == before


def test_one_that_does_not_say_what_it_was_built_for_does_not_fit(store, tmp_path):
    [left] = stage_cache(store, tmp_path, None).left_out
    assert left.verdict is Verdict.INCOMPATIBLE
    assert "does not say what it was built for" in left.reason


def test_without_a_pin_it_is_untrusted_and_left_out(store, tmp_path):
    [left] = stage_cache(store, tmp_path, ANY, version=None).left_out
    assert (left.verdict, left.reason) == (
        Verdict.UNTRUSTED,
        "it is code, and the spec does not pin its version",
    )
    assert not list(store.root.glob("artifacts/compile/*"))
    assert check_deployment(store, "llama").verdict is Verdict.HIT


def test_without_a_pin_its_origin_is_not_even_asked(store, tmp_path):
    spec = make_spec(tmp_path, ("file:///nowhere/at/all", ""), version=None)
    assert [left.verdict for left in stage(spec, store).left_out] == [Verdict.UNTRUSTED]


def test_where_it_is_required_its_lack_fails_the_staging(store, tmp_path):
    with pytest.raises(NotReadyError, match="compile is INCOMPATIBLE on this node: engine_path"):
        stage_cache(store, tmp_path, ELSEWHERE, required=True)
    with pytest.raises(TrustError, match="compile: it is code"):
        stage_cache(store, tmp_path, ANY, required=True, version=None)
    assert current_bundle(store, "llama") is None


def test_only_a_cache_can_be_left_out():
    with pytest.raises(ValidationError, match="which is never left out"):
        Spec.model_validate(
            {"deployment": "x", "artifacts": [{"name": "w", "uri": "file:///x", "required": True}]}
        )


def test_another_cache_than_the_pinned_one_fails_the_staging(store, tmp_path):
    uri, _ = publish_cache(tmp_path / "cache", ANY)
    with pytest.raises(DigestError, match="the spec pins"):
        stage(make_spec(tmp_path, (uri, "b3-" + "0" * 64)), store)


@pytest.mark.parametrize(
    ("poison", "error"), [(b"a pickled", OriginChangedError), (b"a pickled virus", DigestError)]
)
def test_poison_at_the_origin_never_gets_to_where_engines_read(store, tmp_path, poison, error):
    cache = publish_cache(tmp_path / "cache", ANY)
    (tmp_path / "cache" / GRAPH / "rank_0_0" / "model").write_bytes(poison)
    with pytest.raises(error):
        stage(make_spec(tmp_path, cache), store)
    assert not cache_root(store, "llama").exists()


def test_a_copy_that_cannot_be_made_does_not_fail_the_staging(store, tmp_path):
    (store.root / "caches").write_text("in the way")
    report = stage_cache(store, tmp_path, ANY)
    assert (report.verdict, report.left_out) == (Verdict.HIT, ())
    [row] = ledger.read(store, "stage")
    [step] = [step for step in row["steps"] if step["step"] == "install"]
    assert "caches" in step["outcome"]


def test_the_plan_leaves_it_out_too(store, tmp_path):
    spec = make_spec(tmp_path, publish_cache(tmp_path / "cache", ELSEWHERE))
    assert [one.name for one in forecast(spec, store, find_sources(spec, store)).artifacts] == ["weights"]
    assert [one.name for one in _first(store, tmp_path)] == ["compile", "weights"]


def _first(store, tmp_path):
    spec = make_spec(tmp_path, publish_cache(tmp_path / "other", ANY))
    return sorted(
        forecast(spec, store, find_sources(spec, store)).artifacts, key=lambda summary: summary.name
    )


def test_publishing_puts_the_identity_into_the_manifest_and_the_version(tmp_path):
    folder, origin = make_folder(tmp_path / "local", CACHE), tmp_path / "origin"
    origin.mkdir()
    plain = publish(folder, f"file://{origin}").version
    report = publish(folder, f"file://{origin}", identity=ANY.to_manifest())
    body = json.loads((origin / ".llm-prefetch" / "manifest.json").read_text())
    assert body["identity"] == {"format": 1, "ordinals": []}
    assert report.version != plain
