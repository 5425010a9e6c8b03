"""Staging again what was touched, damaged, or perhaps lost in a reboot: proven first, and only what is wrong is fetched."""

from __future__ import annotations

import os

import pytest

from llm_prefetch.live import check_deployment
from llm_prefetch.record import Verdict, check_record
from llm_prefetch.stage import stage
from tests.samples import (
    CHUNK,
    FILES,
    TOTAL,
    WEIGHTS,
    Counter,
    FakeOrigin,
    as_after_reboot,
    engine_files,
    flip_byte,
    make_folder,
    make_listing,
    make_source,
    make_spec,
    only_record,
    stage_source,
    take_data_away,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


def test_a_touched_version_is_proven_and_not_fetched(store, origin):
    stage(make_spec(f"file://{origin}"), store)
    take_data_away(origin)
    os.utime(store.engine_path("llama", "weights") / WEIGHTS)
    progress = Counter()
    report = stage(make_spec(f"file://{origin}"), store, progress=progress)
    assert (report.fetched_bytes, report.verdict) == (0, Verdict.HIT)
    assert any("reading every byte" in line for line in progress.lines)
    assert progress.total == progress.done == TOTAL


@pytest.mark.parametrize("published", [True, False])
def test_after_a_reboot_a_version_that_was_not_synced_is_proven_before_it_counts(store, origin, published):
    source = make_source(FakeOrigin())
    if not published:
        source = make_source(source.origin, make_listing(source.origin))
    version = stage_source(store, source).version
    as_after_reboot(store, only_record(store))
    assert check_record(store, "weights", version).verdict is Verdict.STALE
    source.origin.reads.clear()
    assert stage_source(store, source).verdict is Verdict.HIT
    assert source.origin.reads == []
    assert only_record(store).boot == ""


def test_after_a_reboot_lost_bytes_are_found_and_fetched(store, origin):
    spec = make_spec(f"file://{origin}")
    stage(spec, store)
    as_after_reboot(store, only_record(store))
    path = store.engine_path("llama", "weights").resolve() / WEIGHTS
    flip_byte(path)
    report = stage(spec, store)
    assert report.fetched_bytes == CHUNK
    assert engine_files(store) == FILES
    assert check_deployment(store, "llama", full=True).ready


@pytest.mark.parametrize("published", [True, False])
def test_a_damaged_version_is_repaired_in_place_of_its_names(store, origin, tmp_path, published):
    uri = f"file://{origin}"
    if not published:
        uri = f"file://{make_folder(tmp_path / 'listed')}"
    one = stage(make_spec(uri), store)
    (store.engine_path("llama", "weights") / WEIGHTS).unlink()
    assert check_deployment(store, "llama").verdict is Verdict.PARTIAL
    two = stage(make_spec(uri), store)
    assert (one.bundle, two.switched) == (two.bundle, False)
    assert check_deployment(store, "llama", full=True).ready
    assert engine_files(store) == FILES


def test_progress_adds_up_when_proof_fails_and_bytes_are_fetched(store, origin):
    spec = make_spec(f"file://{origin}")
    stage(spec, store)
    path = store.engine_path("llama", "weights").resolve() / WEIGHTS
    flip_byte(path)
    os.utime(path)
    progress = Counter()
    stage(spec, store, progress=progress)
    assert progress.done == progress.total == 2 * TOTAL
