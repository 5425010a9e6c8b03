"""The journal never claims a chunk that is not there, and a kill costs at most the last entry."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from llm_prefetch.journal import Journal, read_journal, renew
from llm_prefetch.store import boot_id
from tests.samples import CHUNK, FILES, make_folder, make_manifest

pytestmark = pytest.mark.usefixtures("no_leaks")

_entries = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.binary(min_size=32, max_size=32)),
    max_size=8,
    unique_by=lambda entry: entry[:2],
)


def _write(path, entries):
    journal = read_journal(path)
    journal.open()
    for file, chunk, digest in entries:
        journal.enter(file, chunk, digest.hex())
    journal.close()
    return journal


def _as_dict(entries):
    return {(file, chunk): digest.hex() for file, chunk, digest in entries}


@given(_entries, _entries)
def test_what_was_entered_is_read_again_over_several_sittings(first, second):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal")
        _write(path, first)
        _write(path, second)
        found = read_journal(path)
        assert found.done == {**_as_dict(first), **_as_dict(second)}
        assert found.boot == boot_id()


@given(_entries, st.data())
def test_a_cut_loses_the_torn_entry_and_gives_no_wrong_one(entries, data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal")
        _write(path, entries)
        whole = path.read_bytes()
        cut = data.draw(st.integers(0, len(whole)))
        path.write_bytes(whole[:cut])
        left = max(0, (cut - len(boot_id()) - 1)) // 40
        assert read_journal(path).done == _as_dict(entries[:left])
        _write(path, [(1, 2, b"\1" * 32)])
        assert read_journal(path).done == {**_as_dict(entries[:left]), (1, 2): ("01" * 32)}


def test_opening_the_same_journal_again_keeps_its_entries(tmp_path):
    journal = _write(tmp_path / "journal", [(0, 0, b"\1" * 32)])
    journal.open()
    journal.enter(0, 1, "02" * 32)
    journal.close()
    assert read_journal(journal.path).done == {(0, 0): "01" * 32, (0, 1): "02" * 32}


def test_an_entry_that_the_disk_took_only_half_is_taken_back(tmp_path):
    """The next entry, which may be another thread's, must not be read out of step."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    journal = Journal(tmp_path / "journal")
    journal.open()
    journal.enter(0, 0, "01" * 32)
    real, journal._fd = journal._fd, write
    try:
        while True:
            os.write(write, b"x" * 4096)
    except BlockingIOError:
        os.read(read, 4096)
        os.write(write, b"x" * 4080)
    with pytest.raises(OSError):
        journal.enter(0, 1, "02" * 32)
    for fd in (read, write):
        os.close(fd)
    assert journal.done == {(0, 0): "01" * 32}
    journal._fd = real
    journal.enter(0, 2, "03" * 32)
    journal.close()
    assert read_journal(journal.path).done == {(0, 0): "01" * 32, (0, 2): "03" * 32}


def test_entries_of_several_threads_do_not_mix(tmp_path):
    journal = Journal(tmp_path / "journal")
    journal.open()

    def enter(file):
        for chunk in range(200):
            journal.enter(file, chunk, blake3(b"%d %d" % (file, chunk)).hexdigest())

    threads = [threading.Thread(target=enter, args=(file,)) for file in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    found = read_journal(journal.path)
    assert len(found.done) == 800
    assert all(digest == blake3(b"%d %d" % key).hexdigest() for key, digest in found.done.items())


def test_no_journal_is_an_empty_one(tmp_path):
    journal = read_journal(tmp_path / "journal")
    assert (journal.done, journal.boot, journal.whole_bytes) == ({}, boot_id(), 0)
    journal.close()


@pytest.mark.parametrize("data", [b"", b"half-a-boot-id", b"\xff\xff\n", b"\n"])
def test_a_header_that_is_not_of_this_boot_vouches_for_nothing(tmp_path, data):
    (tmp_path / "journal").write_bytes(data)
    journal = read_journal(tmp_path / "journal")
    assert journal.done == {}


def test_after_a_reboot_only_entries_whose_bytes_are_there_are_kept(tmp_path):
    manifest = make_manifest()
    paths = [file.path for file in manifest.files]
    tree = make_folder(tmp_path / "tree", FILES)
    journal = Journal(tmp_path / "journal", boot="another-boot")
    journal.open()
    for number, file in enumerate(manifest.files):
        for index, digest in enumerate(file.chunks):
            journal.enter(number, index, digest)
    journal.enter(99, 0, "00" * 32)
    journal.close()
    weights = paths.index("layers/0/weights.bin")
    lost = tree / paths[weights]
    lost.write_bytes(bytes(CHUNK) + lost.read_bytes()[CHUNK:])
    (tree / "layers/1/weights.bin").unlink()

    fresh = renew(read_journal(journal.path), tree, paths, CHUNK)

    expected = {key: digest for key, digest in journal.done.items() if key[0] in (0, weights)}
    del expected[weights, 0]
    assert fresh.done == expected
    again = read_journal(journal.path)
    assert (again.done, again.boot) == (expected, boot_id())
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["journal"]
    fresh.open()
    fresh.close()
    assert read_journal(journal.path).done == expected
