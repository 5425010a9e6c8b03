"""Leftovers: what of the node store may be deleted, and what keeps the rest where it is.

Kept is what a replica may start with, runs with or goes back to: versions of live bundles, of leased ones, of the
generation that a rollback would go to, and pinned ones. What a process works with at this moment is kept too, by locks
that the kernel drops when the process ends: `stage-<key>` for work in progress, `use-<key>` for a version that a
staging has found or committed and has not made live yet. All else are leftovers, and go oldest first.

A version goes as it is set aside: its record first, so that it counts no more, then its folder by one rename into
`quarantine/`, from where it is deleted. A kill at any instruction leaves leftovers for the next time.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterator
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from llm_prefetch import ledger
from llm_prefetch.errors import DiskError, LockTimeoutError, SpecError, disk_error
from llm_prefetch.leases import leased, use_lock
from llm_prefetch.live import current_bundle, deployments, generations, read_bundle
from llm_prefetch.record import read_record
from llm_prefetch.store import NodeStore, acquire, release, write_file

_AT_WORK = "a staging in progress"
_PATIENCE_SECONDS = 0.2  # longer than a look at a lock takes
BLOCK_BYTES = 512
"""What `st_blocks` counts in."""
_VERSION = re.compile(r"b3-[0-9a-f]{64}")

Version = tuple[str, str]
"""Name and version of an artifact."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that nothing needs: a version, work in progress that nobody goes on with, or what was set aside."""

    path: Path
    name: str
    version: str
    """Of a committed version or one without its record; else empty."""
    bytes: int
    """What its deletion sets free after that of all older ones: the last name of a linked file counts."""
    at: float
    """When it was last written to, by the wall clock."""

    @property
    def label(self) -> str:
        """As people read it."""
        return f"{self.name} {self.version[:15]}".strip()


def leftovers(store: NodeStore, *, spare: AbstractSet[Version] = frozenset()) -> list[Leftover]:
    """What may be deleted now, but for `spare`; oldest first. Reads, never writes.

    Raises:
        DiskError: the store cannot be read.
    """
    try:
        needed = kept(store).keys() | spare
        found = [
            *(one for one in _versions(store) if (one.name, one.version) not in needed),
            *_abandoned(store),
            *_set_aside(store),
        ]
        return _weighed(sorted(found, key=lambda one: (one.at, one.path)))
    except OSError as error:
        raise disk_error(error, str(store.root)) from error


def kept(store: NodeStore) -> dict[Version, str]:
    """The versions that must stay, and what each is kept for.

    Raises:
        DiskError: the store cannot be read.
    """
    found: dict[Version, str] = {}
    for path in store.root.glob("artifacts/*/b3-*.pin"):
        found[path.parent.name, path.stem] = "pins"
    live = deployments(store) if (store.root / "live").is_dir() else []
    for deployment in live:
        for bundle in generations(store, deployment)[-2:-1]:
            found |= dict.fromkeys(_members(store, bundle), "the generation that a rollback goes to")
    for lease in leased(store):
        members = _members(store, lease.bundle)
        if not members:  # nothing says what its replica runs with
            members = {(one.name, one.version) for one in _versions(store)}
        found |= dict.fromkeys(members, "running replicas")
    for deployment in live:
        found |= dict.fromkeys(_members(store, current_bundle(store, deployment) or ""), "live deployments")
    return found


def delete(store: NodeStore, one: Leftover, *, why: str) -> bool:
    """Delete a leftover, if it still is one; whether it was deleted. The ledger has a row of it."""
    with ExitStack() as held:
        if not all(_alone(held, lock) for lock in _locks(store, one)):
            return False
        gone = not one.path.exists() and not _papers(store, one)
        if gone or (one.name, one.version) in kept(store):
            return False
        ledger.mark("evict")
        target = one.path
        for path in _papers(store, one):
            path.unlink(missing_ok=True)
        if target.parent.name != "quarantine":
            target = store.root / "quarantine" / f"deleted-{one.path.name}-{time.time_ns()}"
            with suppress(FileNotFoundError):
                one.path.rename(target)
    shutil.rmtree(target, ignore_errors=True)
    ledger.append(store, "evict", artifact=one.name, version=one.version, bytes=one.bytes, why=why)
    return True


def pin(store: NodeStore, name: str, version: str, *, on: bool = True) -> str:
    """Keep a version, given by the beginning of its digest, until it is unpinned (`on` false); its full version.

    Raises:
        SpecError: no version, or more than one, begins so.
        DiskError: the disk refused.
    """
    wanted = version if version.startswith("b3-") else f"b3-{version}"
    folder = store.root / "artifacts" / name
    found = sorted(path.stem for path in folder.glob("b3-*.json") if path.stem.startswith(wanted))
    if len(found) != 1:
        raise SpecError(
            f"{len(found) or 'no'} versions of {name!r} on this node begin with {version!r}",
            where=str(store.root),
            hint="see `llm-prefetch ls`",
        )
    path = folder / f"{found[0]}.pin"
    try:
        write_file(path, b"") if on else path.unlink(missing_ok=True)
    except OSError as error:
        raise disk_error(error, str(path)) from error
    return found[0]


