"""Telling work to end: because somebody cancelled it, or because its time is up."""

from __future__ import annotations

import threading
import time

from llm_prefetch.errors import OriginUnavailableError

_HINT = "stage again: what is done is kept"


class Stop:
    """Asked by everything that waits or loops; may be asked from any thread."""

    def __init__(self, cancelled: threading.Event | None = None, *, seconds: float | None = None) -> None:
        """`cancelled` is set by whoever started the work; `seconds` from now its time is up, `None` is never."""
        self._cancelled = cancelled or threading.Event()
        self._seconds = seconds
        self._ends = None if seconds is None else time.monotonic() + seconds

    def is_set(self) -> bool:
        """Whether to end."""
        return self._cancelled.is_set() or (self._ends is not None and time.monotonic() >= self._ends)

    def wait(self, seconds: float) -> bool:
        """Wait so long or until it is time to end, whichever is first; whether it is time to end."""
        if self._ends is not None:
            seconds = min(seconds, max(0.0, self._ends - time.monotonic()))
        self._cancelled.wait(seconds)
        return self.is_set()

    def raise_if_set(self) -> None:
        """Say why to end.

        Raises:
            OriginUnavailableError: it is time to end.
        """
        if self._cancelled.is_set():
            raise OriginUnavailableError("the staging was cancelled", hint=_HINT)
        if self.is_set():
            raise OriginUnavailableError(f"the deadline of {self._seconds:g} s has passed", hint=_HINT)
