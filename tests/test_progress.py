"""Progress by bytes: what a node's staging counts, for whoever asks. (`PercentOfNodes` is in test_cluster_logic.)"""

from __future__ import annotations

import pickle
import threading

from llm_prefetch.progress import CountingProgress, InBackground, NoProgress, Snapshot, duration, how_far


class Clock:
    """A time that only the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_before_the_first_transfer_nothing_is_known():
    snapshot = CountingProgress(clock=Clock()).snapshot()
    assert snapshot == Snapshot("", 0, 0, 0.0)
    assert (snapshot.rate, snapshot.eta_seconds) == (0.0, None)


def test_the_transfers_of_one_staging_add_up_and_the_last_one_gives_the_label():
    clock = Clock()
    progress = CountingProgress(clock=clock)
    progress.start("one", 100)
    progress.advance(100)
    clock.now += 2
    progress.start("two", 300)
    progress.advance(60)
    clock.now += 2
    snapshot = progress.snapshot()
    assert snapshot == Snapshot("two", 400, 160, 4.0)
    assert (snapshot.rate, snapshot.eta_seconds) == (40.0, 6.0)


def test_bytes_that_are_fetched_again_are_taken_off():
    progress = CountingProgress(clock=Clock())
    progress.start("one", 100)
    progress.advance(50)
    progress.advance(-20)
    assert progress.snapshot().done_bytes == 30


def test_a_rate_before_any_time_has_passed_is_none():
    progress = CountingProgress(clock=Clock())
    progress.start("one", 100)
    progress.advance(50)
    assert (progress.snapshot().rate, progress.snapshot().eta_seconds) == (0.0, None)


def test_it_counts_from_any_thread():
    progress = CountingProgress()
    progress.start("one", 8000)

    def advance():
        for _ in range(1000):
            progress.advance(1)

    threads = [threading.Thread(target=advance) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert progress.snapshot().done_bytes == 8000


def test_a_snapshot_travels():
    snapshot = Snapshot("one", 3, 2, 1.0)
    assert pickle.loads(pickle.dumps(snapshot)) == snapshot


def test_talk_is_not_counted():
    for progress in (CountingProgress(clock=Clock()), NoProgress()):
        progress.say("a word")
    progress = NoProgress()
    progress.start("one", 1)
    progress.advance(1)


def test_reports_in_the_background_never_hold_up_who_reports_and_the_last_one_arrives():
    told, slow = [], threading.Event()

    def report(percent, total):
        slow.wait(30)
        told.append((percent, total.label))

    reports = InBackground(report)
    for percent in range(1, 100):
        reports(float(percent), Snapshot("some", 100, percent, 1.0))
    assert told == []  # the server does not answer, and nobody has waited for it
    slow.set()
    reports(100.0, Snapshot("all", 100, 100, 1.0))
    reports.close(30)
    assert told[-1] == (100.0, "all")
    assert len(told) <= 3  # what was overtaken is not told


def test_a_server_that_never_answers_does_not_keep_the_run_from_ending():
    never = threading.Event()
    reports = InBackground(lambda *_: never.wait(60))
    reports(1.0, Snapshot("some", 100, 1, 1.0))
    reports.close(0.1)
    never.set()


def test_how_far_it_is_reads_as_a_line():
    assert how_far(Snapshot("3 nodes", 0, 0, 4.0)) == "3 nodes: nothing to fetch"
    half = Snapshot("3 nodes", 40 * 10**9, 20 * 10**9, 10.0, since_bytes=10 * 10**9)
    assert how_far(half) == "3 nodes: 20.0 GB of 40.0 GB (50%), 1.0 GB/s, 20 s left"
    assert how_far(Snapshot("1 node", 1500, 1500, 1.0)) == "1 node: 1.5 kB of 1.5 kB (100%), 1.5 kB/s"
    assert [duration(seconds) for seconds in (0.4, 75, 3700)] == ["0 s", "1 min 15 s", "1 h 1 min"]
