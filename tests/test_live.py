"""Generations: a replica sees one bundle or the other, whole, and a rollback is the same switch."""

from __future__ import annotations

import os
import shutil

import pytest

from llm_prefetch.errors import DiskError, LockTimeoutError, NotReadyError, SpecError
from llm_prefetch.live import (
    Member,
    check_deployment,
    current_bundle,
    deployments,
    generations,
    history,
    make_bundle,
    read_bundle,
    rollback,
    start_lock,
    switch,
)
from llm_prefetch.record import Verdict
from llm_prefetch.store import locked
from tests.samples import FILES, FakeOrigin, flip_byte, make_source, raises, stage_source, tree

pytestmark = pytest.mark.usefixtures("no_leaks")


def _generation(store, text, *, live=True):
    """Stage a version with `text` in it and make it live."""
    source = make_source(FakeOrigin({**FILES, "config.json": text}))
    version = stage_source(store, source).version
    bundle = make_bundle(store, [Member("weights", "model", version)])
    if live:
        switch(store, "llama", bundle, why="stage")
    return bundle


def _seen(store):
    """What an engine reads at its path."""
    return (store.engine_path("llama", "weights") / "config.json").read_bytes()


def test_a_bundle_is_a_folder_of_relative_links(store):
    bundle = _generation(store, b"one")
    link = store.bundle(bundle.id) / "weights"
    assert os.readlink(link) == f"../../artifacts/weights/{bundle.members[0].version}"  # noqa: PTH115
    assert read_bundle(store, bundle.id) == bundle


def test_the_engine_path_is_a_function_of_names_and_its_content_switches_whole(store):
    path = store.engine_path("llama", "weights")
    _generation(store, b"one")
    assert (path, _seen(store)) == (store.root / "live/llama/weights", b"one")
    _generation(store, b"two")
    assert (path, _seen(store)) == (store.root / "live/llama/weights", b"two")


def test_a_store_that_moves_keeps_working(store):
    _generation(store, b"one")
    moved = store.root.rename(store.root.with_name("moved"))
    assert (moved / "live/llama/weights/config.json").read_bytes() == b"one"


def test_a_bundle_is_named_by_its_members_whatever_their_order(store):
    one, two = Member("a", "model", "b3-1"), Member("b", "files", "b3-2")
    assert make_bundle(store, [one, two]) == make_bundle(store, [two, one])
    others = [[one], [one, Member("b", "files", "b3-3")], [one, Member("b", "plugin", "b3-2")]]
    assert len({make_bundle(store, members).id for members in [[one, two], *others]}) == 4
    assert not list((store.root / "bundles").glob(".*"))


def test_switching_to_what_is_live_changes_nothing(store):
    bundle = _generation(store, b"one")
    before = os.lstat(store.live("llama")).st_ino
    assert not switch(store, "llama", bundle, why="stage")
    assert os.lstat(store.live("llama")).st_ino == before
    assert history(store, "llama") == [bundle.id]


def test_a_switch_waits_for_starting_replicas_and_then_leaves_all_as_it_was(store):
    old, new = _generation(store, b"one"), _generation(store, b"two", live=False)
    with locked(start_lock(store, "llama"), shared=True, seconds=0, waiting_for="nobody"):
        with raises(LockTimeoutError, 4, "a starting replica of llama"):
            switch(store, "llama", new, why="stage", seconds=0)
        assert current_bundle(store, "llama") == old.id
        assert switch(store, "other", new, why="stage", seconds=0)
    assert switch(store, "llama", new, why="stage", seconds=0)
    assert _seen(store) == b"two"


def test_a_switch_that_the_disk_refuses_leaves_the_old_link(store):
    bundle = _generation(store, b"one", live=False)
    store.live("llama").mkdir()
    with raises(DiskError, 4, str(store.live("llama"))):
        switch(store, "llama", bundle, why="stage")
    assert os.listdir(store.root / "live") == ["llama"]  # noqa: PTH208


def test_each_rollback_goes_one_generation_further_back(store):
    one, two, _ = _generation(store, b"one"), _generation(store, b"two"), _generation(store, b"three")
    assert rollback(store, "llama") == two
    assert rollback(store, "llama") == one
    assert _seen(store) == b"one"
    with raises(SpecError, 2, "no earlier generation"):
        rollback(store, "llama")


def test_after_a_rollback_a_new_generation_lies_on_the_one_gone_back_to(store):
    one, _ = _generation(store, b"one"), _generation(store, b"two")
    rollback(store, "llama")
    three = _generation(store, b"three")
    assert generations(store, "llama") == [one.id, three.id]
    assert rollback(store, "llama") == one


def test_a_switch_whose_row_was_lost_in_a_kill_is_still_gone_back_to(store):
    one, two = _generation(store, b"one"), _generation(store, b"two", live=False)
    store.live("llama").unlink()
    store.live("llama").symlink_to(f"../bundles/{two.id}")
    assert rollback(store, "llama") == one


def test_a_rollback_goes_to_a_named_generation(store):
    one, _, _ = _generation(store, b"one"), _generation(store, b"two"), _generation(store, b"three")
    assert rollback(store, "llama", to=one.id[:20]) == one
    assert rollback(store, "llama", to=one.id.removeprefix("bundle-")) == one
    assert _seen(store) == b"one"


