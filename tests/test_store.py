"""The node store's tree, its one-step writes and its locks."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from llm_prefetch.errors import DiskError, DiskPermissionError, LayoutError, LockTimeoutError
from llm_prefetch.store import (
    LAYOUT,
    acquire,
    boot_id,
    locked,
    open_store,
    read_json,
    write_file,
    write_link,
)
from tests.samples import as_nobody, raises

pytestmark = pytest.mark.usefixtures("no_leaks")


def test_a_store_is_made_once_and_found_again(tmp_path):
    made = open_store(tmp_path / "new/store", create=True)
    assert open_store(tmp_path / "new/store") == made
    assert (made.root / "LAYOUT").read_text().strip() == LAYOUT
    assert open_store(made.root, create=True) == made


def test_the_setting_names_the_root(store):
    assert open_store() == store


def test_a_relative_root_is_taken_from_here(store, monkeypatch):
    monkeypatch.chdir(store.root.parent)
    assert open_store(Path("store")) == store


def test_missing_folders_come_back(store):
    (store.root / "locks").rmdir()
    open_store(store.root, create=True)
    assert (store.root / "locks").is_dir()


def test_looking_does_not_make_a_store(tmp_path):
    with raises(LayoutError, 4, "no node store here"):
        open_store(tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("layout", [b"2\n", b"", b"\xff\xfe"])
@pytest.mark.parametrize("create", [True, False])
def test_an_unknown_layout_is_left_alone(store, layout, create):
    (store.root / "LAYOUT").write_bytes(layout)
    before = sorted(store.root.rglob("*"))
    with raises(LayoutError, 4, "layout", str(store.root)):
        open_store(store.root, create=create)
    assert sorted(store.root.rglob("*")) == before
    assert (store.root / "LAYOUT").read_bytes() == layout


def test_a_file_in_the_way_of_the_root_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with raises(DiskError, 4, str(tmp_path / "file")):
        open_store(tmp_path / "file", create=True)
    with raises(DiskError, 4):
        open_store(tmp_path / "file/below", create=True)


def test_a_file_in_the_way_of_a_folder_is_named(store):
    (store.root / "locks").rmdir()
    (store.root / "locks").write_bytes(b"")
    with raises(DiskPermissionError, 4, str(store.root / "locks")):
        open_store(store.root, create=True)


def test_a_root_that_may_not_be_written_is_a_permission(nobodys_folder):
    nobodys_folder.chmod(0o555)
    with as_nobody(), raises(DiskPermissionError, 4, str(nobodys_folder)):
        open_store(nobodys_folder / "store", create=True)
    nobodys_folder.chmod(0o755)


def test_a_file_is_replaced_in_one_step_and_no_temporary_is_left(tmp_path):
    write_file(tmp_path / "a", b"one")
    write_file(tmp_path / "a", b"two")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"two"}


def test_a_write_that_fails_leaves_the_old_file_and_no_temporary(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b").write_bytes(b"")
    with pytest.raises(OSError):
        write_file(tmp_path / "a", b"one")
    with pytest.raises(OSError):
        write_link(tmp_path / "a", "target")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_link_is_replaced_in_one_step(tmp_path):
    for target in ("one", "two", "two"):
        write_link(tmp_path / "link", target)
        assert os.readlink(tmp_path / "link") == target  # noqa: PTH115 (the text, not a path)
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 200_000])
def test_json_that_cannot_be_read_is_as_good_as_none(tmp_path, body):
    (tmp_path / "x").write_bytes(body)
    assert read_json(tmp_path / "x") is None
    assert read_json(tmp_path / "none") is None
    assert read_json(tmp_path / "x/below") is None


def test_the_boot_has_a_name():
    assert boot_id() == boot_id() != ""


def test_a_held_lock_is_waited_for_until_the_deadline(tmp_path):
    with locked(tmp_path / "lock", seconds=0, waiting_for="nobody"):
        with raises(LockTimeoutError, 4, "the other one did not end", "lock"):
            acquire(tmp_path / "lock", shared=False, seconds=0.01, waiting_for="the other one")
        with raises(LockTimeoutError, 4):
            acquire(tmp_path / "lock", shared=True, seconds=0, waiting_for="the other one")
    os.close(acquire(tmp_path / "lock", shared=False, seconds=0, waiting_for="nobody"))


def test_readers_share_a_lock(tmp_path):
    with locked(tmp_path / "lock", shared=True, seconds=0, waiting_for="nobody"):
        os.close(acquire(tmp_path / "lock", shared=True, seconds=0, waiting_for="nobody"))
        with raises(LockTimeoutError, 4):
            acquire(tmp_path / "lock", shared=False, seconds=0, waiting_for="a reader")


def test_a_waiting_process_gets_the_lock_when_it_is_free(tmp_path):
    got = threading.Event()

    def wait():
        with locked(tmp_path / "lock", seconds=60, waiting_for="the test"):
            got.set()

    waiter = threading.Thread(target=wait)
    with locked(tmp_path / "lock", seconds=0, waiting_for="nobody"):
        waiter.start()
        assert not got.is_set()
    waiter.join(60)
    assert got.is_set()


def test_an_error_inside_lets_go_of_the_lock(tmp_path):
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "lock", seconds=0, waiting_for="nobody"):
        raise ZeroDivisionError
    os.close(acquire(tmp_path / "lock", shared=False, seconds=0, waiting_for="nobody"))


def test_a_lock_that_cannot_be_made_is_a_disk_error(tmp_path):
    with raises(DiskError, 4, "none"):
        acquire(tmp_path / "none/lock", shared=False, seconds=0, waiting_for="nobody")
