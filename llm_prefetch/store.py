"""The node store: where everything lies on one node, and the few primitives that change it.

    <root>/
      LAYOUT                                  version of this layout
      artifacts/<name>/<version>/...          read-only files as the engine sees them
      artifacts/<name>/<version>.json         commit record, written last
      artifacts/<name>/<version>.manifest     the manifest that the files were verified against
      partial/<key>/{tree/,journal}           work in progress
      bundles/<bundle>/<artifact>             links to artifact versions, and <bundle>.json
      live/<deployment>                       link to one bundle
      names/<what Prefect calls it>           link to ../live/<deployment>
      holds/<deployment>/<bundle>.json        what a rollback decided
      caches/<deployment>/                    what engines compile, and staged compile caches
      leases/ locks/ ledger/ quarantine/

The files are the truth. A process may be killed between any two of these primitives.
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
from functools import lru_cache
from pathlib import Path
from typing import Any

from llm_prefetch import settings
from llm_prefetch.errors import DiskError, DiskPermissionError, LayoutError, LockTimeoutError, disk_error
from llm_prefetch.stop import Stop

LAYOUT = "1"
_FOLDERS = ("artifacts", "partial", "bundles", "live", "leases", "locks", "ledger", "quarantine")
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class NodeStore:
    """Paths below one root. Names must be safe; whoever reads them from outside has checked them."""

    root: Path

    def artifact(self, name: str, version: str) -> Path:
        """Folder with the files."""
        return self.root / "artifacts" / name / version

    def record(self, name: str, version: str) -> Path:
        """Commit record."""
        return self.root / "artifacts" / name / f"{version}.json"

    def manifest(self, name: str, version: str) -> Path:
        """Manifest of the committed files."""
        return self.root / "artifacts" / name / f"{version}.manifest"

    def partial(self, key: str) -> Path:
        """Work in progress of a version or a listing."""
        return self.root / "partial" / key

    def bundle(self, bundle: str) -> Path:
        """Folder of links."""
        return self.root / "bundles" / bundle

    def live(self, deployment: str) -> Path:
        """The link that says which bundle a replica starts with."""
        return self.root / "live" / deployment

    def engine_path(self, deployment: str, name: str) -> Path:
        """The path that the engine is given: a function of names only, because vLLM hashes it."""
        return self.live(deployment) / name

    def lock(self, name: str) -> Path:
        """File of an advisory lock."""
        return self.root / "locks" / f"{name}.lock"

    @property
    def ledger(self) -> Path:
        """The per-node record of stagings and starts."""
        return self.root / "ledger" / "ledger.jsonl"


def open_store(root: Path | None = None, *, create: bool = False, missing_ok: bool = False) -> NodeStore:
    """The node store at `root` (or `LLM_PREFETCH_ROOT`).

    Args:
        root: Root of the store.
        create: Make what is missing.
        missing_ok: A store that is not there yet is an empty one; nothing is written.

    Raises:
        LayoutError: there is no store, or one of an unknown layout.
        DiskError: the root cannot be read or made.
    """
    root = _absolute(root)
    layout = root / "LAYOUT"
    try:
        found = layout.read_text("utf-8", errors="replace").strip()
    except FileNotFoundError:
        if missing_ok:
            return NodeStore(root)
        if not create:
            raise LayoutError(
                "no node store here",
                where=str(root),
                hint="stage something first, or set --root / LLM_PREFETCH_ROOT",
            ) from None
        _create(root)
        return NodeStore(root)
    except NotADirectoryError as error:
        raise DiskError(
            "a file is in the way of the store", where=str(root), hint="remove it, or name another root"
        ) from error
    except OSError as error:
        raise disk_error(error, str(root)) from error
    if found != LAYOUT:
        raise LayoutError(
            f"this node store has layout {found!r}, this llm-prefetch knows {LAYOUT!r}",
            where=str(root),
            hint="use the version of llm-prefetch that wrote it, or another root",
        )
    if create:
        _create(root)
    return NodeStore(root)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file in one step: readers see the old content or the new, also after a power loss."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_link(path: Path, target: str) -> None:
    """Point the symbolic link `path` at `target` by one rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}.tmp")
    temporary.symlink_to(target)
    try:
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:  # noqa: ANN401 (whatever the file holds)
    """The JSON in `path`, or `None` when there is none or it does not parse."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Names this boot of the machine; bytes that were not synced are safe only within it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return f"unknown-{uuid.uuid4()}"  # equal to no other: what was not synced is proven again


@contextlib.contextmanager
def locked(
    path: Path, *, shared: bool = False, seconds: float, waiting_for: str, stop: Stop | None = None
) -> Iterator[None]:
    """Hold an advisory lock; it ends with the process at the latest.

    Raises:
        LockTimeoutError: another process held it for `seconds` seconds.
        OriginUnavailableError: `stop` was set while waiting.
    """
    fd = acquire(path, shared=shared, seconds=seconds, waiting_for=waiting_for, stop=stop)
    try:
        yield
    finally:
        release(fd)


def release(fd: int) -> None:
    """Let go of a lock, also of what a forked process has inherited: closing alone would leave it that."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def acquire(path: Path, *, shared: bool, seconds: float, waiting_for: str, stop: Stop | None = None) -> int:
    """Take the lock and return the descriptor that holds it, for `release`."""
    try:
        fd = _open_lock(path, shared=shared)
    except OSError as error:
        raise disk_error(error, str(path)) from error
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if stop is not None and stop.is_set():
                os.close(fd)
                stop.raise_if_set()
            if time.monotonic() >= deadline:
                os.close(fd)
                raise LockTimeoutError(
                    f"{waiting_for} did not end within {seconds:g} s",
                    where=str(path),
                    hint="try again when it is done",
                ) from None
            time.sleep(_POLL_SECONDS)
        except BaseException:
            os.close(fd)
            raise
        else:
            return fd


def _open_lock(path: Path, *, shared: bool) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if shared and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            with contextlib.suppress(OSError):
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # enough to share it
        raise


def _absolute(root: Path | None) -> Path:
    try:
        root = root.expanduser() if root else settings.ROOT.get()
    except (RuntimeError, ValueError) as error:
        raise LayoutError(
            "this user has no home folder to put the node store in",
            where=str(root or settings.ROOT.default),
            hint=f"name the root with --root or {settings.ROOT.name}",
        ) from error
    return root if root.is_absolute() else Path.cwd() / root


def _create(root: Path) -> None:
    try:
        for folder in _FOLDERS:
            (root / folder).mkdir(parents=True, exist_ok=True)
        if not (root / "LAYOUT").exists():
            write_file(root / "LAYOUT", f"{LAYOUT}\n".encode())
    except FileExistsError as error:
        raise DiskPermissionError(
            "a file is in the way of the store", where=str(error.filename), hint="remove it"
        ) from error
    except OSError as error:
        raise disk_error(error, str(root)) from error
