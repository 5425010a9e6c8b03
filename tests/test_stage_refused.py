"""What an origin holds and a spec or a manifest does not say is never committed, and what was live stays so."""

from __future__ import annotations

import json
import os

import pytest

from llm_prefetch import ledger
from llm_prefetch.errors import (
    DigestError,
    OriginChangedError,
    OriginNotFoundError,
    UnsafePathError,
    UnsupportedOriginError,
)
from llm_prefetch.live import check_deployment, current_bundle
from llm_prefetch.stage import stage
from tests.samples import (
    FILES,
    WEIGHTS,
    Counter,
    FakeOrigin,
    engine_files,
    flip_byte,
    make_folder,
    make_listing,
    make_manifest,
    make_published,
    make_source,
    make_spec,
    no_record,
    only_record,
    put_manifest,
    raises,
    stage_source,
)

pytestmark = pytest.mark.usefixtures("no_leaks")
OTHER_PIN = "b3-" + "0" * 64


def test_a_pin_that_fits_is_staged(store, origin):
    version = make_manifest().version
    assert stage(make_spec(f"file://{origin}", version=version), store).artifacts[0].version == version


@pytest.mark.parametrize("staged_before", [True, False])
def test_a_pin_holds_for_a_prefix_that_nobody_published(store, tmp_path, staged_before):
    """Also when the very same listing is committed here already, under the version that it really is."""
    make_folder(tmp_path / "o")
    if staged_before:
        stage(make_spec(f"file://{tmp_path}/o"), store)
    with raises(DigestError, 5, "the spec pins b3-00"):
        stage(make_spec(f"file://{tmp_path}/o", version=OTHER_PIN, deployment="pinned"), store)
    assert current_bundle(store, "pinned") is None


def test_a_pin_that_the_origin_does_not_hold_changes_nothing(store, origin):
    before = stage(make_spec(f"file://{origin}"), store)
    with raises(DigestError, 5, "the spec pins b3-00"):
        stage(make_spec(f"file://{origin}", version=OTHER_PIN), store)
    assert current_bundle(store, "llama") == before.bundle


@pytest.mark.parametrize("path", ["config.json", WEIGHTS, "layers/1/weights.bin"])
def test_a_chunk_with_wrong_bytes_is_never_committed(store, origin, path):
    before = stage(make_spec(f"file://{origin}"), store)
    make_published(origin, {**FILES, "new": b"1", path: FILES[path][::-1]})
    flip_byte(origin / path, 3)
    progress = Counter()
    with raises(DigestError, 5, path, str(origin)):
        stage(make_spec(f"file://{origin}"), store, progress=progress)
    assert only_record(store).version == before.artifacts[0].version
    assert current_bundle(store, "llama") == before.bundle
    assert check_deployment(store, "llama", full=True).ready
    assert engine_files(store) == FILES
    assert ledger.read(store, "stage")[-1]["outcome"].startswith(f"{path!r}: bytes 0 to ")
    assert 0 <= progress.done < progress.total


@pytest.mark.parametrize("size", [-1, +1])
def test_a_size_that_disagrees_with_the_origin_is_refused(store, origin, size):
    os.truncate(origin / WEIGHTS, len(FILES[WEIGHTS]) + size)
    with raises(OriginChangedError, 3, WEIGHTS, str(len(FILES[WEIGHTS]) + size)):
        stage(make_spec(f"file://{origin}"), store)
    assert no_record(store)


def test_a_file_that_is_gone_from_the_origin_is_named(store, origin):
    (origin / WEIGHTS).unlink()
    with raises(OriginNotFoundError, 3, WEIGHTS):
        stage(make_spec(f"file://{origin}"), store)
    assert no_record(store)


def test_a_listed_file_that_changes_before_it_is_read_is_refused(store):
    origin = FakeOrigin()
    listing = make_listing(origin)
    changed = OriginChangedError("changed", where="fake://origin", hint="again")
    origin.fault = lambda read: changed
    with raises(OriginChangedError, 3):
        stage_source(store, make_source(origin, listing))
    assert no_record(store)


@pytest.mark.parametrize("path", ["../escape", "/tmp/escape", "", "a\\b", "a\0b"])
def test_a_manifest_with_an_unsafe_path_writes_nothing(store, origin, path):
    body = json.loads(make_manifest().to_json())
    body["files"] = [[path, 0, []]]
    put_manifest(origin, json.dumps(body).encode())
    before = sorted(store.root.rglob("*"))
    with raises(UnsafePathError, 5, repr(path)):
        stage(make_spec(f"file://{origin}"), store)
    assert sorted(p for p in store.root.rglob("*") if p.parent.name not in ("ledger", "locks")) == before


def test_an_unknown_scheme_leaves_the_store_alone(store):
    with raises(UnsupportedOriginError, 2, "gopher://"):
        stage(make_spec("gopher://host/x"), store)
    assert no_record(store)


def test_when_one_artifact_fails_nothing_goes_live_and_the_others_are_kept(store, origin, tmp_path):
    spec = make_spec(f"file://{origin}", f"file://{tmp_path}/none")
    with raises(OriginNotFoundError, 3):
        stage(spec, store)
    assert current_bundle(store, "llama") is None
    make_published(tmp_path / "none", {"x": b"12"})
    report = stage(spec, store)
    assert [artifact.fetched_bytes for artifact in report.artifacts] == [0, 2]
