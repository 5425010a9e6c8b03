"""The quick check: no content is read, and whatever a full check would refuse does not pass."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_prefetch.record import Verdict, check_record, read_record, records, write_record
from llm_prefetch.store import boot_id, open_store
from tests.samples import (
    FILES,
    FakeOrigin,
    as_after_reboot,
    make_manifest,
    make_source,
    only_record,
    stage_source,
)

VERSION = make_manifest().version


@pytest.fixture
def final(store):
    """The folder of a committed version."""
    stage_source(store, make_source())
    return store.artifact("weights", VERSION)


def _verdict(store):
    return check_record(store, "weights", VERSION).verdict


def _delete(final):
    (final / "config.json").unlink()


def _cut(final):
    os.truncate(final / "config.json", 1)


def _delete_folder(final):
    shutil.rmtree(final / "layers/1")


def _delete_all(final):
    shutil.rmtree(final)


def _touch(final):
    os.utime(final / "config.json", ns=(1, 1))


def _add(final):
    (final / "layers/0/more").write_bytes(b"")
    os.utime(final / "layers/0", ns=(1, 1))


def _link(final):
    (final / "config.json").rename(final.parent / "elsewhere")
    (final / "config.json").symlink_to(final.parent / "elsewhere")


def _folder_for_file(final):
    (final / "config.json").unlink()
    (final / "config.json").mkdir()


def _linked_folder(final):
    """With the times of the real one, so that nothing but its kind gives it away."""
    for inside in ("layers", ""):
        found = (final / inside).stat() if inside else None
        if found:
            (final / inside).rename(final.parent / "elsewhere")
            (final / inside).symlink_to(final.parent / "elsewhere")
            os.utime(final / inside, ns=(found.st_atime_ns, found.st_mtime_ns), follow_symlinks=False)


@pytest.mark.parametrize(
    ("damage", "verdict"),
    [
        (_delete, Verdict.PARTIAL),
        (_cut, Verdict.PARTIAL),
        (_delete_folder, Verdict.PARTIAL),
        (_delete_all, Verdict.PARTIAL),
        (_touch, Verdict.CORRUPT),
        (_add, Verdict.CORRUPT),
        (_link, Verdict.CORRUPT),
        (_folder_for_file, Verdict.CORRUPT),
        (_linked_folder, Verdict.CORRUPT),
    ],
)
def test_damage_shows_in_one_look(store, final, damage, verdict):
    before = final.stat()
    damage(final)
    if damage is _linked_folder:
        os.utime(final, ns=(before.st_atime_ns, before.st_mtime_ns))
    finding = check_record(store, "weights", VERSION)
    assert finding.verdict is verdict
    assert finding.reason


def test_an_untouched_version_hits(store, final):
    assert _verdict(store) is Verdict.HIT
    os.utime(final / "config.json", ns=(5, only_record(store).files[0][2]))  # reading changes the access time
    assert _verdict(store) is Verdict.HIT


def test_nothing_staged_is_missing(store):
    assert _verdict(store) is Verdict.MISSING


def test_a_folder_without_a_record_is_missing(store, final):
    store.record("weights", VERSION).unlink()
    finding = check_record(store, "weights", VERSION)
    assert finding.verdict is Verdict.MISSING
    assert "no commit record" in finding.reason


def test_a_version_that_was_not_synced_is_in_doubt_after_a_reboot(store, final):
    write_record(store, replace(only_record(store), boot=boot_id()))
    assert _verdict(store) is Verdict.HIT
    as_after_reboot(store, only_record(store))
    assert _verdict(store) is Verdict.STALE


def test_damage_outweighs_doubt(store, final):
    as_after_reboot(store, only_record(store))
    _delete(final)
    assert _verdict(store) is Verdict.PARTIAL


def test_a_record_survives_the_round_trip(store, final):
    record = only_record(store)
    write_record(store, record)
    assert read_record(store, "weights", VERSION) == record


def test_how_the_origin_was_read_survives_the_round_trip(store, final):
    record = replace(only_record(store), transport="fsspec")
    write_record(store, record)
    assert read_record(store, "weights", VERSION) == record


def test_a_record_of_a_version_that_knew_nothing_of_transports_reads_and_is_written_as_ever(store, final):
    path = store.record("weights", VERSION)
    body = json.loads(path.read_bytes())
    assert "transport" not in body
    path.write_text(json.dumps({**body, "damage": ""}))
    found = read_record(store, "weights", VERSION)
    assert found is not None
    assert (found.transport, found.damage) == ("auto", "")


@given(st.integers(0, 10_000))
def test_a_torn_record_does_not_count(at):
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder), create=True)
        version = stage_source(store, make_source(FakeOrigin({"a": b"x"}))).version
        path = store.record("weights", version)
        body = path.read_bytes()
        path.write_bytes(body[: at % len(body)])
        assert list(records(store)) == []
        assert check_record(store, "weights", version).verdict is Verdict.MISSING


@pytest.mark.parametrize(
    "body",
    [b"[]", b"1", b"{}", b'{"files":1}', b'{"files":[["a"]],"folders":[]}', b'{"files":[],"folders":[]}'],
)
def test_a_record_of_another_shape_does_not_count(store, final, body):
    store.record("weights", VERSION).write_bytes(body)
    assert read_record(store, "weights", VERSION) is None


def test_a_record_in_the_place_of_another_does_not_count(store, final):
    other = "b3-" + "0" * 64
    shutil.copy(store.record("weights", VERSION), store.record("weights", other))
    assert read_record(store, "weights", other) is None
    assert [record.version for record in records(store, "weights")] == [VERSION]


def test_records_are_found_by_name_or_all(store, final):
    stage_source(store, make_source(name="other"))
    assert {record.name for record in records(store)} == {"weights", "other"}
    assert [record.name for record in records(store, "other")] == ["other"]
    assert len(FILES) == len(only_record(store).files)
