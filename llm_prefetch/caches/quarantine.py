"""Compile caches that broke a start: not offered again on this node until someone clears them.

A start that uses a cache leaves a file with its name and holds a lock on it until its engine is up or has failed. A
file whose lock nobody holds is that of a start that died without a word: the kernel took the engine's process with
it, or the other way round. A reboot is nobody's fault.

    <root>/caches/.quarantine/<version>.json    marked; not below quarantine/, where leftovers are deleted
    <root>/caches/.starting/<start>.json        starts with a cache whose engine is not up yet
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from llm_prefetch import ledger
from llm_prefetch.caches.install import discard
from llm_prefetch.errors import disk_error
from llm_prefetch.manifest import canonical_json
from llm_prefetch.store import NodeStore, boot_id, read_json, release, write_file

_DIED = "the start {start} that used it ended without a word: its process was killed, or crashed"


@dataclass(frozen=True, slots=True)
class Mark:
    """A cache that is not offered: which, since when (wall clock) and why."""

    name: str
    version: str
    deployment: str
    reason: str
    start: str = ""
    at: float = 0.0


def mark_broken(store: NodeStore, mark: Mark) -> None:
    """Do not offer the cache again on this node; the ledger has a row of it.

    Raises:
        DiskError: the store cannot be written.
    """
    mark = Mark(mark.name, mark.version, mark.deployment, mark.reason, mark.start, round(time.time(), 3))
    path = _marks(store) / f"{mark.version}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, canonical_json(asdict(mark)))
    except OSError as error:
        raise disk_error(error, str(path)) from error
    ledger.append(store, "quarantine", **{key: value for key, value in asdict(mark).items() if key != "at"})


def find_mark(store: NodeStore, version: str) -> Mark | None:
    """The mark of a cache, if it has one."""
    return _read(_marks(store) / f"{version}.json", version)


def marks(store: NodeStore) -> list[Mark]:
    """Of all caches that are not offered on this node, oldest first."""
    found = (_read(path, path.stem) for path in _marks(store).glob("b3-*.json"))
    return sorted((mark for mark in found if mark is not None), key=lambda mark: mark.at)


def clear_marks(store: NodeStore, name: str) -> list[Mark]:
    """Offer the caches called `name`, or of the version `name` or of the deployment, again. Returns their marks.

    The next start gets a new copy from the store: what broke a start may be what an engine has made of the old one.

    Raises:
        NotReadyError: a replica runs with the copy.
        DiskError: the store cannot be written.
    """
    cleared = [mark for mark in marks(store) if name in (mark.name, mark.deployment, mark.version)]
    for mark in cleared:
        path = _marks(store) / f"{mark.version}.json"
        if mark.deployment:
            discard(store, mark.deployment, mark.version)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise disk_error(error, str(path)) from error
        ledger.append(store, "clear", name=mark.name, version=mark.version, deployment=mark.deployment)
    return cleared


def begin(store: NodeStore, mark: Mark) -> int:
    """A start begins with a cache; the lock that says so, for `end`. `mark` is what it would get.

    Raises:
        OSError: the store cannot be written.
    """
    folder = _starting(store)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{mark.start}.json"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # whoever looks at it just now finds it empty, and lets go
        os.write(fd, json.dumps({**asdict(mark), "boot": boot_id()}).encode())
    except BaseException:
        path.unlink(missing_ok=True)
        os.close(fd)
        raise
    return fd


def end(store: NodeStore, start: str, fd: int) -> None:
    """The engine of a start is up, or it has failed and its cache is marked."""
    with contextlib.suppress(OSError):
        (_starting(store) / f"{start}.json").unlink(missing_ok=True)
    release(fd)


def mark_those_that_died(store: NodeStore) -> list[Mark]:
    """Mark the caches of starts that have ended without a word.

    Raises:
        DiskError: the store cannot be written.
    """
    found = []
    for path, facts in _ended(store):
        mark = _as_mark(facts)
        if mark is not None and facts.get("boot") == boot_id():
            mark_broken(
                store,
                Mark(mark.name, mark.version, mark.deployment, _DIED.format(start=mark.start), mark.start),
            )
            found.append(mark)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    return found


def _ended(store: NodeStore) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The files of starts that nobody holds, and what they say; one process at a time gets each."""
    for path in sorted(_starting(store).glob("*.json")):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                facts = read_json(path)  # gone, where another process was faster
                if isinstance(facts, dict):
                    yield path, facts
            finally:
                os.close(fd)


def _read(path: Path, version: str) -> Mark | None:
    """A mark that cannot be read is one: someone has put it there."""
    if not path.exists():
        return None
    facts = read_json(path)
    found = _as_mark(facts) if isinstance(facts, dict) else None
    return found or Mark("", version, "", "its mark cannot be read")


def _as_mark(facts: dict[str, Any]) -> Mark | None:
    try:
        return Mark(**{field.name: facts[field.name] for field in fields(Mark)})
    except KeyError:
        return None


def _marks(store: NodeStore) -> Path:
    return store.root / "caches" / ".quarantine"


def _starting(store: NodeStore) -> Path:
    return store.root / "caches" / ".starting"
