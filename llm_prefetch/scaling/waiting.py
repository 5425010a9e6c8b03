"""Wait for something with a deadline, and say all the while what is waited for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

_POLL_SECONDS = 1.0
_LINE_SECONDS = 5.0
_log = logging.getLogger(__name__)


class Clock(Protocol):
    """Time as it passes; the module `time` is one."""

    def monotonic(self) -> float:
        """Seconds since some moment."""

    def sleep(self, seconds: float, /) -> None:
        """Let them pass."""


def wait_for(lacking: Callable[[], str], *, seconds: float, clock: Clock = time) -> str:
    """Look until nothing is `lacking`: an empty text, or what is still lacking after `seconds` seconds.

    A line in the log says it every five seconds.
    """
    began = clock.monotonic()
    say = began
    while what := lacking():
        now = clock.monotonic()
        if now - began >= seconds:
            return what
        if now >= say:
            _log.info("waiting for %s; %.0f of at most %g s", what, now - began, seconds)
            say = now + _LINE_SECONDS
        clock.sleep(min(_POLL_SECONDS, began + seconds - now))
    return ""
