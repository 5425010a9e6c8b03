"""`caches` as its user meets it."""

from __future__ import annotations

import pytest

from llm_prefetch.caches.quarantine import Mark, mark_broken, marks

VERSION = "b3-" + "1" * 64


@pytest.fixture
def quarantined(store):
    mark_broken(store, Mark("compile", VERSION, "llama", "the start x that used it failed", "x"))
    return store


def test_without_any_it_says_so(run, store):
    outcome = run("caches", "--root", store.root)
    assert (outcome.code, outcome.out) == (0, "")
    assert "0 quarantined" in outcome.err


def test_each_is_listed_with_its_reason(run, quarantined):
    outcome = run("caches", "--root", quarantined.root)
    assert outcome.code == 0
    assert outcome.rows[-1][0] == "compile"
    assert outcome.rows[-1][-1] == "the start x that used it failed"
    [found] = run("caches", "--root", quarantined.root, "--json").json["quarantined"]
    assert (found["version"], found["deployment"]) == (VERSION, "llama")


def test_one_is_cleared_by_its_name(run, quarantined):
    outcome = run("caches", "--clear", "compile", "--root", quarantined.root)
    assert (outcome.code, marks(quarantined)) == (0, [])
    assert "1 offered again" in outcome.err


def test_a_name_that_is_not_quarantined_is_a_slip(run, quarantined):
    outcome = run("caches", "--clear", "other", "--root", quarantined.root)
    assert outcome.code == 2
    assert "no compile cache 'other' is quarantined" in outcome.err
    assert len(marks(quarantined)) == 1
