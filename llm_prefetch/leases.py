"""Who is at work on this node: replicas that run on a generation, and stagings in progress.

Both are locks that the kernel drops when the process ends, however it ends, so nothing has to be cleaned up by
the one who died. A lease is a file `leases/<bundle>.<id>.json` that its replica keeps locked: nothing of a
bundle with a lease may be deleted or changed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llm_prefetch import settings
from llm_prefetch.errors import DiskError, LockTimeoutError, disk_error
from llm_prefetch.stop import Stop
from llm_prefetch.store import NodeStore, acquire, read_json, release

_TRIES = 20


@dataclass(frozen=True, slots=True)
class Lease:
    """A running replica, and what it runs on. What its file does not tell is empty."""

    bundle: str
    deployment: str = ""
    replica: str = ""
    pid: int = 0
    at: float = 0.0


def hold(store: NodeStore, bundle: str, *, deployment: str = "", replica: str = "") -> int:
    """Take a lease on `bundle`; it lasts until `release` is called with the result, or the process ends.

    A forked child keeps it too: an engine core that outlives its replica still has the files mapped.

    Raises:
        DiskError: the store cannot be written.
    """
    path = store.root / "leases" / f"{bundle}.{os.getpid()}-{uuid.uuid4().hex[:8]}.json"
    facts = {"deployment": deployment, "replica": replica, "pid": os.getpid(), "at": round(time.time(), 3)}
    for left in range(_TRIES - 1, -1, -1):
        try:
            return _make(path, json.dumps(facts).encode())
        except OSError as error:
            swept = isinstance(error, FileNotFoundError | BlockingIOError)  # the next try gets through
            if not swept or not left:
                raise disk_error(error, str(path.parent)) from error
            time.sleep(0)
    raise AssertionError("not reached")


@contextlib.contextmanager
def in_use(store: NodeStore, key: str) -> Iterator[None]:
    """Keep a version, or all versions of a listing, from being deleted while somebody counts on it.

    Raises:
        LockTimeoutError: its deletion does not end.
    """
    try:
        waiting = "the deletion of a version"
        fd = acquire(
            use_lock(store, key), shared=True, seconds=settings.LOCK_SECONDS.get(), waiting_for=waiting
        )
    except LockTimeoutError:
        raise
    except DiskError:  # a store that this user may only read; who has to write there says so
        fd = -1
    try:
        yield
    finally:
        if fd >= 0:
            release(fd)


def use_lock(store: NodeStore, key: str) -> Path:
    """The lock that `in_use` shares, and that a deletion takes alone."""
    return store.lock(f"use-{key}")


def leased(store: NodeStore) -> list[Lease]:
    """The leases that are held now, by bundle; those of processes that ended are swept.

    Where it cannot be told whether a lease is held, it is.

    Raises:
        DiskError: the store cannot be read.
    """
    folder = store.root / "leases"
    try:
        files = sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise disk_error(error, str(folder)) from error
    return [_read(path) for path in files if _is_held(path)]


def running(store: NodeStore, deployment: str) -> list[Lease]:
    """The replicas of `deployment` that run on this node.

    Raises:
        DiskError: the store cannot be read.
    """
    return [lease for lease in leased(store) if lease.deployment == deployment]


@contextlib.contextmanager
def staging(store: NodeStore, deployment: str) -> Iterator[None]:
    """Let replicas know that a staging of `deployment` is in progress on this node; several may be at once.

    A sign that cannot be given is none: waiting for a staging only saves work.
    """
    try:
        fd = acquire(_sign(store, deployment), shared=True, seconds=1.0, waiting_for="a look at the stagings")
    except DiskError:
        fd = -1
    try:
        yield
    finally:
        if fd >= 0:
            release(fd)


def staging_in_progress(store: NodeStore, deployment: str) -> bool:
    """Whether some process on this node stages `deployment` now."""
    path = _sign(store, deployment)
    if not path.exists():
        return False
    try:
        release(acquire(path, shared=False, seconds=0.0, waiting_for="a staging"))
    except LockTimeoutError:
        return True
    except DiskError:  # a store that this user may only read: a lock can be had by reading too
        return _is_held(path, sweep=False)
    return False


def wait_for_stagings(store: NodeStore, deployment: str, *, seconds: float, stop: Stop | None = None) -> None:
    """Wait until nobody on this node stages `deployment`, for at most `seconds` seconds.

    Raises:
        LockTimeoutError: somebody still does.
        DiskError: the store cannot be written.
        OriginUnavailableError: `stop` was set.
    """
    waiting = f"a staging of {deployment}"
    release(acquire(_sign(store, deployment), shared=False, seconds=seconds, waiting_for=waiting, stop=stop))


def _read(path: Path) -> Lease:
    facts = read_json(path)
    facts = facts if isinstance(facts, dict) else {}
    known = {key: facts[key] for key in ("deployment", "replica", "pid", "at") if key in facts}
    return Lease(path.name.lstrip(".").partition(".")[0], **known)


def _sign(store: NodeStore, deployment: str) -> Path:
    return store.lock(f"staging-{deployment}")


def _make(path: Path, body: bytes) -> int:
    """Lock and write the file before it gets its name, so that no sweep takes it for one of a dead process."""
    temporary = path.with_name(f".{path.name}.{time.monotonic_ns()}.tmp")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.write(fd, body) != len(body):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        os.close(fd)
        raise
    return fd


def _is_held(path: Path, *, sweep: bool = True) -> bool:
    """Whether a process holds the lock of `path`; the file of one that ended is removed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        # Shared where that is enough, so that two that look at once do not take each other for the holder.
        fcntl.flock(fd, (fcntl.LOCK_SH if sweep else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        if sweep:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
