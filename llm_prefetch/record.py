"""Commit records: the proof that a version lies complete on this node, and the quick check against it.

The record is written last, after every byte was verified and the folder was renamed into place. It holds the
size and modification time of every file and folder, so that a later check costs one `lstat` each and no
read: a file that was deleted, cut, rewritten or added shows in one of them.

Bytes that were not synced to the disk survive a crash of the process but not of the machine. Until they are
synced the record names the boot it was made in; after a reboot such a record counts only once a full check
has passed.
"""

from __future__ import annotations

import enum
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_prefetch.manifest import Manifest, canonical_json
from llm_prefetch.paths import parents
from llm_prefetch.store import NodeStore, boot_id, read_json, write_file

if TYPE_CHECKING:
    from llm_prefetch.spec import Transport  # it loads YAML, which a replica does without


class Verdict(enum.StrEnum):
    """The typed answer of a check."""

    HIT = "HIT"
    """Complete, and what was asked for."""
    MISSING = "MISSING"
    """Not there, or never committed."""
    PARTIAL = "PARTIAL"
    """Committed, but files are gone or have another size."""
    CORRUPT = "CORRUPT"
    """Committed, but the bytes are not those of the manifest, or were touched since."""
    STALE = "STALE"
    """Complete, but not the version asked for; or not proven since the machine was rebooted."""
    UNTRUSTED = "UNTRUSTED"
    """Code that nothing vouches for."""
    INCOMPATIBLE = "INCOMPATIBLE"
    """A compile cache of another engine, device or configuration."""


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """What was committed; sizes in bytes, times in nanoseconds."""

    name: str
    version: str
    uri: str
    listing: str
    """Key of the listing that it was derived from; empty when the origin had a manifest."""
    boot: str
    """Boot in which it was committed; empty once everything was synced to the disk."""
    bytes: int
    files: tuple[tuple[str, int, int], ...]
    """Path, size and modification time of each file."""
    folders: tuple[tuple[str, int], ...]
    """Path (the artifact's own is empty) and modification time of each folder."""
    damage: str = ""
    """What a full check found wrong, when no quick check would see it."""
    transport: Transport = "auto"
    """How the origin was read, so that a repair reads it in the same way."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict and, unless it is `HIT`, the reason."""

    verdict: Verdict
    reason: str = ""


def read_record(store: NodeStore, name: str, version: str) -> CommitRecord | None:
    """The record of a version; `None` when there is none that can be read."""
    body = read_json(store.record(name, version))
    try:
        record = CommitRecord(
            **{
                **body,
                "files": tuple((path, size, mtime) for path, size, mtime in body["files"]),
                "folders": tuple((path, mtime) for path, mtime in body["folders"]),
            }
        )
    except (TypeError, KeyError, ValueError):
        return None
    if not all(isinstance(path, str) for path, *_ in (*record.files, *record.folders)):
        return None
    return record if (record.name, record.version) == (name, version) else None


def write_record(store: NodeStore, record: CommitRecord) -> None:
    """Make the version count, in one step.

    Raises:
        OSError: the disk refused.
    """
    write_file(store.record(record.name, record.version), canonical_json(_fields(record)))


def _fields(record: CommitRecord) -> dict[str, Any]:
    """Shallow, unlike `asdict`, which takes longer for thousands of files than all else of a commit.

    What is at its default is left out: a version of llm-prefetch that does not know the field reads the record then.
    """
    values = ((field, getattr(record, field.name)) for field in fields(record))
    return {field.name: value for field, value in values if value != field.default}


def records(store: NodeStore, name: str = "*") -> Iterator[CommitRecord]:
    """Every readable record of artifacts called `name`, in no order."""
    for path in (store.root / "artifacts").glob(f"{name}/b3-*.json"):
        record = read_record(store, path.parent.name, path.name.removesuffix(".json"))
        if record is not None:
            yield record


def make_record(
    store: NodeStore,
    name: str,
    manifest: Manifest,
    *,
    uri: str,
    listing: str,
    boot: str,
    transport: Transport = "auto",
) -> CommitRecord:
    """The record of what lies in the artifact's folder now.

    Raises:
        OSError: a file of the manifest is not there.
    """
    base = store.artifact(name, manifest.version)
    folders = dict.fromkeys(["", *(parent for file in manifest.files for parent in parents(file.path))])
    return CommitRecord(
        name=name,
        version=manifest.version,
        uri=uri,
        listing=listing,
        boot=boot,
        bytes=manifest.total_bytes,
        files=tuple(
            (file.path, file.size, os.lstat(f"{base}/{file.path}").st_mtime_ns) for file in manifest.files
        ),
        folders=tuple((folder, os.lstat(base / folder).st_mtime_ns) for folder in folders),
        transport=transport,
    )


def check_record(store: NodeStore, name: str, version: str) -> Finding:
    """The quick check: the record, and one `lstat` for each file and folder. Reads no content."""
    return judge_record(store, name, version, read_record(store, name, version))


def judge_record(store: NodeStore, name: str, version: str, record: CommitRecord | None) -> Finding:
    """As `check_record`, for who has read the record."""
    base = store.artifact(name, version)
    if record is None:
        there = "its folder is there, but no commit record" if base.is_dir() else "not staged on this node"
        return Finding(Verdict.MISSING, there)
    finding = _compare(record, base)
    if finding.verdict is Verdict.HIT and record.damage:
        return Finding(Verdict.CORRUPT, record.damage)
    if finding.verdict is Verdict.HIT and record.boot not in ("", boot_id()):
        return Finding(Verdict.STALE, "committed before a reboot and not yet proven since")
    return finding


def _compare(record: CommitRecord, base: Path) -> Finding:
    prefix = f"{base}/"
    touched = ""
    for path, size, mtime in record.files:
        try:
            found = os.lstat(prefix + path)
        except OSError as error:
            return Finding(Verdict.PARTIAL, f"{path!r} cannot be found: {error.strerror}")
        if not stat.S_ISREG(found.st_mode):
            return Finding(Verdict.CORRUPT, f"{path!r} is not a regular file any more")
        if found.st_size != size:
            return Finding(Verdict.PARTIAL, f"{path!r} has {found.st_size} bytes, not {size}")
        if found.st_mtime_ns != mtime:
            touched = touched or f"{path!r} was changed since it was committed"
    for path, mtime in record.folders:
        try:
            found = os.lstat(prefix + path)
        except OSError as error:
            return Finding(Verdict.PARTIAL, f"folder {path!r} cannot be found: {error.strerror}")
        if not stat.S_ISDIR(found.st_mode):
            return Finding(Verdict.CORRUPT, f"{path!r} is not a folder any more")
        if found.st_mtime_ns != mtime:
            touched = (
                touched
                or f"files were added to or removed from folder {path or '.'!r} since it was committed"
            )
    return Finding(Verdict.CORRUPT, touched) if touched else Finding(Verdict.HIT)
