"""Asking again after what may pass, and for no longer than is wanted."""

from __future__ import annotations

import threading
import time

import pytest

from llm_prefetch.errors import OriginAccessError, OriginUnavailableError
from llm_prefetch.origins.asking import ask, wait_for
from llm_prefetch.stop import Stop

DOWN = OriginUnavailableError("down", where="fake://x", hint="wait")


class Asked:
    """Fails so often, then answers."""

    def __init__(self, *failures: Exception) -> None:
        self.failures, self.at = list(failures), list[float]()

    def __call__(self) -> str:
        self.at.append(time.monotonic())
        if self.failures:
            raise self.failures.pop(0)
        return "answer"


@pytest.mark.parametrize("stop", [None, Stop()], ids=["without a stop", "with a stop"])
def test_what_may_pass_is_asked_again(stop):
    call = Asked(DOWN, DOWN)
    assert ask(call, stop) == "answer"
    assert len(call.at) == 3


@pytest.mark.parametrize(("attempts", "tries"), [("1", 1), ("2", 2), ("100", 4)])
def test_the_tries_are_few(monkeypatch, attempts, tries):
    monkeypatch.setenv("LLM_PREFETCH_ATTEMPTS", attempts)
    call = Asked(*[DOWN] * 10)
    with pytest.raises(OriginUnavailableError, match="down"):
        ask(call)
    assert len(call.at) == tries


@pytest.mark.parametrize(
    "error", [OriginAccessError("no", hint="ask"), ValueError("a bug"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("stop", [None, Stop()], ids=["without a stop", "with a stop"])
def test_what_will_not_pass_is_told_at_once(error, stop):
    call = Asked(error, error)
    with pytest.raises(type(error)):
        ask(call, stop)
    assert len(call.at) == 1


def test_retry_after_is_waited_for():
    call = Asked(OriginUnavailableError("busy", hint="wait", retry_after=1.5))
    ask(call)
    assert call.at[1] - call.at[0] >= 1.5


@pytest.mark.parametrize("seconds", [None, 0.2], ids=["cancelled", "deadline"])
def test_what_does_not_answer_is_left_when_it_is_time_to_end(seconds):
    cancelled, never = threading.Event(), threading.Event()

    def call() -> None:
        if seconds is None:
            cancelled.set()
        never.wait(60)

    with pytest.raises(OriginUnavailableError, match=r"cancelled|deadline"):
        ask(call, Stop(cancelled, seconds=seconds))
    never.set()


def test_a_wait_for_the_next_try_ends_too():
    cancelled = threading.Event()
    soon = threading.Timer(0.2, cancelled.set)

    def call() -> None:
        soon.start()
        raise OriginUnavailableError("busy", hint="wait", retry_after=50)

    with pytest.raises(OriginUnavailableError, match="cancelled"):
        ask(call, Stop(cancelled))


def test_nothing_is_asked_when_it_is_time_to_end_already():
    cancelled, call = threading.Event(), Asked()
    cancelled.set()
    with pytest.raises(OriginUnavailableError, match="cancelled"):
        wait_for(call, Stop(cancelled))
    assert call.at == []
