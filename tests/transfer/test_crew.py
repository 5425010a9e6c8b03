"""A transfer is never stuck: silence is broken off, an end is an end, and an origin is not asked without end."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest

from llm_prefetch.errors import OriginUnavailableError
from llm_prefetch.stop import Stop
from llm_prefetch.transfer import Throttle
from tests.samples import FILES, TOTAL, Counter, FakeOrigin, make_source, raises, tree
from tests.transfer.running import WEIGHTS, run_transfer, unavailable

pytestmark = pytest.mark.usefixtures("no_leaks")


def test_a_throttle_that_would_take_for_ever_lets_go_when_the_staging_stops(store):
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    with raises_stopped("cancelled"):
        run_transfer(store, make_source(), stop=Stop(stop), throttle=Throttle(0.001))


def test_a_transfer_ends_at_its_deadline(store):
    with raises_stopped("the deadline of 0.2 s has passed"):
        run_transfer(store, make_source(), stop=Stop(seconds=0.2), throttle=Throttle(0.001))


class SilentOrigin(FakeOrigin):
    """Some ranges are never answered, until `abort` if that helps or until `end`."""

    def __init__(self, silent, *, abortable):
        super().__init__()
        self.silent, self.abortable, self.end = silent, abortable, threading.Event()
        self.aborts = 0

    def let_go(self):
        """Answer at last, so that workers that were given up end."""
        self.end.set()
        for thread in workers():
            thread.join(60)

    def reader(self):
        reader, gone = super().reader(), threading.Event()
        open_range = reader.open_range

        def answer(item, start, length):
            gone.clear()
            body = open_range(item, start, length)
            if self.silent(self.reads[-1]):
                while not gone.wait(0.01) and not self.end.is_set():
                    pass
                raise unavailable("the socket was shut")
            return body

        def abort():
            self.aborts += 1
            if self.abortable:
                gone.set()

        reader.open_range, reader.abort = answer, abort
        return reader


@pytest.mark.parametrize("abortable", [True, False])
def test_a_range_that_is_not_answered_is_asked_for_again(store, monkeypatch, abortable):
    """By the same worker if its reader can be interrupted, else by another one in its place."""
    monkeypatch.setenv("LLM_PREFETCH_STALL_SECONDS", "0.2")
    origin = SilentOrigin(lambda read: read.path == WEIGHTS and read.attempt == 1, abortable=abortable)
    progress = Counter()
    try:
        path, _ = run_transfer(store, make_source(origin), progress)
        assert tree(path) == FILES
        assert progress.done == TOTAL
        assert origin.aborts
    finally:
        origin.let_go()


@pytest.mark.parametrize("abortable", [True, False])
def test_an_origin_that_never_answers_is_named_with_what_was_waited_for(store, monkeypatch, abortable):
    monkeypatch.setenv("LLM_PREFETCH_STALL_SECONDS", "0.1")
    monkeypatch.setenv("LLM_PREFETCH_ATTEMPTS", "2")
    origin = SilentOrigin(lambda read: True, abortable=abortable)
    try:
        with raises(OriginUnavailableError, 3, "0.1 s", "fake://origin"):
            run_transfer(store, make_source(origin))
    finally:
        origin.let_go()


@pytest.mark.parametrize("abortable", [True, False])
def test_a_cancelled_transfer_does_not_wait_for_answers(store, abortable):
    """The stall time is its default, so only the cancellation can end this."""
    origin, stop = SilentOrigin(lambda read: True, abortable=abortable), threading.Event()
    threading.Timer(0.2, stop.set).start()
    progress = Counter()
    try:
        with raises_stopped("cancelled"):
            run_transfer(store, make_source(origin), progress, Stop(stop))
        assert progress.done == 0
    finally:
        origin.let_go()


def test_what_a_worker_gets_after_it_was_given_up_is_never_written(store, monkeypatch):
    """Its late answer is other bytes than those that were committed meanwhile."""
    monkeypatch.setenv("LLM_PREFETCH_STALL_SECONDS", "0.1")
    late, woken = threading.Event(), threading.Event()
    origin = FakeOrigin()

    def fault(read):
        if read.path == WEIGHTS and read.attempt == 1:
            late.wait(60)
            woken.set()
            return b"x" * read.length
        return None

    origin.fault = fault
    path, _ = run_transfer(store, make_source(origin))
    given_up = workers()
    assert given_up
    late.set()
    for thread in given_up:
        thread.join(60)
    assert woken.is_set()
    assert tree(path) == FILES


def test_an_origin_that_asks_for_patience_gets_it_from_every_range(store, monkeypatch):
    monkeypatch.setenv("LLM_PREFETCH_CONCURRENCY", "1")
    times = []

    def fault(read):
        times.append(time.monotonic())
        if len(times) == 1:
            busy = unavailable("429 Too Many Requests")
            busy.retry_after = 1.0
            return busy
        return None

    path, _ = run_transfer(store, make_source(FakeOrigin(fault=fault)))
    assert tree(path) == FILES
    assert times[1] - times[0] >= 1.0


def test_retries_have_a_budget_over_all_ranges(store, monkeypatch):
    """Every range would succeed within its own tries; all of them together try too often."""
    monkeypatch.setenv("LLM_PREFETCH_ATTEMPTS", "3")
    monkeypatch.setenv("LLM_PREFETCH_CONCURRENCY", "1")
    files = {f"{number:02d}": b"12345678" for number in range(20)}
    origin = FakeOrigin(files, fault=lambda read: unavailable() if read.attempt == 1 else None)
    with raises(OriginUnavailableError, 3, "too often", "8 retries", "the line broke"):
        run_transfer(store, make_source(origin))
    assert sum(read.attempt > 1 for read in origin.reads) == 3 + 20 // 4


@contextmanager
def raises_stopped(reason):
    """The staging was told to end, and did so within a second or two though nothing moved."""
    begin = time.monotonic()
    with pytest.raises(OriginUnavailableError, match=reason) as caught:
        yield
    assert caught.value.retryable
    assert time.monotonic() - begin < 10  # not the 30 s of a stall; a slow machine has room


def workers():
    """The threads of transfers, also those that were given up."""
    return [thread for thread in threading.enumerate() if thread.name == "transfer"]
