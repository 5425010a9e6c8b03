"""The bytes per second that the nodes of one run share, so that a run cannot fill the link of a whole region."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class SharedBandwidth:
    """Divides a cap equally among the nodes at work. For the threads of one run.

    A node hears of its new share when it is next asked how far it is, about once a second; so long the nodes may
    together exceed the cap after one more has begun.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        """`None` means no cap."""
        self._total = bytes_per_second
        self._nodes = 0
        self._lock = threading.Lock()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Count one more node at work."""
        with self._lock:
            self._nodes += 1
        try:
            yield
        finally:
            with self._lock:
                self._nodes -= 1

    @property
    def share(self) -> float | None:
        """Bytes per second for each node at work, or `None` without a cap."""
        return None if self._total is None else self._total / max(1, self._nodes)
