"""Caches that broke a start: marked by a start that failed or died, offered again when someone clears them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llm_prefetch import ledger
from llm_prefetch.caches.quarantine import (
    Mark,
    begin,
    clear_marks,
    end,
    find_mark,
    mark_broken,
    mark_those_that_died,
    marks,
)

REPOSITORY = Path(__file__).parents[2]
VERSION = "b3-" + "1" * 64
MARK = Mark("compile", VERSION, "llama", "it crashed", "start1")
_START = """
import os, sys
from pathlib import Path
from llm_prefetch.caches.quarantine import Mark, begin
from llm_prefetch.store import NodeStore
begin(NodeStore(Path(sys.argv[1])), Mark("compile", sys.argv[2], "llama", "", "start9"))
print("began", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), 9)
"""


def _starting(store):
    return list((store.root / "caches" / ".starting").glob("*"))


@pytest.fixture
def other(store):
    """A replica in another process, in its start with the cache."""
    argv = [sys.executable, "-c", _START, str(store.root), VERSION]
    with subprocess.Popen(
        argv, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "began\n"
        yield process
        process.kill()


def _die(process):
    process.stdin.write("\n")
    process.stdin.flush()
    process.wait()


def test_a_mark_is_kept_with_its_reason_and_the_ledger_has_a_row_of_it(store):
    mark_broken(store, MARK)
    found = find_mark(store, VERSION)
    assert found is not None
    assert replace(found, at=0.0) == MARK
    assert found.at > 0
    [row] = ledger.read(store, "quarantine")
    assert (row["name"], row["version"], row["reason"], row["start"]) == (
        "compile",
        VERSION,
        "it crashed",
        "start1",
    )


def test_other_caches_are_not_marked(store):
    mark_broken(store, MARK)
    assert find_mark(store, "b3-" + "2" * 64) is None


def test_a_mark_that_cannot_be_read_is_one(store):
    mark_broken(store, MARK)
    [path] = (store.root / "caches" / ".quarantine").glob("*.json")
    path.write_text("{")
    assert find_mark(store, VERSION) == Mark("", VERSION, "", "its mark cannot be read")


@pytest.mark.parametrize("name", ["compile", "llama", VERSION])
def test_clearing_takes_a_name_a_deployment_or_a_version(store, name):
    other = replace(MARK, name="other", deployment="qwen", version="b3-" + "2" * 64)
    for mark in (MARK, other):
        mark_broken(store, mark)
    assert [mark.version for mark in clear_marks(store, name)] == [VERSION]
    assert [mark.version for mark in marks(store)] == [other.version]
    [row] = ledger.read(store, "clear")
    assert row["version"] == VERSION


def test_a_start_that_has_ended_leaves_nothing(store):
    fd = begin(store, MARK)
    assert _starting(store)
    end(store, MARK.start, fd)
    assert (mark_those_that_died(store), _starting(store), marks(store)) == ([], [], [])


def test_a_start_in_progress_elsewhere_is_no_death(store, other):
    assert mark_those_that_died(store) == []
    assert _starting(store)


def test_a_start_that_was_killed_marks_its_cache_when_the_next_one_looks(store, other):
    _die(other)
    [mark] = mark_those_that_died(store)
    assert (mark.version, mark.start) == (VERSION, "start9")
    found = find_mark(store, VERSION)
    assert found is not None
    assert "start9 that used it ended without a word" in found.reason
    assert (_starting(store), mark_those_that_died(store)) == ([], [])


def test_a_reboot_is_not_the_fault_of_a_cache(store, other):
    _die(other)
    [path] = _starting(store)
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot": "another"}))
    assert mark_those_that_died(store) == []
    assert (_starting(store), marks(store)) == ([], [])


def test_what_cannot_be_read_is_nobodys_start(store, other):
    _die(other)
    [path] = _starting(store)
    path.write_text("{}")
    assert mark_those_that_died(store) == []
    assert marks(store) == []
