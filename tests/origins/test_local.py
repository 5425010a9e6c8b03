"""`file://`: a folder on a disk."""

from __future__ import annotations

import errno
import io
import os

import pytest

from llm_prefetch.errors import (
    OriginAccessError,
    OriginChangedError,
    OriginError,
    OriginUnavailableError,
    UnsupportedOriginError,
)
from llm_prefetch.origins import ObjectInfo, open_origin
from llm_prefetch.origins.local import LocalOrigin
from tests.samples import as_nobody, make_folder, raises, tree

pytestmark = pytest.mark.usefixtures("no_leaks")


def _read(origin, item, start=0):
    reader = origin.reader()
    try:
        buffer = memoryview(bytearray(100))
        count = reader.open_range(item, start, item.size - start).readinto(buffer)
        return bytes(buffer[:count])
    finally:
        reader.close()


@pytest.mark.parametrize("name", ["a b", "a?b", "a#b", "[a", "ä", "100%"])
@pytest.mark.parametrize("host", ["", "localhost"])
def test_a_path_may_hold_what_a_uri_gives_a_meaning(tmp_path, name, host):
    make_folder(tmp_path / name, {"x": b"1"})
    uri = f"file://{host}{tmp_path}/{name}"
    assert open_origin(uri).read("x", 10) == b"1"


def test_an_escaped_path_is_understood(tmp_path):
    make_folder(tmp_path / "a b", {"x": b"1"})
    assert open_origin(f"file://{tmp_path}/a%20b").read("x", 10) == b"1"


@pytest.mark.parametrize("uri", ["file://host/x", "file://x", "file:///a%00b", "file://[x/y"])
def test_what_is_no_absolute_path_is_refused(uri):
    with raises(UnsupportedOriginError, 2, uri):
        LocalOrigin(uri)


def test_files_behind_links_are_files(tmp_path):
    make_folder(tmp_path, {"blobs/1": b"data", "snapshot/real": b"x"})
    (tmp_path / "snapshot/link").symlink_to("../blobs/1")
    origin = open_origin(f"file://{tmp_path}/snapshot")
    found = {info.path: info for info in origin.list()}
    assert sorted(found) == ["link", "real"]
    assert _read(origin, found["link"]) == b"data"


def test_a_dangling_link_is_named(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "none")
    with raises(OriginError, 3, "dangling", "link"):
        list(open_origin(f"file://{tmp_path}").list())


def test_a_link_to_itself_is_the_origins_trouble(tmp_path):
    (tmp_path / "link").symlink_to("link")
    with raises(OriginUnavailableError, 3, "link", str(tmp_path)):
        list(open_origin(f"file://{tmp_path}").list())


def test_what_is_no_file_is_named(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OriginError, match="pipe"):
        list(open_origin(f"file://{tmp_path}").list())


@pytest.mark.parametrize("how", ["rewritten", "exchanged"])
def test_a_file_that_changed_since_it_was_listed_is_refused(tmp_path, how):
    make_folder(tmp_path, {"x": b"1234"})
    origin = open_origin(f"file://{tmp_path}")
    [item] = origin.list()
    if how == "exchanged":
        make_folder(tmp_path, {"y": b"1234"})
        (tmp_path / "y").replace(tmp_path / "x")
    os.utime(tmp_path / "x", ns=(1, 1))
    with raises(OriginChangedError, 3, "'x'", str(tmp_path)):
        _read(origin, item)


def test_a_range_beyond_what_is_left_ends_early(tmp_path):
    make_folder(tmp_path, {"x": b"1234"})
    reader = open_origin(f"file://{tmp_path}").reader()
    body = reader.open_range(ObjectInfo("x", 4, ""), 2, 100)
    buffer = memoryview(bytearray(100))
    assert (body.readinto(buffer), body.readinto(buffer)) == (2, 0)
    reader.close()


def test_what_may_not_be_read_is_the_credentials_of_a_disk(nobodys_folder):
    with as_nobody():
        make_folder(nobodys_folder / "o", {"sub/x": b"1"})
        origin = open_origin(f"file://{nobodys_folder}/o")
        (nobodys_folder / "o/sub/x").chmod(0)
        with raises(OriginAccessError, 3, "'sub/x'"):
            origin.read("sub/x", 10)
        with raises(OriginAccessError, 3, "'sub/x'"):
            _read(origin, ObjectInfo("sub/x", 1, ""))
        for mode in (0, 0o444):
            (nobodys_folder / "o/sub").chmod(mode)
            with raises(OriginAccessError, 3, "sub"):
                list(origin.list())
        with raises(OriginAccessError, 3, "sub/x"):
            origin.stat("sub/x")
        with raises(OriginAccessError, 3, "sub/y"):
            origin.write("sub/y", io.BytesIO(b"1"), 1)
        (nobodys_folder / "o/sub").chmod(0o755)
        (nobodys_folder / "o").chmod(0)
        with raises(OriginAccessError, 3, str(nobodys_folder)):
            list(open_origin(f"file://{nobodys_folder}/o/sub").list())
        (nobodys_folder / "o").chmod(0o755)


def test_a_write_that_fails_leaves_the_old_file_and_no_temporary(tmp_path):
    make_folder(tmp_path, {"x/y": b"old"})
    with pytest.raises(OriginError):
        open_origin(f"file://{tmp_path}").write("x", io.BytesIO(b"new"), 3)
    assert tree(tmp_path) == {"x/y": b"old"}


def test_a_long_name_can_be_written(tmp_path):
    open_origin(f"file://{tmp_path}").write("n" * 255, io.BytesIO(b"1"), 1)
    assert tree(tmp_path) == {"n" * 255: b"1"}


def test_a_reader_goes_from_file_to_file_and_back(tmp_path):
    make_folder(tmp_path, {"x": b"1234", "y": b"5678"})
    origin = open_origin(f"file://{tmp_path}")
    found = {info.path: info for info in origin.list()}
    reader = origin.reader()
    buffer = memoryview(bytearray(2))
    seen = []
    for path, start in [("x", 0), ("y", 2), ("x", 2), ("y", 0)]:
        reader.open_range(found[path], start, 2).readinto(buffer)
        seen.append(bytes(buffer))
    reader.close()
    reader.close()
    assert seen == [b"12", b"78", b"34", b"56"]


def test_what_is_no_file_is_named_with_its_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with raises(OriginError, 3, "'pipe' is not a regular file", f"file://{tmp_path}"):
        list(LocalOrigin(f"file://{tmp_path}").list())


def test_a_read_that_the_disk_refuses_is_named_with_its_file(tmp_path, monkeypatch):
    """The system call is the one thing here that is not real."""

    def preadv(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    make_folder(tmp_path, {"a/x": b"1"})
    origin = LocalOrigin(f"file://{tmp_path}")
    [item] = origin.list()
    monkeypatch.setattr(os, "preadv", preadv)
    with raises(OriginUnavailableError, 3, "cannot read 'x'", str(tmp_path / "a/x")):
        _read(origin, item)
