"""From finished bytes to a version that counts, in one step that cannot be seen half-done."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llm_prefetch.commit import commit, seal, set_aside
from llm_prefetch.errors import DiskError
from llm_prefetch.ledger import observers
from llm_prefetch.manifest import parse_manifest
from llm_prefetch.record import Verdict, check_record, read_record, write_record
from llm_prefetch.store import boot_id
from tests.samples import (
    FILES,
    TOTAL,
    FakeOrigin,
    as_after_reboot,
    make_folder,
    make_manifest,
    make_source,
    no_record,
    only_record,
    raises,
    stage_source,
    tree,
)

pytestmark = pytest.mark.usefixtures("no_leaks")
MANIFEST = make_manifest()
VERSION = MANIFEST.version


def _partial(store):
    path = make_folder(store.partial(VERSION) / "tree")
    return {name: (path / name).stat().st_ino for name in FILES}


def _commit(store, inodes):
    return commit(store, "weights", VERSION, MANIFEST, inodes, uri="fake://origin", listing="")


def test_a_commit_leaves_read_only_files_a_manifest_and_a_record(store):
    record = _commit(store, _partial(store))
    final = store.artifact("weights", VERSION)
    assert tree(final) == FILES
    assert {path.stat().st_mode & 0o777 for path in final.rglob("*") if path.is_file()} == {0o444}
    assert parse_manifest(store.manifest("weights", VERSION).read_bytes(), "here") == MANIFEST
    assert read_record(store, "weights", VERSION) == record
    assert (record.bytes, record.boot, len(record.files)) == (TOTAL, boot_id(), len(FILES))
    assert not store.partial(VERSION).exists()


@pytest.mark.parametrize("how", ["exchanged", "cut", "link"])
def test_files_that_another_process_exchanged_are_not_committed(store, tmp_path, how):
    inodes = _partial(store)
    path = store.partial(VERSION) / "tree/config.json"
    if how == "cut":
        path.write_bytes(b"")
    else:
        path.rename(tmp_path / "old")
        path.write_bytes(bytes(8)) if how == "exchanged" else path.symlink_to(tmp_path / "old")
    with raises(DiskError, 4, "config.json"):
        _commit(store, inodes)
    assert no_record(store)


def test_what_was_exchanged_is_not_committed_by_staging_again_either(store):
    """The journal vouches for other files than those that the failed commit found."""

    def exchange(step):
        if step == "commit-rename" and not done:
            done.append(step)
            path = store.partial(VERSION) / "tree/config.json"
            path.rename(path.with_name("aside"))
            path.write_bytes(bytes(8))
            path.with_name("aside").unlink()

    done = []
    observers.append(exchange)
    try:
        with raises(DiskError, 4, "config.json"):
            stage_source(store, make_source())
        source = make_source()
        stage_source(store, source)
    finally:
        observers.remove(exchange)
    assert tree(store.artifact("weights", VERSION)) == FILES
    assert {read.path for read in source.origin.reads} == {"config.json"}


@pytest.mark.parametrize("step", ["commit-rename", "commit-check", "commit-record", "commit-clean"])
def test_an_error_at_any_step_shows_the_old_state_or_the_new_one(store, step):
    def fail(name):
        if name == step:
            raise ZeroDivisionError

    observers.append(fail)
    try:
        with pytest.raises(ZeroDivisionError):
            stage_source(store, make_source())
    finally:
        observers.remove(fail)
    verdict = check_record(store, "weights", VERSION).verdict
    assert verdict is (Verdict.HIT if step == "commit-clean" else Verdict.MISSING)
    source = make_source()
    assert stage_source(store, source).verdict is Verdict.HIT
    assert source.origin.reads == []
    assert tree(store.artifact("weights", VERSION)) == FILES


def test_sealing_drops_the_boot(store):
    record = _commit(store, _partial(store))
    sealed = seal(store, record)
    assert sealed == replace(record, boot="") == read_record(store, "weights", VERSION)
    assert seal(store, sealed) == sealed


def test_sealing_does_not_bring_back_what_was_set_aside(store):
    record = _commit(store, _partial(store))

    def take_away(step):
        if step == "seal":
            set_aside(store, "weights", VERSION)

    observers.append(take_away)
    try:
        seal(store, record)
    finally:
        observers.remove(take_away)
    assert no_record(store)


def test_sealing_vouches_only_for_what_it_synced(store):
    record = _commit(store, _partial(store))
    newer = replace(record, uri="fake://committed-anew-meanwhile")
    write_record(store, newer)
    seal(store, record)
    assert read_record(store, "weights", VERSION) == newer


def test_what_is_set_aside_does_not_count_and_is_not_lost(store):
    _commit(store, _partial(store))
    aside = set_aside(store, "weights", VERSION)
    assert aside.parent == store.root / "quarantine"
    assert tree(aside) == FILES
    assert check_record(store, "weights", VERSION).verdict is Verdict.MISSING
    assert list((store.root / "artifacts/weights").iterdir()) == []


def test_an_empty_folder_in_the_final_place_does_no_harm(store):
    store.artifact("weights", VERSION).mkdir(parents=True)
    assert stage_source(store, make_source()).verdict is Verdict.HIT


def test_a_version_in_doubt_keeps_its_bytes(store):
    stage_source(store, make_source())
    as_after_reboot(store, only_record(store))
    source = make_source(FakeOrigin())
    stage_source(store, source)
    assert source.origin.reads == []
    assert only_record(store).boot == ""
