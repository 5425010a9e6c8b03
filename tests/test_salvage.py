"""What an earlier staging left is taken up where it is right, and never where it is not."""

from __future__ import annotations

import os
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_prefetch.commit import set_aside
from llm_prefetch.errors import UnsafePathError
from llm_prefetch.journal import read_journal
from llm_prefetch.plan import all_chunks, make_plan
from llm_prefetch.salvage import prepare_partial, seal_listing
from llm_prefetch.store import boot_id, open_store
from llm_prefetch.verify import full_check
from tests.samples import (
    CHUNK,
    FILES,
    TOTAL,
    FakeOrigin,
    as_nobody,
    flip_byte,
    make_folder,
    make_listing,
    make_manifest,
    make_source,
    only_record,
    raises,
    stage_source,
    tree,
)

pytestmark = pytest.mark.usefixtures("no_leaks")
VERSION = make_manifest().version
WEIGHTS = "layers/0/weights.bin"


def _final(store):
    return store.artifact("weights", VERSION)


def _transferred(store, source=None):
    """A partial folder in which everything is done but the commit."""
    source = source or make_source()
    journal = prepare_partial(store, source)
    make_folder(store.partial(source.key) / "tree")
    journal.open()
    for chunk in all_chunks(source):
        data = FILES[sorted(FILES)[chunk.file]][chunk.start : chunk.start + chunk.length]
        digest = chunk.digest or make_manifest({"x": data}, 2**24).files[0].chunks[0]
        journal.enter(chunk.file, chunk.index, digest)
    journal.close()
    return source


def _staged_again(store, fetched, *, source=None):
    """Stage with an origin that counts; the result is whole and just `fetched` bytes were read."""
    source = source or make_source()
    report = stage_source(store, source)
    assert source.origin.bytes_read == report.fetched_bytes == fetched
    assert tree(_final(store)) == FILES
    assert full_check(store, "weights", report.version).ready
    assert list((store.root / "partial").iterdir()) == []


def test_nothing_becomes_an_empty_partial_folder(store):
    journal = prepare_partial(store, make_source())
    assert journal.done == {}
    assert tree(store.partial(VERSION)) == {}


def test_what_is_done_in_this_boot_is_believed(store):
    _transferred(store)
    _staged_again(store, fetched=0)


def test_after_a_reboot_what_is_right_is_kept_and_what_is_not_is_fetched(store):
    _transferred(store)
    journal = store.partial(VERSION) / "journal"
    journal.write_bytes(journal.read_bytes().replace(boot_id().encode(), b"another-boot", 1))
    flip_byte(store.partial(VERSION) / "tree" / WEIGHTS, CHUNK)
    _staged_again(store, fetched=CHUNK)


def test_what_was_proven_after_a_reboot_survives_the_next_kill(store):
    source = _transferred(store)
    journal = store.partial(VERSION) / "journal"
    journal.write_bytes(journal.read_bytes().replace(boot_id().encode(), b"another-boot", 1))
    fresh = prepare_partial(store, source)
    fresh.open()  # killed here, after the transfer had opened it
    fresh.close()
    _staged_again(store, fetched=0)


@pytest.mark.parametrize(
    ("data", "fetched"),
    [(None, 36), (FILES[WEIGHTS][:CHUNK], 28), (FILES[WEIGHTS] + b"more", 4)],
    ids=["gone", "cut", "grown"],
)
def test_a_file_that_is_not_there_at_its_size_is_looked_at_again(store, data, fetched):
    _transferred(store)
    path = store.partial(VERSION) / "tree" / WEIGHTS
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    _staged_again(store, fetched=fetched)


def test_a_partial_tree_that_is_gone_takes_its_journal_with_it(store):
    _transferred(store)
    shutil.rmtree(store.partial(VERSION) / "tree")
    _staged_again(store, fetched=TOTAL)


def test_a_kill_between_rename_and_record_costs_no_byte(store):
    _transferred(store)
    _final(store).parent.mkdir(parents=True)
    (store.partial(VERSION) / "tree").rename(_final(store))
    _staged_again(store, fetched=0)


def test_the_same_costs_no_byte_when_the_origin_had_no_manifest(store):
    origin = FakeOrigin()
    source = _transferred(store, make_source(origin, make_listing(origin)))
    version = seal_listing(source.content, read_journal(store.partial(source.key) / "journal")).version
    final = store.artifact("weights", version)
    final.parent.mkdir(parents=True)
    (store.partial(source.key) / "tree").rename(final)
    assert stage_source(store, source).fetched_bytes == 0
    assert origin.reads == []
    assert tree(final) == FILES


def test_without_its_journal_a_folder_without_a_record_is_hashed_and_kept(store):
    make_folder(_final(store))
    _staged_again(store, fetched=0)


def test_files_of_a_damaged_version_are_kept_when_every_chunk_is_right(store):
    stage_source(store, make_source())
    (_final(store) / "config.json").unlink()
    _staged_again(store, fetched=len(FILES["config.json"]))


def test_a_file_with_a_wrong_chunk_becomes_a_new_file_and_only_that_chunk_is_fetched(store):
    """A replica may have the old one mapped: it must see neither more damage nor half a repair."""
    stage_source(store, make_source())
    path = _final(store) / WEIGHTS
    with path.open("rb") as mapped:
        flip_byte(path)
        os.utime(path)
        damaged = path.read_bytes()
        _staged_again(store, fetched=CHUNK)
        assert mapped.read() == damaged
        assert os.fstat(mapped.fileno()).st_ino != path.stat().st_ino


