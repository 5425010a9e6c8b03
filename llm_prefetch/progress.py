"""Progress of a staging, reported by bytes: the protocol, and the two that need no dependency."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

_ALMOST = 99.0


class Progress(Protocol):
    """Told by the transfer, from any of its threads."""

    def start(self, label: str, total_bytes: int) -> None:
        """A transfer of `total_bytes` bytes begins; what is already on disk is counted at once by `advance`."""

    def advance(self, delta_bytes: int) -> None:
        """`delta_bytes` more bytes have arrived; negative when a range is thrown away and fetched again."""

    def say(self, line: str) -> None:
        """A step worth one line for a person."""


class NoProgress:
    """Says nothing."""

    def start(self, label: str, total_bytes: int) -> None:
        """Nothing to show."""

    def advance(self, delta_bytes: int) -> None:
        """Nothing to show."""

    def say(self, line: str) -> None:
        """Nothing to show."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How far a staging is; small enough to send often."""

    label: str
    total_bytes: int
    done_bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second since the start."""
        return self.done_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def eta_seconds(self) -> float | None:
        """Seconds left at the rate so far, or `None` before the first byte."""
        return (self.total_bytes - self.done_bytes) / self.rate if self.rate else None


@dataclass
class CountingProgress:
    """Counts over all transfers of one staging, for whoever asks (a node's actor, a throttled artifact)."""

    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _label: str = ""
    _total: int = 0
    _done: int = 0
    _since: float | None = None

    def start(self, label: str, total_bytes: int) -> None:
        """Add one transfer to the total."""
        with self._lock:
            self._label = label
            self._total += total_bytes
            if self._since is None:
                self._since = self.clock()

    def advance(self, delta_bytes: int) -> None:
        """Count bytes."""
        with self._lock:
            self._done += delta_bytes

    def say(self, line: str) -> None:
        """Only bytes are counted."""

    def snapshot(self) -> Snapshot:
        """The count so far."""
        with self._lock:
            seconds = 0.0 if self._since is None else self.clock() - self._since
            return Snapshot(self._label, self._total, self._done, seconds)


class PercentOfNodes:
    """Adds up the snapshots of many nodes and reports the percentage, seldom enough for a server to bear.

    A report is due when at least `seconds` have passed and it has grown by at least `percent` points. 100 is what
    `finish` reports, and nothing else: a node counts its next artifact only once it begins it, and a node that has
    everything counts no byte. May be told from several threads.
    """

    def __init__(
        self,
        report: Callable[[float, Snapshot], None],
        *,
        nodes: int,
        seconds: float = 5.0,
        percent: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`report` is told the percentage over all `nodes`, and the sum over those that have begun."""
        self._report, self._nodes = report, nodes
        self._seconds, self._percent, self._clock = seconds, percent, clock
        self._lock = threading.Lock()
        self._snapshots: dict[str, Snapshot] = {}
        self._last_at, self._last_percent = clock(), 0.0

    def update(self, node: str, snapshot: Snapshot) -> None:
        """A node is now as far as `snapshot` says."""
        if not snapshot.total_bytes:
            return
        with self._lock:
            self._snapshots[node] = snapshot
            total = self._sum()
            # Nodes that have not begun are taken to be as large as those that have.
            expected = total.total_bytes * self._nodes / len(self._snapshots)
            percent = min(100.0 * total.done_bytes / expected, _ALMOST)
            now = self._clock()
            if percent - self._last_percent < self._percent or now - self._last_at < self._seconds:
                return
            self._last_at, self._last_percent = now, percent
        self._report(percent, total)

    def finish(self) -> None:
        """All is done."""
        self._report(100.0, self._sum())

    def _sum(self) -> Snapshot:
        snapshots = self._snapshots.values()
        return Snapshot(
            f"{len(snapshots)} nodes",
            sum(snapshot.total_bytes for snapshot in snapshots),
            sum(snapshot.done_bytes for snapshot in snapshots),
            max((snapshot.seconds for snapshot in snapshots), default=0.0),
        )
