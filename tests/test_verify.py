"""The full check reads every byte, says what is wrong, and blesses only what it has read."""

from __future__ import annotations

import os
import shutil

import pytest

from llm_prefetch.record import Verdict
from llm_prefetch.store import write_file
from llm_prefetch.verify import Check, full_check, quick_check, worst
from tests.samples import (
    FILES,
    TOTAL,
    Counter,
    FakeOrigin,
    as_after_reboot,
    flip_byte,
    make_folder,
    make_manifest,
    make_source,
    only_record,
    stage_source,
)

pytestmark = pytest.mark.usefixtures("no_leaks")
VERSION = make_manifest().version
WEIGHTS = "layers/0/weights.bin"


@pytest.fixture
def final(store):
    stage_source(store, make_source())
    return store.artifact("weights", VERSION)


def _full(store, progress=None):
    return full_check(store, "weights", VERSION, progress)


def _quick(store):
    return quick_check(store, "weights", VERSION)


def test_every_byte_is_read_and_counted(store, final):
    progress = Counter()
    check = _full(store, progress)
    assert check == Check("weights", VERSION, Verdict.HIT, "", len(FILES), TOTAL)
    assert check.ready
    assert progress.total == progress.done == TOTAL


@pytest.mark.parametrize("body", [b"{nonsense", make_manifest({"other": b"x"}).to_json()])
def test_a_damaged_copy_of_the_manifest_is_corrupt_from_then_on_and_mended_by_staging(store, final, body):
    copy = store.manifest("weights", VERSION)
    copy.chmod(0o644)
    copy.write_bytes(body)
    assert _full(store).verdict is Verdict.CORRUPT
    assert _quick(store).verdict is Verdict.CORRUPT
    again = make_source()
    stage_source(store, again)
    assert _full(store).verdict is Verdict.HIT
    assert again.origin.reads == []  # its files were right


@pytest.mark.parametrize("at", [0, 8, 35])
def test_one_flipped_byte_is_corrupt_even_where_its_time_did_not_change(store, final, at):
    flip_byte(final / WEIGHTS, at)
    assert _quick(store).ready  # by design: only reading can tell
    check = _full(store)
    assert check.verdict is Verdict.CORRUPT
    assert f"{WEIGHTS!r} from byte {at // 8 * 8}" in check.reason
    assert not check.ready


def test_several_wrong_chunks_are_counted(store, final):
    for at in (0, 8, 16):
        flip_byte(final / WEIGHTS, at)
    assert "and 2 more chunks" in _full(store).reason


def test_a_corrupt_version_is_not_sealed_again(store, final):
    flip_byte(final / WEIGHTS)
    os.utime(final / WEIGHTS)
    _full(store)
    assert _quick(store).verdict is Verdict.CORRUPT


@pytest.mark.parametrize(
    ("damage", "verdict"),
    [
        (lambda final: (final / WEIGHTS).unlink(), Verdict.PARTIAL),
        (lambda final: os.truncate(final / WEIGHTS, 8), Verdict.PARTIAL),
        (shutil.rmtree, Verdict.PARTIAL),
        (lambda final: make_folder(final, {"layers/more": b""}), Verdict.CORRUPT),
        (lambda final: (final / "link").symlink_to("/etc"), Verdict.CORRUPT),
        (lambda final: os.mkfifo(final / "pipe"), Verdict.CORRUPT),
    ],
)
def test_missing_and_foreign_files_are_told(store, final, damage, verdict):
    damage(final)
    assert _full(store).verdict is verdict
    assert not _quick(store).ready


def test_a_link_to_the_right_bytes_is_not_the_file(store, final, tmp_path):
    (final / WEIGHTS).rename(tmp_path / "elsewhere")
    (final / WEIGHTS).symlink_to(tmp_path / "elsewhere")
    assert _full(store).verdict is Verdict.CORRUPT


@pytest.mark.parametrize("body", [b"", b"{}", None, make_manifest({"a": b""}).to_json()])
def test_a_manifest_that_is_not_that_of_the_version_is_corrupt(store, final, body):
    store.manifest("weights", VERSION).unlink()
    if body is not None:
        write_file(store.manifest("weights", VERSION), body)
    check = _full(store)
    assert check.verdict is Verdict.CORRUPT
    assert "manifest" in check.reason


def test_nothing_staged_is_missing(store):
    assert _full(store).verdict is Verdict.MISSING
    assert _quick(store) == Check("weights", VERSION, Verdict.MISSING, "not staged on this node", 0, 0)


def test_a_touched_version_is_sealed_again_once_its_bytes_are_proven(store, final):
    os.utime(final / WEIGHTS)
    os.utime(final / "layers")
    assert _quick(store).verdict is Verdict.CORRUPT
    assert _full(store).ready
    assert _quick(store).ready
    assert only_record(store).boot == ""


def test_a_version_in_doubt_after_a_reboot_counts_again_once_its_bytes_are_proven(store, final):
    as_after_reboot(store, only_record(store))
    assert _quick(store).verdict is Verdict.STALE
    assert _full(store).ready
    assert _quick(store).ready
    assert only_record(store).boot == ""


def test_a_version_in_doubt_that_lost_bytes_does_not_count_again(store, final):
    as_after_reboot(store, only_record(store))
    flip_byte(final / WEIGHTS)
    assert _full(store).verdict is Verdict.CORRUPT
    assert _quick(store).verdict is Verdict.CORRUPT


def test_an_untouched_record_is_left_alone(store, final):
    before = store.record("weights", VERSION).stat().st_ino
    _full(store)
    assert store.record("weights", VERSION).stat().st_ino == before


@pytest.mark.parametrize("name", sorted(set(FILES) - {"empty"}))
def test_a_file_that_is_changed_while_it_is_checked_is_not_blessed(store, final, name):
    """It is rewritten after its bytes were read: the old bytes were right, what lies there now was never seen."""
    progress = Counter()

    def rewrite(delta):
        if progress.done == TOTAL:
            (final / name).chmod(0o644)
            (final / name).write_bytes(bytes(len(FILES[name])))
            os.utime(final / name, ns=(1, 1))

    progress.on_advance = rewrite
    check = _full(store, progress)
    assert check.verdict is Verdict.CORRUPT
    assert "while they were read" in check.reason
    assert not _quick(store).ready


def test_the_verdict_that_decides_is_the_first_that_is_no_hit(store, final):
    hit = _quick(store)
    partial = Check("x", "v", Verdict.PARTIAL, "why", 0, 0)
    missing = Check("y", "v", Verdict.MISSING, "why", 0, 0)
    assert worst([hit, partial, missing]) is Verdict.PARTIAL
    assert worst([hit]) is worst([]) is Verdict.HIT


def test_empty_files_are_checked_too(store):
    source = make_source(FakeOrigin({"empty": b"", "one": b"1"}))
    version = stage_source(store, source).version
    assert full_check(store, "weights", version).ready
    path = store.artifact("weights", version) / "empty"
    path.chmod(0o644)
    path.write_bytes(b"x")
    assert full_check(store, "weights", version).verdict is Verdict.PARTIAL


def test_a_full_check_keeps_how_the_origin_was_read(store):
    stage_source(store, make_source(transport="fsspec"))
    record = as_after_reboot(store, only_record(store))
    assert full_check(store, record.name, record.version).ready
    assert only_record(store).transport == "fsspec"
