"""Bytes reach the disk only at their place, count only when they are right, and every failure has one cause."""

from __future__ import annotations

import threading

import pytest

from llm_prefetch.errors import (
    DigestError,
    DiskError,
    OriginAccessError,
    OriginUnavailableError,
    UnsafePathError,
)
from llm_prefetch.journal import read_journal
from llm_prefetch.plan import make_plan
from llm_prefetch.salvage import prepare_partial
from llm_prefetch.stop import Stop
from llm_prefetch.transfer import Throttle, transfer
from tests.samples import (
    CHUNK,
    FILES,
    TOTAL,
    Counter,
    FakeOrigin,
    make_listing,
    make_source,
    no_record,
    raises,
    stage_source,
    tree,
)
from tests.transfer.running import WEIGHTS, run_transfer, unavailable

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.mark.parametrize("piece", [1, 5, CHUNK, 100])
@pytest.mark.parametrize("workers", [1, 4])
def test_every_file_arrives_whole(store, monkeypatch, piece, workers):
    monkeypatch.setenv("LLM_PREFETCH_CONCURRENCY", str(workers))
    source, progress = make_source(FakeOrigin(piece=piece)), Counter()
    path, done = run_transfer(store, source, progress)
    assert tree(path) == FILES
    assert progress.done == TOTAL
    assert len(done) == len(source.origin.reads)


def test_files_are_made_at_full_size_and_their_inodes_are_told(store):
    source = make_source()
    journal = prepare_partial(store, source)
    path = store.partial(source.key) / "tree"
    journal.open()
    inodes = transfer(make_plan(store, source), path, journal, Counter(), throttle=Throttle(), stop=Stop())
    journal.close()
    assert inodes == {name: (path / name).stat().st_ino for name in FILES}


@pytest.mark.parametrize("short", [b"", b"abc"])
def test_a_range_that_fails_on_the_way_is_tried_again_and_counted_once(store, short):
    def fault(read):
        if read.attempt > 1 or read.start != CHUNK:
            return None
        return unavailable() if read.path == WEIGHTS else short

    source, progress = make_source(FakeOrigin(fault=fault)), Counter()
    path, _ = run_transfer(store, source, progress)
    assert tree(path) == FILES
    assert progress.done == TOTAL


def test_wrong_bytes_are_fetched_once_more_and_then_refused(store):
    source = make_source(FakeOrigin(fault=lambda read: b"x" * read.length if read.path == WEIGHTS else None))
    progress = Counter()
    with raises(DigestError, 5, WEIGHTS, "fake://origin"):
        run_transfer(store, source, progress)
    journal = read_journal(store.partial(source.key) / "journal")
    wrong = sorted(FILES).index(WEIGHTS)
    assert not [key for key in journal.done if key[0] == wrong]
    assert max(read.attempt for read in source.origin.reads) == 2
    paths = sorted(FILES)
    in_place = sum(min(CHUNK, len(FILES[paths[file]]) - chunk * CHUNK) for file, chunk in journal.done)
    assert progress.done == in_place


def test_a_bit_that_flipped_on_the_way_is_mended(store):
    def fault(read):
        return b"x" * read.length if read.path == WEIGHTS and read.attempt == 1 else None

    progress = Counter()
    path, _ = run_transfer(store, make_source(FakeOrigin(fault=fault)), progress)
    assert tree(path) == FILES
    assert progress.done == TOTAL


def test_retries_end(store, monkeypatch):
    monkeypatch.setenv("LLM_PREFETCH_ATTEMPTS", "2")
    source = make_source(FakeOrigin(fault=lambda read: unavailable() if read.path == WEIGHTS else None))
    with raises(OriginUnavailableError, 3, "the line broke"):
        run_transfer(store, source)
    assert max(read.attempt for read in source.origin.reads) == 2


def test_a_refusal_is_not_tried_again(store):
    refusal = OriginAccessError("no", where="fake://origin", hint="ask")
    source = make_source(FakeOrigin(fault=lambda read: refusal))
    with raises(OriginAccessError, 3, "no"):
        run_transfer(store, source)
    assert max(read.attempt for read in source.origin.reads) == 1


def test_the_first_failure_is_told_and_not_its_echo_in_other_workers(store, monkeypatch):
    """The worker that reads the first chunk is held in the middle of it until another one has failed for good."""
    monkeypatch.setenv("LLM_PREFETCH_CONCURRENCY", "2")
    failed = threading.Event()

    class Origin(FakeOrigin):
        def reader(self):
            reader, close = super().reader(), FakeOrigin.reader(self).close

            def closed():
                if threading.current_thread() is self.bad:
                    self.closes += 1
                    if self.closes == 2:  # the second time, wrong bytes are final
                        failed.set()
                close()

            reader.close = closed
            return reader

    origin = Origin({"a": b"12345678", "b": b"87654321"}, piece=4)
    origin.bad, origin.closes = None, 0

    def fault(read):
        if read.path == "b":
            origin.bad = threading.current_thread()
            return b"x" * read.length
        return None

    def on_advance(delta):
        if delta > 0 and threading.current_thread() is not origin.bad:
            assert failed.wait(60)

    origin.fault = fault
    source = make_source(origin)
    with raises(DigestError, 5, "'b'"):
        run_transfer(store, source, Counter(on_advance=on_advance))


