"""The ledger: one JSON line for each staging, switch, check and replica start on this node.

A `Trace` measures the steps of one of these. Its step names are the vocabulary of the crash tests too: an
observer may be told of every step as it begins.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from llm_prefetch.store import NodeStore

_log = logging.getLogger(__name__)

observers: list[Callable[[str], None]] = []
"""Called with the name of every step as it begins."""


@dataclass
class Trace:
    """The steps of one piece of work, in order."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    _since: float = field(default_factory=time.monotonic)

    @contextmanager
    def step(self, name: str, **facts: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 (any JSON value)
        """Measure a step; what is put into the yielded dict is recorded with it."""
        mark(name)
        row: dict[str, Any] = {"step": name, "at": round(time.monotonic() - self._since, 6), **facts}
        self.steps.append(row)
        begin = time.monotonic()
        try:
            yield row
        finally:
            row["seconds"] = round(time.monotonic() - begin, 6)

    @property
    def seconds(self) -> float:
        """Seconds since the trace began."""
        return time.monotonic() - self._since


def mark(name: str) -> None:
    """Tell the observers that a step begins."""
    for observer in observers:
        observer(name)


def append(store: NodeStore, kind: str, **facts: Any) -> None:  # noqa: ANN401 (any JSON value)
    """Add one row; a ledger that cannot be written is a warning, never a failure of the work it records."""
    row = {"at": round(time.time(), 3), "kind": kind, "pid": os.getpid(), **facts}
    line = json.dumps(row, separators=(",", ":"), default=str) + "\n"
    try:
        # One write to a descriptor in append mode: rows of several processes never mix.
        fd = os.open(store.ledger, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(fd).st_size
            torn = size and os.pread(fd, 1, size - 1) != b"\n"  # a row that the disk had no space for
            os.write(fd, (f"\n{line}" if torn else line).encode())
        finally:
            os.close(fd)
    except OSError as error:
        _log.warning("the ledger %s cannot be written: %s", store.ledger, error)


def read(store: NodeStore, *kinds: str, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """The rows of the given kinds (all without any), oldest first; a torn row is left out.

    `last_bytes` looks only at so much of the ledger's end.
    """
    try:
        with store.ledger.open("rb") as file:
            skip = 0 if last_bytes is None else max(0, os.fstat(file.fileno()).st_size - last_bytes)
            file.seek(skip)
            if skip:
                file.readline()  # the rest of a row
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and (not kinds or row.get("kind") in kinds):
            rows.append(row)
    return rows