def test_kept_files_are_never_written_to_even_after_another_kill(store):
    stage_source(store, make_source())
    (_final(store) / "config.json").unlink()
    inode = (_final(store) / WEIGHTS).stat().st_ino
    journal = prepare_partial(store, make_source())
    journal.open()  # killed here
    journal.close()
    _staged_again(store, fetched=len(FILES["config.json"]))
    assert (_final(store) / WEIGHTS).stat().st_ino == inode


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    st.dictionaries(st.sampled_from(sorted(FILES)), st.sampled_from(["gone", "flip", "cut", "link", "more"]))
)
def test_after_any_damage_only_what_is_damaged_is_fetched(tmp_path, damage):
    shutil.rmtree(tmp_path / "store", ignore_errors=True)
    store = open_store(tmp_path / "store", create=True)
    stage_source(store, make_source())
    for name, what in damage.items():
        path = _final(store) / name
        path.chmod(0o644)
        if what in ("gone", "link"):
            path.unlink()
        if what == "link":
            path.symlink_to("/etc/hostname")
        if what == "cut":
            path.write_bytes(FILES[name][:-1])
        if what == "more":
            path.write_bytes(FILES[name] + b"x")
        if what == "flip" and FILES[name]:
            flip_byte(path)
            os.utime(path)
    lost = {
        name: len(FILES[name]) if what != "flip" else min(CHUNK, len(FILES[name]))
        for name, what in damage.items()
    }
    _staged_again(store, fetched=sum(lost.values()))


def test_a_kill_while_a_damaged_version_is_put_away_lets_nothing_wrong_in(store):
    """A journal that outlived its commit speaks of the folder that is damaged since; it must not vouch for it."""
    _transferred(store)
    leftover = (store.partial(VERSION) / "journal").read_bytes()
    _staged_again(store, fetched=0)
    flip_byte(_final(store) / WEIGHTS)
    os.utime(_final(store) / WEIGHTS)
    store.partial(VERSION).mkdir()
    (store.partial(VERSION) / "journal").write_bytes(leftover)
    quarantine = store.root / "quarantine"
    quarantine.rmdir()
    quarantine.write_bytes(b"in the way: the record is gone, the folder is still there")
    with pytest.raises(OSError):
        prepare_partial(store, make_source())
    assert not store.record("weights", VERSION).exists()
    quarantine.unlink()
    quarantine.mkdir()
    _staged_again(store, fetched=CHUNK)


def test_strangers_in_a_partial_tree_are_not_committed(store):
    _transferred(store)
    path = store.partial(VERSION) / "tree"
    make_folder(path, {"stranger": b"x", "layers/stranger": b"x", "strange/er": b"x"})
    (path / "link").symlink_to("/etc")
    _staged_again(store, fetched=0)
    assert not (_final(store) / "link").is_symlink()
    assert not (_final(store) / "strange").exists()


def test_a_linked_folder_in_a_damaged_version_gives_nothing_away(store, tmp_path):
    """Somebody put a link to a shared folder in place of a folder: those files are not ours to move."""
    stage_source(store, make_source())
    shared = make_folder(tmp_path / "shared", {"0/weights.bin": FILES[WEIGHTS], "1/weights.bin": b""})
    shutil.rmtree(_final(store) / "layers")
    (_final(store) / "layers").symlink_to(shared)
    _staged_again(store, fetched=TOTAL - len(FILES["config.json"]))
    assert tree(shared) == {"0/weights.bin": FILES[WEIGHTS], "1/weights.bin": b""}


def test_a_linked_folder_in_the_partial_tree_takes_nothing_in(store, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    make_folder(_final(store))
    path = store.partial(VERSION) / "tree"
    path.mkdir(parents=True)
    (path / "layers").symlink_to(outside)
    with raises(UnsafePathError, 5):
        stage_source(store, make_source())
    assert list(outside.iterdir()) == []


def test_an_unprivileged_user_can_take_up_read_only_files(nobodys_folder):
    """The commit makes files read-only; a kill right after it must not lock their owner out."""
    with as_nobody():
        store = open_store(nobodys_folder / "store", create=True)
        stage_source(store, make_source())
        store.record("weights", VERSION).unlink()
        _staged_again(store, fetched=0)
        (_final(store) / "config.json").unlink()
        _staged_again(store, fetched=len(FILES["config.json"]))
        path = _final(store) / WEIGHTS
        path.chmod(0o644)
        path.write_bytes(b"damage")
        path.chmod(0o444)
        _staged_again(store, fetched=len(FILES[WEIGHTS]))


def test_a_version_that_is_set_aside_can_be_staged_anew(store):
    stage_source(store, make_source())
    aside = set_aside(store, "weights", VERSION)
    assert tree(aside) == FILES
    assert set_aside(store, "weights", VERSION) is None
    _staged_again(store, fetched=TOTAL)
    assert only_record(store).version == VERSION


def test_planning_after_salvage_counts_what_was_kept(store):
    stage_source(store, make_source())
    (_final(store) / "config.json").unlink()
    source = make_source()
    prepare_partial(store, source)
    assert make_plan(store, source).fetch_bytes == len(FILES["config.json"])
