"""Nothing that an origin names leads out of the folder it belongs to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llm_prefetch.errors import UnsafePathError
from llm_prefetch.paths import check_paths, check_relative_path, is_safe_name, open_beneath, parents
from tests.samples import raises


@pytest.fixture
def root_fd(tmp_path: Path, no_leaks: None) -> Iterator[int]:
    folder = tmp_path / "tree"
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("name", ["a", "llama-3-8b", "A.b_c-9", "0", "x" * 128])
def test_plain_names_are_safe(name):
    assert is_safe_name(name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "-flag", "a/b", "a\\b", "a b", "a\n", "a\0", "ä", "x" * 129, "*"]
)
def test_names_that_could_mean_something_else_are_not_safe(name):
    assert not is_safe_name(name)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "is empty"),
        ("/etc/passwd", "is absolute"),
        ("../x", "component"),
        ("a/../../x", "component"),
        ("..", "component"),
        (".", "component"),
        ("a/./b", "component"),
        ("a//b", "component"),
        ("a/", "component"),
        ("a\\..\\b", "backslash"),
        ("a\0b", "control"),
        ("a\nb", "control"),
        ("a\x7fb", "control"),
        ("a\udcffb", "Unicode"),
        ("x" * 256, "too long"),
        ("ä" * 128, "too long"),
        ("/".join(["abc"] * 300), "too long"),
    ],
)
def test_an_unsafe_path_is_refused_with_the_reason(path, reason):
    with raises(UnsafePathError, 5, reason, "s3://b/p"):
        check_relative_path(path, "s3://b/p")


@pytest.mark.parametrize("path", ["a", "a/b.c", "...", "..a/b..", "-", "a b", "ä/ü", "~", "x" * 255])
def test_a_plain_path_passes_as_it_is(path):
    assert check_relative_path(path, "here") == path


@given(st.text(alphabet=st.one_of(st.sampled_from("./\\\0~ab\n"), st.characters()), max_size=40))
@example("..")
@example("a/..")
def test_whatever_passes_stays_below_its_folder(path):
    try:
        check_relative_path(path, "here")
    except UnsafePathError:
        return
    joined = os.path.join("/root/tree", path)  # noqa: PTH118
    assert os.path.normpath(joined) == joined
    assert joined.startswith("/root/tree/")
    os.fsencode(path)


def test_two_entries_for_one_place_are_refused():
    with raises(UnsafePathError, 5, "occurs twice"):
        check_paths(["a", "b", "a"], "here")


@pytest.mark.parametrize("paths", [["a", "a/b"], ["a/b", "a"], ["a/b", "a/b/c/d"]])
def test_a_file_where_another_entry_needs_a_folder_is_refused(paths):
    with raises(UnsafePathError, 5, "both a file and a folder"):
        check_paths(paths, "here")


def test_parents_go_from_the_inside_out():
    assert list(parents("a/b/c")) == ["a/b", "a"]
    assert list(parents("a")) == []


def test_opening_makes_the_folders(root_fd, tmp_path):
    os.close(open_beneath(root_fd, "a/b/c", os.O_WRONLY | os.O_CREAT))
    assert (tmp_path / "tree/a/b/c").is_file()


@pytest.mark.parametrize("flags", [os.O_WRONLY | os.O_CREAT, os.O_RDONLY | os.O_CREAT])
@pytest.mark.parametrize("what", ["link-to-file", "dangling-link", "folder", "pipe"])
def test_something_else_in_place_of_the_file_is_refused(root_fd, tmp_path, what, flags):
    victim, place = tmp_path / "victim", tmp_path / "tree/file"
    if what == "link-to-file":
        victim.write_bytes(b"precious")
        place.symlink_to(victim)
    elif what == "dangling-link":
        place.symlink_to(victim)
    elif what == "folder":
        place.mkdir()
    else:
        os.mkfifo(place)
    with raises(UnsafePathError, 5, "'file'"):
        open_beneath(root_fd, "file", flags)
    assert not victim.exists() or victim.read_bytes() == b"precious"


@pytest.mark.parametrize("what", ["link", "file"])
def test_something_else_in_place_of_a_folder_is_refused(root_fd, tmp_path, what):
    victim = tmp_path / "victim"
    victim.mkdir()
    if what == "link":
        (tmp_path / "tree/sub").symlink_to(victim)
    else:
        (tmp_path / "tree/sub").write_bytes(b"")
    with raises(UnsafePathError, 5, "sub"):
        open_beneath(root_fd, "sub/file", os.O_WRONLY | os.O_CREAT)
    assert list(victim.iterdir()) == []
