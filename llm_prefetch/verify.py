"""Verification: what lies on the node against what was committed, and against what is wanted.

The quick check reads the commit record and stats every file; it is what a replica waits for. The full check
reads every byte and compares it with the manifest, and the manifest with the version.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from llm_prefetch.commit import seal
from llm_prefetch.digest import hash_range
from llm_prefetch.errors import PrefetchError
from llm_prefetch.manifest import Manifest, parse_manifest
from llm_prefetch.progress import NoProgress, Progress
from llm_prefetch.record import (
    CommitRecord,
    Finding,
    Verdict,
    judge_record,
    make_record,
    read_record,
    write_record,
)
from llm_prefetch.stop import Stop
from llm_prefetch.store import NodeStore, boot_id

_BAD_DISK = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)
"""What a read answers where the disk has lost the bytes: damage, unlike a file that this user may not read."""


@dataclass(frozen=True, slots=True)
class Check:
    """The answer for one version of one artifact."""

    name: str
    version: str
    verdict: Verdict
    reason: str
    files: int
    bytes: int

    @property
    def ready(self) -> bool:
        """Whether an engine may start on it."""
        return self.verdict is Verdict.HIT


def quick_check(store: NodeStore, name: str, version: str) -> Check:
    """One `lstat` for each file and folder; no content is read."""
    record = read_record(store, name, version)  # once: parsing it is most of the work
    return _check(name, version, judge_record(store, name, version, record), record)


def full_check(
    store: NodeStore, name: str, version: str, progress: Progress | None = None, *, stop: Stop | None = None
) -> Check:
    """Read and hash every byte. A version that passes is sealed again, whatever touched its times.

    One that does not pass is remembered as damaged: the quick check says so too, and staging again mends it.

    Raises:
        OSError: the store cannot be read.
        OriginUnavailableError: `stop` was set before the end.
    """
    progress, stop = progress or NoProgress(), stop or Stop()
    record = read_record(store, name, version)
    if record is None:
        return quick_check(store, name, version)
    base = store.artifact(name, version)
    try:
        manifest = parse_manifest(
            store.manifest(name, version).read_bytes(), str(store.manifest(name, version))
        )
    except (OSError, PrefetchError) as error:
        return _damaged(store, record, f"its manifest cannot be read: {error}")
    if manifest.version != version:
        return _damaged(store, record, f"its manifest is that of {manifest.version}")
    try:
        finding = _compare_tree(base, manifest)
        if finding.verdict is Verdict.HIT:
            progress.start(f"verify {name}", manifest.total_bytes)
            before = _as_it_lies(store, record, manifest)
            finding = _compare_bytes(base, manifest, progress, stop)
            if finding.verdict is Verdict.HIT:
                finding = _renew(store, record, manifest, before)
            else:
                return _damaged(store, record, finding.reason)
    except FileNotFoundError as error:  # set aside by a staging, which makes it anew
        finding = Finding(Verdict.PARTIAL, f"{error.filename!r} went away while it was read")
    return _check(name, version, finding, record)


def _damaged(store: NodeStore, record: CommitRecord, reason: str) -> Check:
    """Remember it, so that the quick check says so too and staging mends it; not of one that was made anew meanwhile."""
    with contextlib.suppress(OSError):  # a store that may only be read can be checked too
        if read_record(store, record.name, record.version) == record:
            write_record(store, replace(record, damage=reason))
    return _check(record.name, record.version, Finding(Verdict.CORRUPT, reason), record)


def _check(name: str, version: str, finding: Finding, record: CommitRecord | None) -> Check:
    files, size = (len(record.files), record.bytes) if record else (0, 0)
    return Check(name, version, finding.verdict, finding.reason, files, size)


def _compare_tree(base: Path, manifest: Manifest) -> Finding:
    """Every file of the manifest is there at its size, and nothing else is."""
    wanted = {file.path: file.size for file in manifest.files}
    found: dict[str, int] = {}
    for folder, folders, names in os.walk(base):
        for name in [*names, *(name for name in folders if Path(folder, name).is_symlink())]:
            path = Path(folder, name)
            inside = path.relative_to(base).as_posix()
            if path.is_symlink() or not path.is_file():
                return Finding(Verdict.CORRUPT, f"{inside!r} is not a regular file")
            found[inside] = path.stat().st_size
    for name, size in wanted.items():
        if name not in found:
            return Finding(Verdict.PARTIAL, f"{name!r} is gone")
        if found[name] != size:
            return Finding(Verdict.PARTIAL, f"{name!r} has {found[name]} bytes, not {size}")
    extra = sorted(set(found) - set(wanted))
    return Finding(Verdict.CORRUPT, f"{extra[0]!r} does not belong to it") if extra else Finding(Verdict.HIT)


def _compare_bytes(base: Path, manifest: Manifest, progress: Progress, stop: Stop) -> Finding:
    jobs = [
        (base / file.path, file.path, index, digest)
        for file in manifest.files
        for index, digest in enumerate(file.chunks)
    ]

    def check(job: tuple[Path, str, int, str]) -> str:
        stop.raise_if_set()
        path, name, index, digest = job
        start = index * manifest.chunk_bytes
        try:
            found = hash_range(path, start, manifest.chunk_bytes, progress.advance)
        except OSError as error:
            if error.errno not in _BAD_DISK:
                raise
            found = ""
        return "" if found == digest else f"{name!r} from byte {start}"

    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="verify") as pool:
        bad = [wrong for wrong in pool.map(check, jobs) if wrong]
    if not bad:
        return Finding(Verdict.HIT)
    more = f" (and {len(bad) - 1} more chunks)" if len(bad) > 1 else ""
    return Finding(Verdict.CORRUPT, f"{bad[0]} is not what the manifest says{more}")


def _as_it_lies(store: NodeStore, record: CommitRecord, manifest: Manifest) -> CommitRecord:
    return make_record(
        store,
        record.name,
        manifest,
        uri=record.uri,
        listing=record.listing,
        boot=record.boot,
        transport=record.transport,
    )


def _renew(store: NodeStore, record: CommitRecord, manifest: Manifest, before: CommitRecord) -> Finding:
    """Take the proven state as the committed one, if something touched it or a reboot put it in doubt.

    `before` is from before the first byte was read: whatever changed since then was not proven.
    """
    if _as_it_lies(store, record, manifest) != before:
        return Finding(Verdict.CORRUPT, "its files were changed while they were read")
    if before == record and record.boot in ("", boot_id()):
        return Finding(Verdict.HIT)
    proven = replace(before, boot=boot_id())
    write_record(store, proven)
    seal(store, proven)
    return Finding(Verdict.HIT)


def worst(checks: Sequence[Check]) -> Verdict:
    """The verdict that decides: the first that is not `HIT`."""
    return next((check.verdict for check in checks if not check.ready), Verdict.HIT)
