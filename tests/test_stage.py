"""Staging: from a spec to a deployment that is live, safe to repeat, and all or nothing."""

from __future__ import annotations

import os
import threading

import pytest

from llm_prefetch import ledger
from llm_prefetch.errors import (
    DigestError,
    PrefetchError,
)
from llm_prefetch.forecast import find_sources, forecast
from llm_prefetch.live import check_deployment, current_bundle, rollback
from llm_prefetch.manifest import CHUNK_BYTES
from llm_prefetch.publish import publish
from llm_prefetch.record import Verdict
from llm_prefetch.stage import stage
from llm_prefetch.store import open_store
from tests.samples import (
    FILES,
    TOTAL,
    WEIGHTS,
    Counter,
    FakeOrigin,
    engine_files,
    make_artifact,
    make_folder,
    make_listing,
    make_manifest,
    make_published,
    make_source,
    make_spec,
    no_record,
    only_record,
    raises,
    stage_source,
    take_data_away,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


def test_staging_makes_a_deployment_live_and_says_what_it_did(store, origin):
    progress = Counter()
    report = stage(make_spec(f"file://{origin}"), store, progress=progress)
    [artifact] = report.artifacts
    assert (artifact.total_bytes, artifact.fetched_bytes, artifact.reused_bytes) == (TOTAL, TOTAL, 0)
    assert (report.verdict, report.switched, report.fetched_bytes) == (Verdict.HIT, True, TOTAL)
    assert (progress.total, progress.done) == (TOTAL, TOTAL)
    assert engine_files(store) == FILES
    assert check_deployment(store, "llama", full=True).ready
    assert list((store.root / "partial").iterdir()) == []
    assert only_record(store).boot == ""  # synced


def test_staging_again_reads_no_byte_of_the_data(store, origin):
    stage(make_spec(f"file://{origin}"), store)
    take_data_away(origin)
    report = stage(make_spec(f"file://{origin}"), store)
    assert (report.fetched_bytes, report.reused_bytes, report.switched) == (0, TOTAL, False)


def test_staging_a_listing_again_reads_no_byte_of_the_data(store):
    origin = FakeOrigin()
    source = make_source(origin, make_listing(origin))
    stage_source(store, source)
    assert origin.bytes_read == TOTAL
    origin.reads.clear()
    assert stage_source(store, source).fetched_bytes == 0
    assert origin.reads == []


def _planned(spec, store):
    return forecast(spec, store, find_sources(spec, store)).artifacts


def test_the_plan_says_what_staging_then_does(store, origin):
    spec = make_spec(f"file://{origin}", f"file://{origin}")
    assert [one.fetch_bytes for one in _planned(spec, store)] == [TOTAL, TOTAL]
    stage(make_spec(f"file://{origin}"), store)
    assert [one.fetch_bytes for one in _planned(spec, store)] == [0, 0], "the other name can share the files"
    assert stage(spec, store).fetched_bytes == 0


def test_a_listing_and_a_publication_of_the_same_bytes_are_the_same_version(store, tmp_path):
    files = {**FILES, "big": os.urandom(CHUNK_BYTES + 5)}
    make_folder(tmp_path / "listed", files)
    published = publish(tmp_path / "listed", f"file://{tmp_path}/published")
    report = stage(make_spec(f"file://{tmp_path}/listed"), store)
    assert report.artifacts[0].version == published.version
    assert stage(make_spec(f"file://{tmp_path}/published"), store).fetched_bytes == 0
    assert only_record(store).listing
    assert stage(make_spec(f"file://{tmp_path}/listed"), store).fetched_bytes == 0


def test_a_version_that_is_here_by_another_way_serves(store, tmp_path):
    """Published first, listed later: the bytes are fetched once more, as nobody knows yet that they are the same."""
    make_folder(tmp_path / "listed")
    publish(tmp_path / "listed", f"file://{tmp_path}/published")
    one = stage(make_spec(f"file://{tmp_path}/published"), store)
    inode = (store.artifact("weights", one.artifacts[0].version) / WEIGHTS).stat().st_ino
    two = stage(make_spec(f"file://{tmp_path}/listed"), store)
    assert one.bundle == two.bundle
    assert (store.artifact("weights", one.artifacts[0].version) / WEIGHTS).stat().st_ino == inode
    assert stage(make_spec(f"file://{tmp_path}/listed"), store).fetched_bytes == 0
    assert list((store.root / "partial").iterdir()) == []


def test_an_origin_that_was_only_touched_gives_the_same_version(store, tmp_path):
    make_folder(tmp_path / "o")
    one = stage(make_spec(f"file://{tmp_path}/o"), store)
    os.utime(tmp_path / "o" / WEIGHTS, ns=(1, 1))
    two = stage(make_spec(f"file://{tmp_path}/o"), store)
    assert (two.bundle, two.switched) == (one.bundle, False)


def test_a_new_version_goes_live_and_the_old_one_stays_for_a_rollback(store, origin):
    one = stage(make_spec(f"file://{origin}"), store)
    make_published(origin, {**FILES, "config.json": b'{"a": 2}'})
    two = stage(make_spec(f"file://{origin}"), store)
    assert two.switched
    assert engine_files(store)["config.json"] == b'{"a": 2}'
    rollback(store, "llama")
    assert current_bundle(store, "llama") == one.bundle
    assert engine_files(store) == FILES


def test_artifacts_with_the_same_content_are_each_whole(store, origin):
    report = stage(make_spec(f"file://{origin}", f"file://{origin}"), store)
    assert report.artifacts[0].version == report.artifacts[1].version
    assert engine_files(store, "weights") == engine_files(store, "weights1") == FILES


def test_a_manifest_that_the_run_knows_is_what_every_node_stages(store, tmp_path):
    make_folder(tmp_path / "o")
    known = {"weights": make_manifest()}
    report = stage(make_spec(f"file://{tmp_path}/o"), store, manifests=known)
    assert report.artifacts[0].version == make_manifest().version
    make_folder(tmp_path / "o", {"config.json": b'{"a": 2}'})
    other = open_store(tmp_path / "other", create=True)
    with raises(DigestError, 5, "config.json"):
        stage(make_spec(f"file://{tmp_path}/o"), other, manifests=known)
    assert no_record(other)


def test_stagings_of_one_version_at_once_fetch_it_once(store):
    source, reports = make_source(), []
    threads = [threading.Thread(target=lambda: reports.append(stage_source(store, source))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(report.fetched_bytes for report in reports) == [0, 0, 0, TOTAL]
    assert source.origin.bytes_read == TOTAL
    assert source.origin.readers > 0


def test_the_ledger_tells_what_was_staged_and_by_which_steps(store, origin):
    report = stage(make_spec(f"file://{origin}"), store)
    [row] = ledger.read(store, "stage")
    assert (row["deployment"], row["outcome"]) == ("llama", "ready")
    version = report.artifacts[0].version
    assert row["artifacts"] == [
        {"name": "weights", "version": version, "fetched": TOTAL, "reused": 0, "evicted": 0}
    ]
    steps = [step["step"] for step in row["steps"]]
    assert steps == ["resolve", "lock", "prepare", "transfer", "commit", "verify", "live", "sync"]


def test_no_secret_of_the_uri_is_recorded(store):
    source = make_source(uri="s3://key:secret@bucket/x")
    stage_source(store, source)
    assert only_record(store).uri == "s3://bucket/x"
    assert "secret" not in "".join(path.read_text() for path in store.root.rglob("*.json"))


def test_a_cancelled_staging_changes_nothing_and_can_go_on(store, origin):
    stop = threading.Event()
    stop.set()
    with pytest.raises(PrefetchError, match="cancelled"):
        stage(make_spec(f"file://{origin}"), store, stop=stop)
    assert no_record(store)
    assert stage(make_spec(f"file://{origin}"), store).verdict is Verdict.HIT


def test_the_report_of_nothing_but_hits_is_a_hit(store, origin):
    report = stage(make_spec(f"file://{origin}", f"file://{origin}"), store)
    assert report.verdict is Verdict.HIT
    assert report.fetched_bytes + report.reused_bytes == 2 * TOTAL
    assert make_artifact().name == "weights"
