"""Work ends when somebody says so or when its time is up, and says which."""

from __future__ import annotations

import threading

import pytest

from llm_prefetch.errors import OriginUnavailableError
from llm_prefetch.stop import Stop


def test_nobody_stops_what_nobody_limits():
    stop = Stop()
    assert not stop.is_set()
    assert not stop.wait(0)
    stop.raise_if_set()


def test_a_cancellation_wakes_who_waits():
    cancelled = threading.Event()
    stop = Stop(cancelled, seconds=3600)
    threading.Timer(0.05, cancelled.set).start()
    assert stop.wait(60)
    with pytest.raises(OriginUnavailableError, match="was cancelled"):
        stop.raise_if_set()


def test_a_deadline_wakes_who_waits():
    stop = Stop(seconds=0.05)
    assert not stop.is_set()
    assert stop.wait(60)
    with pytest.raises(OriginUnavailableError, match=r"deadline of 0\.05 s has passed") as caught:
        stop.raise_if_set()
    assert caught.value.retryable
