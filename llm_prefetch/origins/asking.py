"""Asking an origin for lists, heads and manifests: again after what may pass, and no longer than anybody waits.

Ranges have their own retries and their own end, in `transfer`. What is asked for here is small, and most clients try
again by themselves, so the tries are few.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from llm_prefetch import settings
from llm_prefetch.errors import PrefetchError
from llm_prefetch.stop import Stop

_MOST_TRIES = 4
_BACKOFF_SECONDS = 0.2
_LONGEST_BACKOFF_SECONDS = 20.0
_LONGEST_RETRY_AFTER_SECONDS = 60.0
_POLL_SECONDS = 0.05
_T = TypeVar("_T")


def ask(call: Callable[[], _T], stop: Stop | None = None, *, most_tries: int = _MOST_TRIES) -> _T:
    """What `call` answers, tried again after errors that may pass; `Retry-After` is waited for.

    Args:
        call: Asks for all it needs anew each time: half a listing is none.
        stop: Ends the waiting, also for a call that does not answer.
        most_tries: So many, or `LLM_PREFETCH_ATTEMPTS`, whichever is less.

    Raises:
        PrefetchError: what `call` raised last, or why to end.
    """
    tries = min(settings.ATTEMPTS.get(), most_tries)
    for attempt in range(1, tries + 1):
        try:
            return wait_for(call, stop)
        except PrefetchError as error:
            if not error.retryable or attempt == tries or (stop is not None and stop.is_set()):
                raise
            asked = min(getattr(error, "retry_after", None) or 0.0, _LONGEST_RETRY_AFTER_SECONDS)
        longest = min(_LONGEST_BACKOFF_SECONDS, _BACKOFF_SECONDS * 2**attempt)
        _pause(max(asked, random.uniform(longest / 2, longest)), stop)  # noqa: S311 (jitter, not a secret)
    raise AssertionError("unreachable")


def wait_for(call: Callable[[], _T], stop: Stop | None) -> _T:
    """What `call` answers, unless it is time to end before: then it is left to itself.

    Raises:
        OriginUnavailableError: it is time to end.
    """
    if stop is None:
        return call()
    stop.raise_if_set()
    answer: Future[_T] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 (raised again by `result`)
            answer.set_exception(error)

    # A daemon: an origin that never answers must not keep the process.
    threading.Thread(target=work, name="origin", daemon=True).start()
    while not wait([answer], _POLL_SECONDS).done:
        stop.raise_if_set()
    return answer.result()


def _pause(seconds: float, stop: Stop | None) -> None:
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        stop.raise_if_set()
