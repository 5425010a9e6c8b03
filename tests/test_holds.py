"""Holds: what a rollback left is not staged again by anything that runs by itself; a new version, or going forward, is."""

from __future__ import annotations

import pytest

from llm_prefetch.errors import LockTimeoutError, NotReadyError
from llm_prefetch.holds import Hold, read_hold, write_hold
from llm_prefetch.live import Bundle, Member, current_bundle, make_bundle, rollback, start_lock, switch
from llm_prefetch.stage import stage
from llm_prefetch.store import NodeStore, locked
from tests.samples import FILES, FakeOrigin, make_published, make_source, make_spec, raises, stage_source


def _generation(store: NodeStore, text: bytes) -> Bundle:
    """Stage a version with `text` in it and make it live, as `stage` does."""
    version = stage_source(store, make_source(FakeOrigin({**FILES, "config.json": text}))).version
    bundle = make_bundle(store, [Member("weights", "model", version)])
    switch(store, "llama", bundle, why="stage")
    return bundle


def _hold(store: NodeStore) -> Hold | None:
    return read_hold(store, "llama", current_bundle(store, "llama"))


def test_what_was_never_rolled_back_is_not_held(store):
    assert _hold(store) is None
    _generation(store, b"one")
    _generation(store, b"two")
    assert _hold(store) is None


def test_a_rollback_says_who_and_why_and_keeps_staging_from_undoing_it(store):
    one, two = _generation(store, b"one"), _generation(store, b"two")
    rollback(store, "llama", by="ada", why="it answers in rhymes")
    hold = _hold(store)
    assert hold is not None
    assert (hold.bundle, hold.left) == (one.id, (two.id,))
    assert str(hold).startswith("rolled back on 20")
    assert str(hold).endswith("by ada: it answers in rhymes")
    with raises(NotReadyError, 1, "by ada: it answers in rhymes", f"rollback llama --to {two.id[:19]}"):
        switch(store, "llama", two, why="stage")
    assert current_bundle(store, "llama") == one.id


def test_staging_what_was_left_fails_and_says_so_and_a_new_version_is_staged(store, tmp_path):
    spec = make_spec(make_published(tmp_path / "o"))
    one = stage(spec, store)
    make_published(tmp_path / "o", {**FILES, "config.json": b"two"})
    stage(spec, store)
    rollback(store, "llama", by="ada")
    with raises(NotReadyError, 1, "rolled back", "by ada"):
        stage(spec, store)
    assert current_bundle(store, "llama") == one.bundle
    make_published(tmp_path / "o", {**FILES, "config.json": b"three"})
    three = stage(spec, store)
    assert current_bundle(store, "llama") == three.bundle
    assert _hold(store) is None
    make_published(tmp_path / "o")
    assert stage(spec, store).switched, "a hold that ended does not come back with its bundle"
    assert _hold(store) is None


def test_every_bundle_that_was_left_on_the_way_back_is_held_off(store):
    one, two, three = (_generation(store, text) for text in (b"one", b"two", b"three"))
    rollback(store, "llama")
    rollback(store, "llama")
    hold = _hold(store)
    assert hold is not None
    assert (hold.bundle, hold.left) == (one.id, (three.id, two.id))
    for left in (two, three):
        with raises(NotReadyError, 1, "rolled back"):
            switch(store, "llama", left, why="stage")


def test_going_forward_again_ends_the_hold_where_it_began(store):
    _, two, three = (_generation(store, text) for text in (b"one", b"two", b"three"))
    rollback(store, "llama")
    rollback(store, "llama")
    rollback(store, "llama", to=two.id)
    hold = _hold(store)
    assert hold is not None
    assert (hold.bundle, hold.left) == (two.id, (three.id,))
    rollback(store, "llama", to=three.id)
    assert current_bundle(store, "llama") == three.id
    assert _hold(store) is None


def test_a_rollback_to_what_is_live_changes_no_hold(store):
    one, two = _generation(store, b"one"), _generation(store, b"two")
    rollback(store, "llama", to=two.id)
    assert _hold(store) is None
    rollback(store, "llama")
    rollback(store, "llama", to=one.id)
    hold = _hold(store)
    assert hold is not None
    assert hold.left == (two.id,)


def test_a_rollback_that_never_switched_holds_nothing(store):
    _generation(store, b"one")
    two = _generation(store, b"two")
    with (
        locked(start_lock(store, "llama"), shared=True, seconds=0, waiting_for="nobody"),
        raises(LockTimeoutError, 4),
    ):
        rollback(store, "llama", seconds=0)
    assert current_bundle(store, "llama") == two.id
    assert _hold(store) is None


def test_a_hold_is_one_deployments_own(store):
    _generation(store, b"one")
    two = _generation(store, b"two")
    rollback(store, "llama")
    assert switch(store, "other", two, why="stage")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"bundle":"x"}', b'{"at":"never","bundle":"x","by":"","left":[],"why":""}']
)
def test_a_torn_hold_is_none(store, body):
    one = _generation(store, b"one")
    write_hold(store, "llama", Hold(one.id, ("bundle-x",), 1.0, "ada"))
    assert _hold(store) is not None
    (store.root / "holds" / "llama" / f"{one.id}.json").write_bytes(body)
    assert _hold(store) is None
