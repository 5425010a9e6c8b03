"""`llm-prefetch gc` and `pin`, and a plan that has to make room, as a person and as a program meets them."""

from __future__ import annotations

import os

import pytest

from llm_prefetch.leftovers import kept
from llm_prefetch.live import Member, make_bundle, switch
from llm_prefetch.store import open_store
from tests.samples import FakeOrigin, make_source, stage_source


@pytest.fixture
def store(root, monkeypatch):
    monkeypatch.setenv("LLM_PREFETCH_ROOT", str(root))
    return open_store(root, create=True)


@pytest.fixture
def versions(store):
    """Three versions, the last one live."""
    found = []
    for number in range(3):
        origin = FakeOrigin({"w": bytes([number]) * 64})
        found.append(stage_source(store, make_source(origin)).version)
        os.utime(store.record("weights", found[-1]), (number, number))
    switch(store, "llama", make_bundle(store, [Member("weights", "model", found[-1])]), why="stage")
    return found


def there(store):
    return {path.name for path in store.root.glob("artifacts/weights/b3-*") if path.is_dir()}


def test_gc_deletes_what_nothing_needs_and_says_what(run, store, versions):
    done = run("gc", "--dry-run")
    assert (done.code, len(done.rows)) == (0, 3)
    assert "would be deleted" in done.err
    assert there(store) == set(versions)
    done = run("gc", "--json")
    assert done.code == 0
    assert [one["version"] for one in done.json["leftovers"]] == versions[:2]
    assert done.json["deleted"] is True
    assert there(store) == {versions[2]}
    done = run("gc")
    assert (done.code, done.out) == (0, "")
    assert "0 B in 0 leftovers" in done.err


def test_a_pinned_version_is_kept_until_it_is_unpinned(run, store, versions):
    assert run("pin", "weights", versions[0][:12]).code == 0
    assert run("pin", "weights", versions[0], "--json").json == {
        "name": "weights", "version": versions[0], "pinned": True,
    }  # fmt: skip
    run("gc")
    assert there(store) == {versions[0], versions[2]}
    assert kept(store)["weights", versions[0]] == "pins"
    assert run("pin", "weights", versions[0], "--off").code == 0
    run("gc")
    assert there(store) == {versions[2]}


@pytest.mark.parametrize("version", ["b3-0", "", "../x"])
def test_a_version_that_is_not_there_cannot_be_pinned(run, versions, version):
    done = run("pin", "weights", version)
    assert done.code == 2
    assert len(done.err.splitlines()) == 1


def test_a_plan_as_data_says_whether_it_fits_and_what_would_go(run, spec, store):
    data = run("plan", spec, "--json").json
    assert (data["fits"], data["evictions"], data["eta_seconds"]) == (True, [], None)
    run("stage", spec)
    data = run("plan", spec, "--json").json
    assert (data["fits"], data["evictions"], data["eta_seconds"]) == (True, [], 0.0)
