"""A capture has the cache root for itself, and whatever ends it, what was there comes back."""

from __future__ import annotations

import time

import pytest

from llm_prefetch.caches.aside import captured_until, prolong, put_back, set_aside


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "caches" / "llama"
    root.mkdir(parents=True)
    (root / "precious").touch()
    return root


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_it_is_the_captures_own_until_a_time_that_can_be_put_off(root):
    assert captured_until(root) is None
    set_aside(root, 60.0)
    until = captured_until(root)
    assert names(root) == [".capture"]
    assert until is not None
    assert time.time() < until <= time.time() + 60
    prolong(root, 600.0)
    later = captured_until(root)
    assert later is not None
    assert later > until + 500
    put_back(root)
    put_back(root)
    assert names(root) == ["precious"]
    assert names(root.parent) == ["llama"]


def test_where_nothing_was_nothing_stays(tmp_path):
    root = tmp_path / "caches" / "llama"
    set_aside(root, 60.0)
    (root / "compiled").touch()
    put_back(root)
    assert names(tmp_path / "caches") == []


def test_a_kill_between_any_two_steps_loses_nothing(root):
    set_aside(root, 60.0)
    root.rename(
        root.with_name(".llama.captured")
    )  # what was there is set aside, and the folder is not in place
    put_back(root)
    assert names(root) == ["precious"]
    assert names(root.parent) == ["llama"]
    root.with_name(".llama.captured").mkdir()  # nothing is set aside yet
    set_aside(root, 60.0)
    (root / "compiled").touch()
    set_aside(root, 60.0)  # the first was killed when its engine was up
    assert names(root) == [".capture"]
    put_back(root)
    assert names(root) == ["precious"]


@pytest.mark.parametrize("text", ["", "[]", '{"until": "tomorrow"}'])
def test_a_mark_that_cannot_be_read_is_over(root, text):
    set_aside(root, 60.0)
    (root / ".capture").write_text(text)
    assert captured_until(root) == 0.0
