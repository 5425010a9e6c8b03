"""How many ranges to fetch at once: more as long as that brings more bytes, fewer when the origin is overloaded.

A cloud gives each connection some ten or a hundred megabytes per second, so a fast link needs dozens; a near origin
fills the machine with a few, where more only cost. Nobody can know this beforehand, so it is measured while
transferring: a step up is kept if it pays, and taken back if not.
"""

from __future__ import annotations

import math

START = 4
"""Ranges at first: what fills a machine from a near origin. More threads only hand the interpreter back and forth, which
halved the rate over TLS (docs/explanation/transfer-performance.md)."""
WINDOW_SECONDS = 1.0
"""How long the rate is measured before the next step."""
_STEP = 2
_WORTH_IT = 1.1
_REST_WINDOWS = 10
_BUSY = 0.85
_FAILURES = 0.25


class Concurrency:
    """Decides once per window; belongs to one thread."""

    def __init__(self, most: int) -> None:
        """Never go above `most`."""
        self.limit = min(START, most)
        """Ranges to fetch at once from now on."""
        self._most = most
        self._before: int | None = None
        self._rate = 0.0
        self._rest = 0

    def observe(self, rate: float, *, busy: float, failures: int) -> None:
        """Decide after a window.

        Args:
            rate: Bytes per second that arrived in it.
            busy: The part of this process's processor time that was used, from 0 to 1: more ranges bring nothing
                where the machine is the limit.
            failures: Ranges that had to be tried again.
        """
        if failures > self.limit * _FAILURES:
            self.limit = max(1, self.limit // 2)
            self._before, self._rest = None, _REST_WINDOWS
        elif self._before is not None:
            if rate < self._rate * _WORTH_IT:
                self.limit, self._before, self._rest = self._before, None, _REST_WINDOWS
            else:
                self._step_up(rate, busy)
        elif self._rest:
            self._rest -= 1
        else:
            self._step_up(rate, busy)

    def _step_up(self, rate: float, busy: float) -> None:
        self._rate, self._before = rate, None
        if rate and busy < _BUSY and self.limit < self._most:
            self._before = self.limit
            self.limit = min(self._most, math.ceil(self.limit * _STEP))
