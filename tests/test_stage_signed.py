"""Code without a pin in a staging: a signature that the spec trusts stands for the pin, and nothing else does."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from llm_prefetch import manifest as manifests
from llm_prefetch.caches.install import HEADERS_VARIABLE
from llm_prefetch.caches.quarantine import end
from llm_prefetch.cluster.inspection import compare, live_bundle, settle, wanted_by
from llm_prefetch.errors import MissingExtraError, TrustError
from llm_prefetch.forecast import find_sources, forecast
from llm_prefetch.live import check_deployment, current_bundle, read_bundle
from llm_prefetch.record import Verdict
from llm_prefetch.sealing import seal_prefix
from llm_prefetch.serve.caches import offer_cache
from llm_prefetch.signatures import sign_published
from llm_prefetch.spec import Spec
from llm_prefetch.stage import stage
from tests.caches.made import ANY, CACHE, CpuNode, make_spec, publish_cache
from tests.samples import make_folder, make_manifest, make_published, put_manifest, raises
from tests.signing import make_key, signature_at

KEY, OTHER = make_key(1), make_key(2)
PLUGIN = {"model.py": b"class Mine: pass\n"}
CHANGED = {**CACHE, "modelinfos/llama.json": b"[]"}


@pytest.fixture
def origin(tmp_path):
    """Where a cache that fits is published and signed."""
    uri, version = publish_cache(tmp_path / "cache", ANY)
    sign_published(uri, version, KEY)
    return tmp_path / "cache"


def _spec(origin, *trusted, **options):
    """The cache, not pinned, and the weights."""
    given = make_spec(origin.parent, (f"file://{origin}", ""), version=None, **options)
    return Spec.model_validate({**given.model_dump(), "policy": {"trusted_keys": trusted or [KEY.public]}})


def _plugins(folder):
    artifact = {"name": "mine", "kind": "plugin", "uri": make_published(folder / "plugins", PLUGIN)}
    policy = {"trusted_keys": [KEY.public]}
    weights = {"name": "weights", "uri": make_published(folder / "weights")}
    return Spec.model_validate({"deployment": "llama", "artifacts": [weights, artifact], "policy": policy})


def _member(store, name="compile"):
    bundle = read_bundle(store, current_bundle(store, "llama"))
    return next((member for member in bundle.members if member.name == name), None)


def _nothing_of(store, name="compile"):
    return not list(store.root.glob(f"artifacts/{name}/*"))


def _offered(store, monkeypatch):
    """What a replica that starts is offered of the caches."""
    for name in ("VLLM_CACHE_ROOT", "TRITON_HOME", "FLASHINFER_WORKSPACE_BASE", HEADERS_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    engine = SimpleNamespace(hf_model_id=str(store.engine_path("llama", "weights")))
    config = SimpleNamespace(get_engine_config=lambda: engine, engine_kwargs={})
    found = offer_cache(
        "one", config, (store, check_deployment(store, "llama")), environment={}, node=CpuNode()
    )
    if found.version:
        end(store, found.start, found.held)
    return found


def test_a_signed_cache_is_staged_and_it_is_written_down_who_vouches(store, origin):
    assert stage(_spec(origin, OTHER.public, KEY.public), store).left_out == ()
    assert (_member(store).pinned, _member(store).signed_by) == (True, KEY.public)


def test_a_replica_takes_it_without_any_cryptography(store, origin, monkeypatch):
    stage(_spec(origin), store)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    signature_at(origin).unlink()
    assert check_deployment(store, "llama").verdict is Verdict.HIT
    assert _offered(store, monkeypatch).version == _member(store).version


def test_a_replica_does_not_take_what_nothing_vouches_for(store, origin, monkeypatch):
    stage(_spec(origin), store)
    [sidecar] = store.root.glob("bundles/*.json")
    body = json.loads(sidecar.read_text())
    body["members"][0].pop("pinned")  # who signed it alone does not count
    sidecar.write_text(json.dumps(body))
    found = _offered(store, monkeypatch)
    assert (found.verdict, found.version) == (Verdict.UNTRUSTED, "")
    assert (
        found.reason == "compile is UNTRUSTED: it is code, and no pin and no trusted signature vouches for it"
    )


def _unsigned(origin):
    signature_at(origin).unlink()


def _tampered(origin):
    publish_cache(origin, ANY, CHANGED)


def _by_another(origin):
    sign_published(f"file://{origin}", _version(origin), OTHER)


def _forged(origin):
    signature = OTHER.sign(make_manifest(CACHE, **ANY.to_manifest()))
    body = json.loads(signature.to_json()) | {"key": KEY.public}
    signature_at(origin).write_bytes(manifests.canonical_json(body))


def _sealed_again(origin):
    (origin / "modelinfos/llama.json").write_bytes(b"[]")
    seal_prefix(f"file://{origin}")


def _version(origin):
    return manifests.parse_manifest((origin / manifests.PATH).read_bytes(), "here").version


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_unsigned, "it is not signed"),
        (_tampered, "what is there now was not signed"),
        (_sealed_again, "what is there now was not signed"),
        (_by_another, "which policy.trusted_keys does not name"),
        (_forged, f"its signature is not by {KEY.public}, as it claims"),
    ],
    ids=["unsigned", "tampered", "published again", "another key", "forged"],
)
def test_any_other_cache_is_left_out_or_fails_where_it_is_required(store, origin, spoil, reason):
    spoil(origin)
    [left] = stage(_spec(origin), store).left_out
    assert (left.name, left.verdict) == ("compile", Verdict.UNTRUSTED)
    assert reason in left.reason
    assert ": " in left.reason.partition(reason)[2], "a hint"
    with raises(TrustError, 5, reason):
        stage(_spec(origin, required=True), store)
    assert _nothing_of(store)
    assert check_deployment(store, "llama").verdict is Verdict.HIT


def test_a_signature_alone_without_a_key_in_the_spec_counts_for_nothing(store, origin):
    spec = _spec(origin)
    [left] = stage(spec.model_copy(update={"policy": Spec.model_fields["policy"].default}), store).left_out
    assert left.reason == "it is code, and the spec does not pin its version"


def test_what_the_run_has_pinned_is_no_pin_of_the_user(store, origin):
    theirs = make_manifest(CHANGED, **ANY.to_manifest())
    [left] = stage(_spec(origin), store, manifests={"compile": theirs}).left_out
    assert left.verdict is Verdict.UNTRUSTED
    _unsigned(origin)
    [left] = stage(
        _spec(origin), store, manifests={"compile": make_manifest(CACHE, **ANY.to_manifest())}
    ).left_out
    assert "it is not signed" in left.reason
    assert _nothing_of(store)


def test_what_the_run_has_pinned_is_staged_where_it_is_what_was_signed(store, origin):
    signed = make_manifest(CACHE, **ANY.to_manifest())
    assert stage(_spec(origin), store, manifests={"compile": signed}).left_out == ()
    assert _member(store).version == signed.version


def test_a_pin_suffices_whatever_is_signed(store, origin):
    _by_another(origin)
    pinned = make_spec(origin.parent, (f"file://{origin}", _version(origin)))
    policy = _spec(origin).policy
    assert stage(pinned.model_copy(update={"policy": policy}), store).left_out == ()
    assert (_member(store).pinned, _member(store).signed_by) == (True, "")


def test_a_pin_and_signatures_make_the_same_bundle_and_the_last_to_vouch_is_known(store, origin):
    bundles = {stage(make_spec(origin.parent, (f"file://{origin}", _version(origin))), store).bundle}
    for key in (KEY, OTHER):
        sign_published(f"file://{origin}", _version(origin), key)
        report = stage(_spec(origin, key.public), store)
        bundles.add(report.bundle)
        assert not report.switched
        assert _member(store).signed_by == key.public
    assert len(bundles) == 1


def test_a_new_version_that_is_signed_is_staged_without_a_change_of_the_spec(store, origin):
    stage(_spec(origin), store)
    before = _member(store).version
    sign_published(*publish_cache(origin, ANY, CHANGED), KEY)
    assert stage(_spec(origin), store).switched
    assert _member(store).version == _version(origin) != before


def test_without_the_package_a_cache_is_left_out_and_a_plugin_fails(store, origin, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    [left] = stage(_spec(origin), store).left_out
    assert left.reason.endswith("pip install 'llm-prefetch[sign]'")
    spec = _plugins(origin.parent)
    make_folder(
        origin.parent / "plugins",
        {manifests.FOLDER + "/manifest.sig": KEY.sign(make_manifest(PLUGIN)).to_json()},
    )
    with pytest.raises(MissingExtraError):
        stage(spec, store)


def test_the_plan_says_the_same(store, origin):
    spec = _spec(origin)
    planned = forecast(spec, store, find_sources(spec, store))
    assert sorted(one.name for one in planned.artifacts) == ["compile", "weights"]
    _unsigned(origin)
    planned = forecast(spec, store, find_sources(spec, store))
    assert [one.name for one in planned.artifacts] == ["weights"]
    [left] = planned.left_out
    assert "it is not signed" in left.reason


def _lacks(spec, store):
    live = live_bundle("llama", store.root)
    return compare(live, settle(wanted_by(spec), [live])).reason


def test_a_reconcile_wants_what_is_signed_now_and_nothing_else(store, origin):
    stage(_spec(origin), store)
    assert _lacks(_spec(origin), store) == ""
    _by_another(origin)
    assert _lacks(_spec(origin, KEY.public, OTHER.public), store) == "", "the bytes are the same, and trusted"
    assert _lacks(_spec(origin), store) == "compile is live, and not in the spec"
    stage(_spec(origin), store)
    assert _lacks(_spec(origin), store) == ""
    assert _member(store) is None


def test_a_signed_plugin_is_staged_and_an_unsigned_one_stops_it_before_anything_is_fetched(store, tmp_path):
    spec = _plugins(tmp_path)
    with raises(TrustError, 5, "mine is code, the spec does not pin its version, and it is not signed"):
        stage(spec, store)
    assert _nothing_of(store, "weights")
    sign_published(f"file://{tmp_path}/plugins", make_manifest(PLUGIN).version, KEY)
    stage(spec, store)
    assert (_member(store, "mine").pinned, _member(store, "mine").signed_by) == (True, KEY.public)
    assert check_deployment(store, "llama").verdict is Verdict.HIT
    put_manifest(tmp_path / "plugins", make_manifest({"model.py": b"raise SystemExit"}).to_json())
    with pytest.raises(TrustError, match="what is there now was not signed"):
        stage(spec, store)
    assert _member(store, "mine").version == make_manifest(PLUGIN).version