@pytest.mark.parametrize("to", ["bundle-", "nothing", "../../etc", "*", "bundle-*"])
def test_a_name_that_is_not_just_one_bundle_is_refused(store, to):
    _generation(store, b"one")
    _generation(store, b"two")
    with raises(SpecError, 2, "bundle"):
        rollback(store, "llama", to=to)
    assert _seen(store) == b"two"


def test_without_an_earlier_generation_there_is_no_rollback(store):
    with raises(SpecError, 2, "no deployment 'llama'"):
        rollback(store, "llama")
    _generation(store, b"one")
    with raises(SpecError, 2, "no earlier generation"):
        rollback(store, "llama")


def test_a_rollback_never_goes_to_something_incomplete(store):
    one, _ = _generation(store, b"one"), _generation(store, b"two")
    (store.artifact("weights", one.members[0].version) / "config.json").unlink()
    with raises(NotReadyError, 1, "PARTIAL", one.id):
        rollback(store, "llama")
    assert _seen(store) == b"two"


@pytest.mark.parametrize("damage", ["gone", "bent"])
def test_a_rollback_mends_the_links_of_its_bundle(store, tmp_path, damage):
    one, _ = _generation(store, b"one"), _generation(store, b"two")
    _bend(store, one, tmp_path) if damage == "bent" else shutil.rmtree(store.bundle(one.id))
    rollback(store, "llama")
    assert check_deployment(store, "llama").ready
    assert _seen(store) == b"one"


def test_a_rollback_waits_for_starting_replicas(store):
    _generation(store, b"one")
    _generation(store, b"two")
    with (
        locked(start_lock(store, "llama"), shared=True, seconds=0, waiting_for="nobody"),
        raises(LockTimeoutError, 4),
    ):
        rollback(store, "llama", seconds=0)
    assert _seen(store) == b"two"


def _bend(store, bundle, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    link = store.bundle(bundle.id) / "weights"
    link.unlink()
    link.symlink_to(outside)


@pytest.mark.parametrize("full", [True, False])
def test_a_link_that_leads_out_of_the_store_is_corrupt_and_staging_again_mends_it(store, tmp_path, full):
    bundle = _generation(store, b"one")
    _bend(store, bundle, tmp_path)
    check = check_deployment(store, "llama", full=full)
    assert (check.verdict, check.ready) == (Verdict.CORRUPT, False)
    assert "leads elsewhere" in check.reason
    _generation(store, b"one")
    assert check_deployment(store, "llama", full=full).ready
    assert _seen(store) == b"one"


def test_a_live_link_that_leads_to_a_bundle_of_that_name_elsewhere_is_mended(store, tmp_path):
    bundle = _generation(store, b"one")
    evil = tmp_path / bundle.id
    (evil / "weights").mkdir(parents=True)
    store.live("llama").unlink()
    store.live("llama").symlink_to(evil)
    assert check_deployment(store, "llama").verdict is Verdict.CORRUPT
    _generation(store, b"one")
    assert check_deployment(store, "llama").ready
    assert _seen(store) == b"one"


def test_a_deployment_is_as_good_as_its_worst_artifact(store):
    bundle = _generation(store, b"one")
    other = stage_source(store, make_source(FakeOrigin({"x": b"x"}), name="other"))
    both = make_bundle(store, [*bundle.members, Member("other", "files", other.version)])
    switch(store, "llama", both, why="stage")
    assert check_deployment(store, "llama", full=True).ready
    flip_byte(store.artifact("other", other.version) / "x")
    assert check_deployment(store, "llama").ready
    check = check_deployment(store, "llama", full=True)
    assert check.verdict is Verdict.CORRUPT
    assert check.reason.startswith("other: 'x' from byte 0")
    assert [one.verdict for one in check.checks] == [Verdict.CORRUPT, Verdict.HIT]


def test_what_is_not_live_is_missing(store):
    assert check_deployment(store, "llama").verdict is Verdict.MISSING
    bundle = _generation(store, b"one")
    (store.root / "bundles" / f"{bundle.id}.json").unlink()
    assert check_deployment(store, "llama").verdict is Verdict.MISSING


def test_a_bundle_whose_artifact_is_gone_is_not_ready(store):
    bundle = _generation(store, b"one")
    shutil.rmtree(store.artifact("weights", bundle.members[0].version))
    assert check_deployment(store, "llama").verdict is Verdict.PARTIAL
    shutil.rmtree(store.root / "artifacts/weights")
    assert check_deployment(store, "llama").verdict is Verdict.MISSING


def test_deployments_are_listed_without_temporary_links(store):
    bundle = _generation(store, b"one")
    switch(store, "a", bundle, why="stage")
    (store.root / "live/.a.1.tmp").symlink_to("x")
    (store.root / "live/file").write_bytes(b"")
    assert deployments(store) == ["a", "llama"]


@pytest.mark.parametrize("body", [b"", b"[]", b'{"members":[{"name":"a"}]}', b'{"members":1}'])
def test_a_torn_bundle_file_is_written_again(store, body):
    bundle = _generation(store, b"one")
    (store.root / "bundles" / f"{bundle.id}.json").write_bytes(body)
    assert read_bundle(store, bundle.id) is None
    _generation(store, b"one")
    assert read_bundle(store, bundle.id) == bundle
    assert tree(store.bundle(bundle.id) / "weights")["config.json"] == b"one"
