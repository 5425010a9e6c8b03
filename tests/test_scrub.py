"""The scrub: what a bad disk did is found, and mended, put away or reported; never under a replica's feet."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from llm_prefetch import ledger, manifest
from llm_prefetch.commit import set_aside
from llm_prefetch.errors import DiskPermissionError, OriginNotFoundError, OriginUnavailableError
from llm_prefetch.leases import hold, staging
from llm_prefetch.live import (
    Bundle,
    check_deployment,
    current_bundle,
    make_bundle,
    read_bundle,
    rollback,
    switch,
)
from llm_prefetch.record import Verdict
from llm_prefetch.scrub import scrub
from llm_prefetch.stage import stage
from llm_prefetch.store import NodeStore, open_store, release
from llm_prefetch.transfer import Throttle
from llm_prefetch.verify import full_check
from tests.samples import (
    CHUNK,
    FILES,
    TOTAL,
    as_nobody,
    flip_byte,
    make_published,
    make_spec,
    only_record,
    raises,
    tree,
)

pytestmark = pytest.mark.usefixtures("no_leaks")
WRONG = "layers/0/weights.bin"


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    make_published(tmp_path / "origin")
    return tmp_path / "origin"


@pytest.fixture
def file(store: NodeStore, origin: Path) -> Path:
    """A file of the live bundle."""
    stage(make_spec(f"file://{origin}"), store)
    return _file(store)


def _file(store: NodeStore) -> Path:
    return Path(os.path.realpath(store.engine_path("llama", "weights"))) / WRONG


def _bundle(store: NodeStore) -> Bundle:
    bundle = read_bundle(store, current_bundle(store, "llama") or "")
    assert bundle is not None
    return bundle


def test_what_is_right_is_read_once_and_left_alone(store, file):
    before = file.stat().st_ino
    report = scrub(store, "llama")
    assert (report.verdict, report.damage, report.did) == (Verdict.HIT, (), ())
    assert report.read_bytes == TOTAL
    assert file.stat().st_ino == before
    [row] = ledger.read(store, "scrub")
    assert (row["outcome"], row["read"], row["bundle"]) == ("HIT", TOTAL, report.bundle)


def test_a_wrong_chunk_is_fetched_again_and_nothing_else(store, file):
    flip_byte(file, at=CHUNK)
    assert check_deployment(store, "llama").ready, "what only a full check can see"
    report = scrub(store, "llama")
    assert (report.verdict, report.did, report.error) == (Verdict.HIT, ("repaired",), None)
    assert report.fetched_bytes == CHUNK
    assert f"'{WRONG}' from byte {CHUNK}" in report.damage[0]
    assert check_deployment(store, "llama", full=True).ready
    assert tree(store.engine_path("llama", "weights")) == FILES


def test_a_replica_that_has_the_file_mapped_keeps_what_it_mapped(store, file):
    flip_byte(file, at=CHUNK)
    damaged = file.read_bytes()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert scrub(store, "llama").did == ("repaired",)
        assert bytes(mapped) == damaged
        assert _file(store).read_bytes() == FILES[WRONG]


def test_files_that_are_gone_or_cut_are_fetched_again(store, file):
    file.unlink()
    os.truncate(file.parents[1] / "1/weights.bin", 3)
    report = scrub(store, "llama")
    assert (report.verdict, report.did) == (Verdict.HIT, ("repaired",))
    assert check_deployment(store, "llama", full=True).ready


def test_damage_that_is_only_reported_still_keeps_replicas_away(store, file):
    flip_byte(file)
    report = scrub(store, "llama", on_damage="report")
    assert (report.verdict, report.did, len(report.damage)) == (Verdict.CORRUPT, (), 1)
    assert check_deployment(store, "llama").verdict is Verdict.CORRUPT
    assert file.exists()


def test_quarantine_takes_the_version_out_of_use_and_keeps_its_files(store, file):
    flip_byte(file)
    report = scrub(store, "llama", on_damage="quarantine")
    assert (report.verdict, report.did) == (Verdict.MISSING, ("quarantined",))
    assert check_deployment(store, "llama").verdict is Verdict.MISSING
    [kept] = (store.root / "quarantine").iterdir()
    assert set(tree(kept)) == set(FILES)


def test_quarantine_moves_nothing_that_a_replica_runs_on(store, file):
    flip_byte(file)
    lease = hold(store, _bundle(store).id, deployment="llama")
    try:
        report = scrub(store, "llama", on_damage="quarantine")
        assert (report.verdict, report.did) == (Verdict.CORRUPT, ("marked: a replica runs on it",))
        assert file.exists()
    finally:
        release(lease)
    assert scrub(store, "llama", on_damage="quarantine").did == ("quarantined",)


def test_quarantine_looks_again_at_what_was_only_touched(store, file):
    os.utime(file)
    report = scrub(store, "llama", full=False, on_damage="quarantine")
    assert (report.verdict, report.did) == (Verdict.HIT, ("right at the second look",))


def test_the_quick_scrub_reads_nothing_and_mends_what_it_sees(store, file):
    assert scrub(store, "llama", full=False).read_bytes == 0
    file.unlink()
    assert scrub(store, "llama", full=False).did == ("repaired",)
    assert check_deployment(store, "llama", full=True).ready


def test_an_origin_that_is_gone_leaves_the_damage_known(store, file, origin):
    flip_byte(file)
    origin.rename(origin.with_name("moved"))
    report = scrub(store, "llama")
    assert isinstance(report.error, OriginNotFoundError)
    assert report.verdict is Verdict.CORRUPT
    [row] = ledger.read(store, "scrub")
    assert row["outcome"] == str(report.error)
    origin.with_name("moved").rename(origin)
    assert scrub(store, "llama").verdict is Verdict.HIT


def test_one_artifact_that_cannot_be_mended_does_not_keep_the_other_from_it(store, tmp_path):
    uris = [make_published(tmp_path / "one"), make_published(tmp_path / "two", {"a": b"another"})]
    stage(make_spec(*uris), store)
    for member, path in zip(_bundle(store).members, (WRONG, "a"), strict=True):
        flip_byte(store.artifact(member.name, member.version) / path)
    (tmp_path / "one").rename(tmp_path / "gone")
    report = scrub(store, "llama")
    assert isinstance(report.error, OriginNotFoundError)
    assert (report.did, len(report.damage)) == (("repaired",), 2)
    assert [check.ready for check in check_deployment(store, "llama").checks] == [False, True]


def test_bent_links_are_mended(store, file, tmp_path):
    link = store.bundle(_bundle(store).id) / "weights"
    link.unlink()
    link.symlink_to(tmp_path)
    assert scrub(store, "llama", on_damage="report").verdict is Verdict.CORRUPT
    assert scrub(store, "llama").verdict is Verdict.HIT


def test_a_version_without_its_record_is_for_staging_to_mend(store, file):
    member = _bundle(store).members[0]
    store.record(member.name, member.version).unlink()
    report = scrub(store, "llama")
    assert (report.verdict, report.did) == (Verdict.MISSING, ())


def test_nothing_live_is_missing(store):
    report = scrub(store, "llama")
    assert (report.verdict, report.reason) == (Verdict.MISSING, "nothing is live on this node")


def test_what_goes_live_meanwhile_is_read_too(store, file, origin):
    make_published(origin, {**FILES, "config.json": b"two"})
    stage(make_spec(f"file://{origin}"), store)
    two = _bundle(store)
    rollback(store, "llama")
    one = _bundle(store)

    class SwitchesOnce(Throttle):
        switched = False

        def delay(self, count: int) -> float:
            if not self.switched:
                self.switched = True
                rollback(store, "llama", to=two.id)
            return 0.0

    report = scrub(store, "llama", throttle=SwitchesOnce())
    assert (report.bundle, report.verdict, report.damage) == (two.id, Verdict.HIT, ())
    read = {member.version: sum(map(len, tree(store.artifact("weights", member.version)).values()))
            for bundle in (one, two) for member in bundle.members}  # fmt: skip
    assert report.read_bytes == sum(read.values())


def test_a_repair_reads_the_origin_in_the_way_that_the_staging_did(store, origin, monkeypatch):
    stage(make_spec(f"file://{origin}", transport="fsspec"), store)
    flip_byte(_file(store))
    opened, opens = [], LocalFileSystem._open

    def watched(fs: LocalFileSystem, path: str, *rest: Any, **options: Any) -> Any:
        opened.append(path)
        return opens(fs, path, *rest, **options)

    monkeypatch.setattr(LocalFileSystem, "_open", watched)
    report = scrub(store, "llama")
    assert (report.verdict, report.did, report.error) == (Verdict.HIT, ("repaired",), None)
    assert str(origin / manifest.PATH) in opened, "asked whether it is there"
    assert str(origin / WRONG) in opened, "fetched"
    assert only_record(store).transport == "fsspec"


def test_two_scrubs_and_a_staging_at_once_end_with_everything_right(store, file, origin):
    spec = make_spec(f"file://{origin}")
    flip_byte(file, at=CHUNK)
    with ThreadPoolExecutor(3) as pool:
        scrubs = [pool.submit(scrub, store, "llama") for _ in range(2)]
        staged = pool.submit(stage, spec, store)
        reports = [one.result() for one in scrubs]
        staged.result()
    assert [report.verdict for report in reports] == [Verdict.HIT] * 2
    assert check_deployment(store, "llama", full=True).ready
    assert sum(report.fetched_bytes for report in reports) <= CHUNK


def test_a_staging_mends_what_a_scrub_finds_while_it_looks(store, file, origin, monkeypatch):
    [member] = _bundle(store).members
    looks: list[str] = []

    def scrubbed(step: str) -> None:
        if step == "verify" and not looks:
            looks.append(step)
            flip_byte(file)
            assert not full_check(store, member.name, member.version).ready

    monkeypatch.setattr(ledger, "observers", [scrubbed])
    assert stage(make_spec(f"file://{origin}"), store).verdict is Verdict.HIT
    assert looks
    assert check_deployment(store, "llama", full=True).ready


@pytest.mark.parametrize("on_damage", ["repair", "quarantine", "report"])
def test_what_a_staging_is_mending_is_looked_at_when_it_is_done(store, file, origin, on_damage):
    waits = threading.Event()

    class Watched(threading.Event):
        def is_set(self) -> bool:
            waits.set()
            return super().is_set()

    with ThreadPoolExecutor(1) as pool:
        with staging(store, "llama"):
            member = _bundle(store).members[0]
            set_aside(store, member.name, member.version)  # as a staging of a damaged version begins
            scrubbed = pool.submit(scrub, store, "llama", on_damage=on_damage, stop=Watched())
            assert waits.wait(60), "the scrub found nothing wrong"
            stage(make_spec(f"file://{origin}"), store)
        report = scrubbed.result()
    assert (report.verdict, report.did, report.fetched_bytes) == (Verdict.HIT, ("staged meanwhile",), 0)
    assert "MISSING" in report.damage[0]


def test_a_version_that_is_set_aside_while_it_is_read_is_not_marked(store, file, origin):
    flip_byte(file)
    [member] = _bundle(store).members

    class TakenAway(Throttle):
        staged = False

        def delay(self, count: int) -> float:
            if not self.staged:
                self.staged = True
                set_aside(store, member.name, member.version)
                stage(make_spec(f"file://{origin}"), store)
            return 0.0

    report = scrub(store, "llama", throttle=TakenAway())
    assert (report.verdict, report.error) == (Verdict.HIT, None)
    assert check_deployment(store, "llama", full=True).ready


class _Slow(Throttle):
    def delay(self, count: int) -> float:
        return count / 1000


def test_reading_waits_as_long_as_the_throttle_says(store, file):
    waited = []

    class Watched(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout)
            return False

    assert scrub(store, "llama", throttle=_Slow(), stop=Watched()).verdict is Verdict.HIT
    assert sum(waited) == pytest.approx(TOTAL / 1000)


def test_it_ends_when_it_is_told_to(store, file):
    stop = threading.Event()
    stop.set()
    with pytest.raises(OriginUnavailableError):
        scrub(store, "llama", throttle=_Slow(), stop=stop)


def test_a_file_that_may_not_be_read_is_no_damage_and_no_success(nobodys_folder):
    with as_nobody():
        store = open_store(nobodys_folder / "store", create=True)
        stage(make_spec(make_published(nobodys_folder / "origin")), store)
        file = _file(store)
        file.chmod(0)
        with raises(DiskPermissionError, 4):
            scrub(store, "llama")
        file.chmod(0o444)
        assert scrub(store, "llama").verdict is Verdict.HIT


def test_bytes_that_the_disk_has_lost_are_damage(store, file, monkeypatch):
    """As a bad sector is; the system call is the one thing here that is not real."""
    bad, read = file.stat().st_ino, os.preadv

    def preadv(fd: int, buffers: list[memoryview], at: int) -> int:
        if os.fstat(fd).st_ino == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", preadv)
    report = scrub(store, "llama", on_damage="report")
    assert report.verdict is Verdict.CORRUPT
    assert f"'{WRONG}' from byte 0" in report.damage[0]
    assert scrub(store, "llama", on_damage="quarantine").did == ("quarantined",)


def test_a_live_link_that_was_switched_by_hand_is_followed(store, file):
    bundle = make_bundle(store, _bundle(store).members)
    switch(store, "other", bundle, why="test")
    assert scrub(store, "other").verdict is Verdict.HIT