def files_below(path: Path) -> Iterator[os.stat_result]:
    """What the file system knows of each file below a folder; what vanishes meanwhile is left out."""
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                yield os.lstat(f"{folder}/{name}")


def _members(store: NodeStore, bundle: str) -> set[Version]:
    """The versions of a bundle, as its file tells and as its links do: someone may have lost the one or the other."""
    found = read_bundle(store, bundle)
    members = {(member.name, member.version) for member in found.members} if found else set[Version]()
    with suppress(OSError):
        for link in store.bundle(bundle).iterdir() if bundle else ():
            with suppress(OSError, ValueError):
                members.add((link.name, link.readlink().name))
    return members


def _versions(store: NodeStore) -> Iterator[Leftover]:
    """Every version, also one without a record or without a folder."""
    found: dict[Version, Path] = {}
    for path in store.root.glob("artifacts/*/b3-*"):
        version = path.name.partition(".")[0]
        if _VERSION.fullmatch(version):
            found[path.parent.name, version] = store.artifact(path.parent.name, version)
    for (name, version), path in found.items():
        one = Leftover(path, name, version, 0, _last_written(store.record(name, version), path))
        if not any(_is_held(lock) for lock in _locks(store, one)):
            yield one


def _abandoned(store: NodeStore) -> Iterator[Leftover]:
    """Work in progress that no staging goes on with now."""
    for path in store.root.glob("partial/*"):
        if not _is_held(_stage(store, path.name)):
            yield Leftover(path, "unfinished work", "", 0, _last_written(path / "journal", path))


def _set_aside(store: NodeStore) -> Iterator[Leftover]:
    """What was damaged, or is half deleted; a staging may just take what is good of it."""
    for path in store.root.glob("quarantine/*"):
        version = _VERSION.search(path.name)
        if version is None or not _is_held(_stage(store, version[0])):
            yield Leftover(path, "quarantine", "", 0, _last_written(path))


def _last_written(*paths: Path) -> float:
    """When the first of these that is there was written to."""
    for path in paths:
        with suppress(FileNotFoundError):
            return path.lstat().st_mtime
    return 0.0


def _weighed(ordered: Collection[Leftover]) -> list[Leftover]:
    """With the bytes that each sets free, when they go in this order."""
    seen: Counter[tuple[int, int]] = Counter()
    weighed = []
    for one in ordered:
        freed = 0
        for found in files_below(one.path):
            seen[found.st_dev, found.st_ino] += 1
            if seen[found.st_dev, found.st_ino] >= found.st_nlink:
                freed += found.st_blocks * BLOCK_BYTES
        weighed.append(replace(one, bytes=freed))
    return weighed


def _papers(store: NodeStore, one: Leftover) -> list[Path]:
    """The record and the manifest of a version, as far as they are there; the record first."""
    papers = (store.record(one.name, one.version), store.manifest(one.name, one.version))
    return [path for path in papers if one.version and path.exists()]


def _stage(store: NodeStore, key: str) -> Path:
    return store.lock(f"stage-{key}")


def _locks(store: NodeStore, one: Leftover) -> list[Path]:
    """The locks of whoever may be at work with it."""
    if not one.version:
        key = one.path.name
        version = _VERSION.search(key)
        return [_stage(store, version[0] if version else key)]
    record = read_record(store, one.name, one.version)
    if record is None:  # a staging of a listing may be about to write it
        listings = sorted(store.root.glob("locks/stage-ls-*.lock"))
    else:
        listings = [use_lock(store, record.listing)] if record.listing else []
    return [_stage(store, one.version), use_lock(store, one.version), *listings]


def _alone(held: ExitStack, lock: Path) -> bool:
    """Whether nobody has `lock`; then it is ours until `held` ends."""
    try:
        fd = acquire(lock, shared=False, seconds=_PATIENCE_SECONDS, waiting_for=_AT_WORK)
    except LockTimeoutError:
        return False
    held.callback(release, fd)
    return True


def _is_held(lock: Path) -> bool:
    """Whether some process has `lock`; makes no file."""
    if not lock.exists():
        return False
    try:
        release(acquire(lock, shared=False, seconds=0.0, waiting_for=_AT_WORK))
    except DiskError:  # held, or not ours to ask
        return True
    return False
