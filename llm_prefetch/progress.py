"""Progress of a staging, reported by bytes: the protocol, who counts, and how it reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Protocol

_ALMOST = 99.0
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_STEP = 1000
_MINUTE = 60


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
    since_bytes: int = 0
    """How many of those done were there when the `seconds` began: they are no speed."""

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return max(0, self.done_bytes - self.since_bytes) / self.seconds if self.seconds > 0 else 0.0

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
        """`report` is told the percentage, and the sum over all `nodes` with the rate since its last report."""
        self._report, self._nodes = report, nodes
        self._seconds, self._percent, self._clock = seconds, percent, clock
        self._lock = threading.Lock()
        self._snapshots: dict[str, Snapshot] = {}
        self._last_at, self._last_percent = clock(), 0.0
        self._began, self._window = _Since(clock()), _Since(clock())

    def update(self, node: str, snapshot: Snapshot) -> None:
        """A node is now as far as `snapshot` says."""
        if not snapshot.total_bytes:
            return
        with self._lock:
            now = self._clock()
            if not self._snapshots:
                self._began, self._window = _Since(now), _Since(now)
            if node not in self._snapshots:  # what it has at once was there before
                self._began.bytes += snapshot.done_bytes
                self._window.bytes += snapshot.done_bytes
            self._snapshots[node] = snapshot
            total = self._sum(now, self._window)
            percent = _percent(total)
            if percent - self._last_percent < self._percent or now - self._last_at < self._seconds:
                return
            self._last_at, self._last_percent = now, percent
            self._window = _Since(now, total.done_bytes)
        self._report(percent, total)

    def finish(self, *, complete: bool = True) -> None:
        """All is done, or as much as will be; the rate is now that of the whole time."""
        with self._lock:
            total = self._sum(self._clock(), self._began)
        self._report(100.0 if complete else _percent(total), total)

    def _sum(self, now: float, since: _Since) -> Snapshot:
        snapshots = self._snapshots.values()
        # Nodes that have not begun are taken to be as large as those that have.
        known = sum(snapshot.total_bytes for snapshot in snapshots)
        expected = known * self._nodes // len(snapshots) if snapshots else 0
        done = sum(snapshot.done_bytes for snapshot in snapshots)
        nodes = "1 node" if self._nodes == 1 else f"{self._nodes} nodes"
        return Snapshot(nodes, expected, done, now - since.at, since.bytes)


@dataclass
class _Since:
    """Where a rate is measured from."""

    at: float
    bytes: int = 0


def _percent(total: Snapshot) -> float:
    return min(100.0 * total.done_bytes / total.total_bytes, _ALMOST) if total.total_bytes else 0.0


class InBackground:
    """Passes reports on from a thread of its own, only the newest of those that wait.

    Who reports never waits, so a server that is away or slow does not hold up a staging.
    """

    def __init__(self, report: Callable[[float, Snapshot], None]) -> None:
        """`report` raises nothing; it sees the context variables of who made this."""
        self._report = report
        self._next: tuple[float, Snapshot] | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._pass_on,), name="progress", daemon=True
        )
        self._thread.start()

    def __call__(self, percent: float, total: Snapshot) -> None:
        """Report this next."""
        with self._changed:
            self._next = (percent, total)
            self._changed.notify()

    def close(self, seconds: float) -> None:
        """Wait so long at most until the last report has been passed on."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(seconds)

    def _pass_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._closed)
                if self._next is None:
                    return
                told, self._next = self._next, None
            self._report(*told)


def how_far(total: Snapshot) -> str:
    """One line: bytes, percentage, rate and the time that is left."""
    done, whole, rate = total.done_bytes, total.total_bytes, total.rate
    if not whole:
        return f"{total.label}: nothing to fetch"
    left = f", {duration((whole - done) / rate)} left" if rate > 0 and whole > done else ""
    return f"{total.label}: {size(done)} of {size(whole)} ({100 * done // whole}%), {size(rate)}/s{left}"


def size(count: float) -> str:
    """Bytes as a person reads them."""
    for unit in _UNITS:
        if count < _STEP or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= _STEP
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """A time to wait, as a person reads it."""
    minutes, rest = divmod(round(seconds), _MINUTE)
    hours, minutes = divmod(minutes, _MINUTE)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