def test_a_body_that_gives_more_than_was_asked_for_overwrites_no_neighbour(store, monkeypatch):
    """The last chunk is written first; a body that runs on must not reach into it."""
    monkeypatch.setenv("LLM_PREFETCH_CONCURRENCY", "1")
    files = {"a": b"AAAAAAAABBBBBBBB"}
    bad = FakeOrigin(files, fault=lambda read: b"AAAAAAAAxxxxxxxx" if read.start == 0 else None, piece=100)
    path, _ = run_transfer(store, make_source(bad))
    assert tree(path) == files
    greedy = FakeOrigin({"a": bytes(range(64))}, greedy=True, piece=100)
    path, _ = run_transfer(store, make_source(greedy))
    assert tree(path) == greedy.files


def test_a_cancelled_transfer_keeps_what_is_done(store, monkeypatch):
    monkeypatch.setenv("LLM_PREFETCH_CONCURRENCY", "1")
    stop = threading.Event()
    source = make_source()

    def after_three_chunks(delta):
        if len(source.origin.reads) == 4:
            stop.set()

    progress = Counter(on_advance=after_three_chunks)
    with pytest.raises(OriginUnavailableError, match="cancelled") as caught:
        run_transfer(store, source, progress, Stop(stop))
    assert caught.value.retryable
    assert len(source.origin.reads) == 4  # a cancelled range is not tried again
    assert len(read_journal(store.partial(source.key) / "journal").done) == 3
    assert no_record(store)
    again = make_source()
    report = stage_source(store, again)
    assert report.fetched_bytes == again.origin.bytes_read < TOTAL
    assert tree(store.artifact("weights", report.version)) == FILES


@pytest.mark.parametrize("what", ["file", "folder", "tree"])
def test_a_symbolic_link_in_the_way_is_never_written_through(store, tmp_path, what):
    source = make_source()
    prepare_partial(store, source).close()
    path, victim = store.partial(source.key) / "tree", tmp_path / "victim"
    if what == "file":
        victim.write_bytes(b"precious")
        (path / "config.json").symlink_to(victim)
    else:
        victim.mkdir()
        place = path / "layers" if what == "folder" else path
        if what == "tree":
            place.rmdir()
        place.symlink_to(victim)
    with raises(UnsafePathError, 5):
        stage_source(store, source)
    assert no_record(store)
    where = {"file": "config.json", "folder": "layers/", "tree": ""}[what]
    assert not [read for read in source.origin.reads if read.path.startswith(where)]
    assert victim.read_bytes() == b"precious" if what == "file" else tree(victim) == {}


def test_a_symbolic_link_that_is_set_during_the_transfer_is_not_followed(store, tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_PREFETCH_CONCURRENCY", "1")
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    source = make_source()
    last = store.partial(source.key) / "tree/layers/1/weights.bin"

    def fault(read):
        if read.path == "layers/1/weights.bin" and read.start == 0:
            last.unlink()
            last.symlink_to(victim)

    source.origin.fault = fault
    with raises(UnsafePathError, 5, "layers/1/weights.bin"):
        stage_source(store, source)
    assert victim.read_bytes() == b"precious"
    assert no_record(store)


def test_a_disk_that_fails_is_not_taken_for_the_origin(store):
    source = make_source()
    path = store.partial(source.key) / "tree"

    def fault(read):
        if path.exists():
            path.rename(path.with_name("gone"))

    source.origin.fault = fault
    with raises(DiskError, 4):
        run_transfer(store, source)


def test_a_listing_learns_its_digests_on_the_way(store):
    origin = FakeOrigin()
    _, done = run_transfer(store, make_source(origin, make_listing(origin)))
    assert len(done) == 3
    assert all(len(digest) == 64 for digest in done.values())


def test_a_read_only_file_of_a_commit_that_was_cut_short_is_made_writable(store):
    source = make_source()
    path, _ = run_transfer(store, source)
    for name in FILES:
        (path / name).chmod(0o444)
    (path.parent / "journal").unlink()
    run_transfer(store, source)
    assert {(path / name).stat().st_mode & 0o777 for name in FILES if FILES[name]} == {0o644}


def test_throttled_bytes_arrive_all_the_same(store):
    path, _ = run_transfer(store, make_source(), throttle=Throttle(10_000.0))
    assert tree(path) == FILES


def test_no_range_is_asked_for_before_its_first_bytes_may_pass(store):
    """What an origin has sent into the buffers of the line has used the line, whenever it is read."""
    origin = FakeOrigin()

    class Counted(Throttle):
        passed = 0

        def delay(self, count: int) -> float:
            with origin._lock:
                self.passed += 1
            return 0.0

    throttle = Counted()
    origin.fault = lambda read: (
        None if throttle.passed >= len(origin.reads) else unavailable("asked for too early")
    )
    path, _ = run_transfer(store, make_source(origin), throttle=throttle)
    assert tree(path) == FILES
    assert {read.attempt for read in origin.reads} == {1}
