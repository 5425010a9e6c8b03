"""Progress for people: a bar on a terminal, a line now and then in a log, nothing where data was asked for."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress

from llm_prefetch.cli.display import say
from llm_prefetch.progress import NoProgress, PercentOfNodes, Progress, Snapshot, how_far, size

_LINE_SECONDS = 10.0


class NodesProgress(Protocol):
    """Told how far each node of a cluster is, from any thread."""

    def update(self, node: str, snapshot: Snapshot) -> None:
        """The node called `node` is as far as `snapshot` says."""


@contextmanager
def progress_bar(*, quiet: bool) -> Iterator[Progress]:
    """A bar on a terminal, a line now and then elsewhere, nothing when `quiet`."""
    if quiet:
        yield NoProgress()
    elif sys.stderr.isatty():
        with _bars() as bars:
            yield _Bar(bars)
    else:
        yield Lines()


@contextmanager
def node_bars(nodes: int, *, quiet: bool) -> Iterator[NodesProgress]:
    """One bar for each node of a cluster on a terminal, a line for all of them elsewhere."""
    if quiet:
        yield PercentOfNodes(lambda _percent, _total: None, nodes=nodes)
    elif sys.stderr.isatty():
        with _bars() as bars:
            yield _NodeBars(bars)
    else:
        yield PercentOfNodes(_say_percent, nodes=nodes, seconds=_LINE_SECONDS)


class Lines:
    """One line when a transfer begins, then one each ten seconds: how far, how fast, how long still."""

    def __init__(
        self, tell: Callable[[str], None] = say, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`tell` is given the lines."""
        self._tell, self._clock = tell, clock
        self._lock = threading.Lock()
        self._label, self._total, self._done = "", 0, 0
        self._said_at, self._said_done = clock(), 0

    def start(self, label: str, total_bytes: int) -> None:
        """Say what begins."""
        with self._lock:
            self._label, self._total, self._done = label, total_bytes, 0
            self._said_at, self._said_done = self._clock(), 0
        self._tell(f"{label}: {size(total_bytes)}")

    def advance(self, delta_bytes: int) -> None:
        """Count, and say so if it is time."""
        with self._lock:
            if not self._done:
                # What is here already is counted first, in one go: that is no speed.
                self._said_done = delta_bytes
            self._done += delta_bytes
            now = self._clock()
            seconds = now - self._said_at
            if seconds < _LINE_SECONDS:
                return
            line = how_far(Snapshot(self._label, self._total, self._done, seconds, self._said_done))
            self._said_at, self._said_done = now, self._done
        self._tell(line)

    def say(self, line: str) -> None:
        """Say it."""
        self._tell(line)


class _Bar:
    def __init__(self, bars: RichProgress) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def start(self, label: str, total_bytes: int) -> None:
        self._task = self._bars.add_task(label, total=total_bytes)

    def advance(self, delta_bytes: int) -> None:
        if self._task is not None:
            self._bars.advance(self._task, delta_bytes)

    def say(self, line: str) -> None:
        self._bars.console.print(line, highlight=False, markup=False)


class _NodeBars:
    def __init__(self, bars: RichProgress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._lock = threading.Lock()

    def update(self, node: str, snapshot: Snapshot) -> None:
        if not snapshot.total_bytes:
            return
        with self._lock:
            if node not in self._tasks:
                self._tasks[node] = self._bars.add_task(node, total=snapshot.total_bytes)
            self._bars.update(self._tasks[node], completed=snapshot.done_bytes, total=snapshot.total_bytes)


def _bars() -> RichProgress:
    return RichProgress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def _say_percent(_percent: float, total: Snapshot) -> None:
    say(how_far(total))
