"""Room on the disk: what nothing needs goes, oldest first and no more than needed; all else stays, whoever is at work."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_prefetch import leases, ledger
from llm_prefetch.errors import NoSpaceError, SpecError
from llm_prefetch.leases import in_use
from llm_prefetch.leftovers import delete, files_below, kept, leftovers, pin
from llm_prefetch.live import Member, check_deployment, make_bundle, rollback, switch
from llm_prefetch.plan import make_plan
from llm_prefetch.record import Verdict, check_record
from llm_prefetch.room import drawn_on, enough, make_room
from llm_prefetch.salvage import prepare_partial
from llm_prefetch.stage import stage
from llm_prefetch.stop import Stop
from llm_prefetch.store import locked, open_store, release
from tests.samples import (
    Counter,
    FakeOrigin,
    make_manifest,
    make_published,
    make_source,
    make_spec,
    raises,
    stage_source,
)

BLOCK = 4096
REPOSITORY = Path(__file__).parents[1]


def source_of(files, *, name="weights"):
    """An origin whose manifest has a chunk for each block."""
    return make_source(FakeOrigin(files, piece=BLOCK), make_manifest(files, BLOCK), name=name)


def put(store, number, *, name="weights", blocks=1):
    """Stage a version of so many blocks; the higher the number, the younger it is."""
    version = stage_source(store, source_of({"w": bytes([number + 1]) * (blocks * BLOCK)}, name=name)).version
    os.utime(store.record(name, version), (1000 + number, 1000 + number))
    return version


def go_live(store, version, deployment="llama"):
    bundle = make_bundle(store, [Member("weights", "model", version)])
    switch(store, deployment, bundle, why="stage")
    return bundle


@dataclass
class Disk:
    """A disk of so many bytes, of which the files of the store take their blocks."""

    store: object
    bytes: int

    def free(self, _root=None):
        """Only whole blocks count, so that the records do not blur the sum."""
        found = {}
        for folder in ("artifacts", "quarantine", "partial"):
            for one in files_below(self.store.root / folder):
                found[one.st_ino] = one.st_blocks * 512 if one.st_size >= BLOCK else 0
        return self.bytes - sum(found.values())


def room_for(store, blocks, disk, *, allowed=True):
    """Make room for a new version of so many blocks; the names of what went, and what was said."""
    plan, said = make_plan(store, source_of({"w": os.urandom(blocks * BLOCK)})), list[str]()
    gone = make_room(store, plan, allowed=allowed, say=said.append, stop=Stop(), free=disk.free)
    return [one.version for one in gone], said


def test_the_oldest_go_first_and_no_more_than_needed(store):
    versions = [put(store, number) for number in range(4)]
    go_live(store, versions[3])
    gone, said = room_for(store, 2, Disk(store, 4 * BLOCK + BLOCK // 2))
    assert gone == versions[:2]
    assert all("to make room" in line for line in said)
    assert [check_record(store, "weights", version).verdict for version in versions] == [
        Verdict.MISSING, Verdict.MISSING, Verdict.HIT, Verdict.HIT,
    ]  # fmt: skip
    assert [(row["version"], row["bytes"]) for row in ledger.read(store, "evict")] == [
        (version, BLOCK) for version in versions[:2]
    ]
    assert list((store.root / "quarantine").iterdir()) == []


def test_where_it_fits_nothing_goes(store):
    put(store, 0)
    assert room_for(store, 2, Disk(store, 3 * BLOCK)) == ([], [])


def test_where_all_leftovers_are_too_few_none_goes_and_the_error_says_what_holds_the_bytes(store):
    versions = [put(store, number) for number in range(4)]
    for version in versions[1:3]:
        go_live(store, version)
    lease = leases.hold(store, make_bundle(store, [Member("weights", "model", versions[3])]).id)
    with raises(NoSpaceError, 4, "'weights' needs 8192 bytes, 0 are free", "4096 by live deployments",
                "4096 by the generation that a rollback goes to", "4096 by running replicas",
                "4096 by other versions"):  # fmt: skip
        room_for(store, 2, Disk(store, 4 * BLOCK))
    release(lease)
    assert all(check_record(store, "weights", version).verdict is Verdict.HIT for version in versions)


def test_the_policy_can_forbid_it(store):
    put(store, 0)
    with raises(NoSpaceError, 4, "policy.make_room is off"):
        room_for(store, 2, Disk(store, 2 * BLOCK), allowed=False)


def test_what_the_plan_takes_bytes_from_stays(store):
    shared = bytes(BLOCK) + b"7" * BLOCK
    used = stage_source(store, source_of({"w": shared})).version
    os.utime(store.record("weights", used), (1, 1))
    younger = put(store, 0)
    plan = make_plan(store, source_of({"w": shared + b"new"}))
    assert (plan.fetch_bytes, plan.space_bytes) == (3, 2 * BLOCK + 3)
    assert drawn_on(store, plan) == {("weights", used)}
    disk = Disk(store, 4 * BLOCK + 3)
    gone = make_room(store, plan, allowed=True, say=print, stop=Stop(), free=disk.free)
    assert [one.version for one in gone] == [younger]


def test_unfinished_work_and_what_was_set_aside_go_unless_somebody_is_at_work_with_it(store):
    dead, busy = (source_of({"w": bytes([number]) * BLOCK}) for number in (1, 2))
    for source in (dead, busy):
        prepare_partial(store, source)
        (store.partial(source.key) / "tree" / "w").write_bytes(bytes(BLOCK))
    aside = store.root / "quarantine" / f"weights-{busy.key}-1"
    aside.mkdir()
    (store.root / "quarantine" / "weights-old-1").mkdir()
    with locked(store.lock(f"stage-{busy.key}"), seconds=0, waiting_for="nobody"):
        names = {one.path.name for one in leftovers(store)}
        assert names == {dead.key, "weights-old-1"}
        for one in leftovers(store):
            assert delete(store, one, why="test")
    assert store.partial(busy.key).is_dir()
    assert not store.partial(dead.key).exists()
    assert {one.path.name for one in leftovers(store)} == {busy.key, aside.name}


def test_a_file_that_two_versions_share_is_free_when_the_last_of_them_goes(store):
    first = put(store, 0, blocks=4)
    second = put(store, 0, name="other", blocks=4)
    assert [(one.version, one.bytes) for one in leftovers(store)] == [(first, 0), (second, 4 * BLOCK)]
    go_live(store, first)
    assert [(one.name, one.bytes) for one in leftovers(store)] == [("other", 0)]


def test_a_pinned_version_stays_until_it_is_unpinned(store):
    version = put(store, 0)
    assert pin(store, "weights", version[3:9]) == version
    assert leftovers(store) == []
    pin(store, "weights", version[:9], on=False)
    assert [one.version for one in leftovers(store)] == [version]
    with raises(SpecError, 2, "no versions of 'weights'"):
        pin(store, "weights", "b3-0000")


def test_the_generation_that_a_rollback_goes_to_stays_and_the_one_before_it_does_not(store):
    versions = [put(store, number) for number in range(3)]
    for version in versions:
        go_live(store, version)
    assert [one.version for one in leftovers(store)] == versions[:1]
    rollback(store, "llama")
    assert check_deployment(store, "llama").ready


def test_a_lease_on_a_bundle_that_nothing_describes_keeps_everything(store):
    put(store, 0)
    lease = leases.hold(store, "bundle-gone")
    assert leftovers(store) == []
    release(lease)
    assert len(leftovers(store)) == 1


def test_a_bundle_without_its_file_is_known_by_its_links(store):
    version = put(store, 0)
    bundle = go_live(store, version)
    (store.root / "bundles" / f"{bundle.id}.json").unlink()
    assert kept(store) == {("weights", version): "live deployments"}


def test_a_version_that_a_staging_counts_on_stays_until_it_is_live(store, tmp_path):
    """The second artifact is still on its way when somebody needs room: the first must be there at the switch."""
    spec = make_spec(make_published(tmp_path / "one"), make_published(tmp_path / "two", {"b": b"two" * 5}))
    seen = []

    def look():
        if progress.total > 60:  # the second one begins
            seen.extend(one.path.name for one in leftovers(store))
            seen.extend(str(delete(store, one, why="test")) for one in leftovers(store))

    progress = Counter(on_start=look)
    report = stage(spec, store, progress=progress)
    assert seen == []
    assert check_deployment(store, "llama").ready
    versions = {artifact.version for artifact in report.artifacts}
    assert {version for _, version in kept(store)} == versions


def test_a_version_that_comes_into_use_after_it_was_chosen_is_not_deleted(store):
    first, second, third = (put(store, number) for number in range(3))
    chosen = leftovers(store)
    assert [one.version for one in chosen] == [first, second, third]
    go_live(store, first)
    with in_use(store, second):
        assert [delete(store, one, why="test") for one in chosen] == [False, False, True]
        assert not delete(store, chosen[2], why="somebody else was faster")
    assert len(ledger.read(store, "evict")) == 1
    assert check_record(store, "weights", first).verdict is Verdict.HIT
    assert check_record(store, "weights", second).verdict is Verdict.HIT


def test_a_kill_at_any_step_of_a_deletion_leaves_a_leftover_and_no_version_that_counts(store):
    version = put(store, 0)
    [chosen] = leftovers(store)
    store.record("weights", version).unlink()  # died after the record
    assert check_record(store, "weights", version).verdict is Verdict.MISSING
    [again] = leftovers(store)
    assert again.version == chosen.version
    store.artifact("weights", version).rename(store.root / "quarantine" / "deleted-x-1")  # after the rename
    found = leftovers(store)
    assert {one.path.name for one in found} == {version, "deleted-x-1"}  # its manifest is left there too
    for one in found:
        assert delete(store, one, why="test")
    assert leftovers(store) == []
    assert not list(store.root.glob("artifacts/*/b3-*"))


def test_two_at_once_delete_each_leftover_once(store):
    versions = [put(store, number) for number in range(8)]
    disk, results = Disk(store, 9 * BLOCK), []

    def work():
        try:
            results.append(room_for(store, 4, disk)[0])
        except Exception as error:  # a thread's error must not be lost
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(len(gone) for gone in results) == [0, 0, 0, 4], results
    assert [gone for gone in results if gone] == [versions[:4]]


@settings(max_examples=25)
@given(
    st.lists(
        st.sampled_from(["live", "leased", "pinned", "before", "counted on", "drawn on", ""]), max_size=6
    ),
    st.integers(0, 12),
    st.randoms(use_true_random=False),
)
def test_nothing_live_leased_pinned_or_in_use_is_ever_deleted(states, blocks, rng):
    with tempfile.TemporaryDirectory() as folder, ExitStack() as held:
        store = open_store(Path(folder), create=True)
        versions = [put(store, number) for number in range(len(states))]
        for number, (version, state) in enumerate(zip(versions, states, strict=True)):
            if state == "live":
                go_live(store, version, f"deployment-{number}")
            elif state == "before":
                go_live(store, version, f"deployment-{number}")
                go_live(store, put(store, 100 + number), f"deployment-{number}")
            elif state == "pinned":
                pin(store, "weights", version)
            elif state == "leased":
                bundle = make_bundle(store, [Member("weights", "model", version)])
                held.callback(release, leases.hold(store, bundle.id))
            elif state == "counted on":
                held.enter_context(in_use(store, version))
        needed = {version for version, state in zip(versions, states, strict=True) if state}
        drawn = {("weights", v) for v, state in zip(versions, states, strict=True) if state == "drawn on"}
        found = leftovers(store, spare=drawn)
        assert needed.isdisjoint(one.version for one in found)
        assert {one.version for one in found} == set(versions) - needed
        disk = Disk(store, rng.randrange(1, 20) * BLOCK)
        pinned = [pin(store, *version) for version in drawn]  # what a real plan would draw on
        try:
            gone, _ = room_for(store, blocks, disk)
        except NoSpaceError:
            gone = []
            assert disk.free() + sum(one.bytes for one in leftovers(store)) < blocks * BLOCK
        else:
            assert disk.free() >= blocks * BLOCK
        assert needed.isdisjoint(gone)
        assert gone == [version for version in versions if version not in needed][: len(gone)]
        assert all(check_record(store, "weights", version).verdict is Verdict.HIT for version in needed)
        assert len(pinned) == len(drawn)


def test_the_first_that_are_enough_are_chosen(store):
    for number in range(3):
        put(store, number)
    found = leftovers(store)
    assert [len(enough(found, missing)) for missing in (0, 1, BLOCK, BLOCK + 1, 9 * BLOCK)] == [0, 1, 1, 2, 3]


@pytest.mark.cloud
def test_on_a_small_disk_a_staging_makes_its_room_and_says_so(tmp_path):
    """A real file system of 6 MB and versions of 2 MB: the fourth takes the place of the first."""
    code = f"""
        from pathlib import Path
        import os
        from llm_prefetch import ledger
        from llm_prefetch.errors import NoSpaceError
        from llm_prefetch.forecast import find_sources, forecast
        from llm_prefetch.live import check_deployment
        from llm_prefetch.record import records
        from llm_prefetch.stage import stage
        from llm_prefetch.store import open_store
        from tests.samples import Counter, make_published, make_spec
        store = open_store(Path({str(tmp_path / "disk")!r}) / "store", create=True)
        versions, said = [], []
        for number in range(5):
            uri = make_published(Path({str(tmp_path)!r}) / str(number), {{"w": os.urandom(2_000_000)}}, 500_000)
            spec, progress = make_spec(uri), Counter()
            planned = forecast(spec, store, find_sources(spec, store))
            report = stage(spec, store, progress=progress)
            assert planned.fits
            assert planned.evict_bytes == report.evicted_bytes, (planned, report)
            versions.append(report.artifacts[0].version)
            said.append(progress.lines)
            assert check_deployment(store, "llama", full=True).ready
        assert [len(lines) for lines in said] == [0, 0, 0, 1, 1], said
        assert [row["version"] for row in ledger.read(store, "evict")] == versions[:2]
        assert {{record.version for record in records(store)}} == set(versions[2:])
        big = make_spec(make_published(Path({str(tmp_path)!r}) / "big", {{"w": os.urandom(3_000_000)}}, 500_000))
        planned = forecast(big, store, find_sources(big, store))
        assert (planned.fits, planned.evictions) == (False, ())
        try:
            stage(big, store)
        except NoSpaceError as error:
            assert "by live deployments" in error.hint, error.hint
            assert {{record.version for record in records(store)}} == set(versions[2:])
        else:
            raise AssertionError("there is no room for it")
        assert check_deployment(store, "llama", full=True).ready
    """
    (tmp_path / "disk").mkdir()
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    mount = f'mount -t tmpfs -o size=6m tmpfs {tmp_path / "disk"} && exec {sys.executable} -c "$SCRIPT"'
    done = subprocess.run(
        ["unshare", "--mount", *user, "sh", "-c", mount],
        env={**os.environ, "SCRIPT": textwrap.dedent(code)},
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
