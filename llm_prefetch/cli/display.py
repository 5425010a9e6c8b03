"""What the commands print: progress for people, tables, JSON for programs, errors on one line."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

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
from rich.table import Table

from llm_prefetch.errors import PrefetchError
from llm_prefetch.progress import NoProgress, Progress, Snapshot

_LINE_SECONDS = 10.0
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_STEP = 1000


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    print(json.dumps(plain(value), indent=2))


def plain(value: object) -> object:
    """Dataclasses, errors and paths as what JSON knows."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, PrefetchError):
        return {"code": value.code, "message": value.message, "where": value.where, "hint": value.hint}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def print_error(error: PrefetchError, *, as_json: bool) -> None:
    """One line on stderr, and the error as data on stdout where data was asked for."""
    print(f"llm-prefetch: {error.code}: {' '.join(str(error).split())}", file=sys.stderr)
    if as_json:
        print_json({"error": error})


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on stdout; numbers are aligned to the right. Not cut where stdout is no terminal."""
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column in ("files", "size", "fetch", "reuse", "free", "fetched", "reused", "seconds")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 200
    console.print(table)


def say(line: str) -> None:
    """Talk."""
    print(line, file=sys.stderr, flush=True)


def size(count: float) -> str:
    """Bytes as a person reads them."""
    for unit in _UNITS:
        if count < _STEP or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= _STEP
    raise AssertionError("unreachable")


@contextmanager
def progress_bar(*, quiet: bool) -> Iterator[Progress]:
    """A bar on a terminal, a line now and then elsewhere, nothing when `quiet`."""
    if quiet:
        yield NoProgress()
    elif sys.stderr.isatty():
        with _bars() as bars:
            yield _Bar(bars)
    else:
        yield _Lines()


@contextmanager
def node_bars(*, quiet: bool) -> Iterator[_NodeBars]:
    """One bar for each node of a cluster."""
    if not quiet and sys.stderr.isatty():
        with _bars() as bars:
            yield _NodeBars(bars)
    else:
        yield _NodeBars(None)


class _NodeBars:
    def __init__(self, bars: RichProgress | None) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._lock = threading.Lock()

    def update(self, address: str, snapshot: Snapshot) -> None:
        """Show how far a node is."""
        if self._bars is None or not snapshot.total_bytes:
            return
        with self._lock:
            if address not in self._tasks:
                self._tasks[address] = self._bars.add_task(address, total=snapshot.total_bytes)
            self._bars.update(self._tasks[address], completed=snapshot.done_bytes, total=snapshot.total_bytes)


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


class _Lines:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._label, self._total, self._done = "", 0, 0
        self._began = self._said = time.monotonic()

    def start(self, label: str, total_bytes: int) -> None:
        self._label, self._total, self._done = label, total_bytes, 0
        self._began = self._said = time.monotonic()
        say(f"{label}: {size(total_bytes)}")

    def advance(self, delta_bytes: int) -> None:
        with self._lock:
            self._done += delta_bytes
            now = time.monotonic()
            if now - self._said >= _LINE_SECONDS:
                self._said = now
                rate = self._done / (now - self._began)
                say(f"{self._label}: {size(self._done)} of {size(self._total)}, {size(rate)}/s")

    def say(self, line: str) -> None:
        say(line)


def _bars() -> RichProgress:
    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
