"""Staging one artifact: take up what is there, bring the rest, commit, and check what lies there then."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from llm_prefetch import settings
from llm_prefetch.commit import commit, set_aside
from llm_prefetch.errors import DigestError, NotReadyError
from llm_prefetch.journal import Journal
from llm_prefetch.ledger import Trace
from llm_prefetch.manifest import Listing, Manifest
from llm_prefetch.origins import ObjectInfo
from llm_prefetch.origins.stated import check_tree
from llm_prefetch.plan import find_committed, make_plan
from llm_prefetch.progress import Progress
from llm_prefetch.record import CommitRecord, Verdict, check_record, read_record, records, write_record
from llm_prefetch.redact import redact
from llm_prefetch.resolve import Source
from llm_prefetch.reuse import reuse
from llm_prefetch.room import make_room
from llm_prefetch.salvage import prepare_partial, seal_listing
from llm_prefetch.stop import Stop
from llm_prefetch.store import NodeStore, locked
from llm_prefetch.transfer import Throttle, transfer
from llm_prefetch.verify import Check, full_check, quick_check


@dataclass(frozen=True, slots=True)
class ArtifactReport:
    """What staging one artifact did: bytes by where they came from, and the verdict from the node's files."""

    name: str
    version: str
    verdict: Verdict
    total_bytes: int
    fetched_bytes: int
    reused_bytes: int
    seconds: float
    evicted_bytes: int = 0
    """Set free of leftovers to make room."""


def stage_artifact(
    source: Source,
    store: NodeStore,
    progress: Progress,
    throttle: Throttle,
    stop: Stop,
    trace: Trace,
    *,
    evict: bool = True,
) -> ArtifactReport:
    """Make one artifact a committed version on this node, if it is not one; `trace` gets its steps.

    Where it does not fit, leftovers are deleted, if `evict` allows it.

    Raises:
        PrefetchError: as `stage`.
        OSError: the disk refused.
    """
    begin = time.monotonic()
    name = source.artifact.name
    record, fetched, evicted = find_committed(store, source), 0, 0
    check = None if record is None else _look(store, record, trace)
    if record is None or check is None or not check.ready:  # a scrub may just have found it damaged
        waiting = f"another staging of {name} {source.key[:15]}"
        with (
            trace.step("lock", artifact=name),
            locked(
                store.lock(f"stage-{source.key}"),
                seconds=settings.LOCK_SECONDS.get(),
                waiting_for=waiting,
                stop=stop,
            ),
        ):
            record = find_committed(store, source) or _proven_again(source, store, progress, stop)
            if record is None:
                record, fetched, evicted = _fetch_and_commit(
                    source, store, progress, throttle, stop, trace, evict=evict
                )
        check = _look(store, record, trace)
    _check_pin(source, record.version)
    if not check.ready:
        raise NotReadyError(
            f"{name} is {check.verdict} right after its commit: {check.reason}",
            where=str(store.artifact(name, record.version)),
            hint="something else changes this folder; find it, then stage again",
        )
    reused = record.bytes - fetched
    return ArtifactReport(
        name, record.version, check.verdict, record.bytes, fetched, reused, time.monotonic() - begin, evicted
    )


def _look(store: NodeStore, record: CommitRecord, trace: Trace) -> Check:
    with trace.step("verify", artifact=record.name):
        return quick_check(store, record.name, record.version)


def _check_pin(source: Source, version: str) -> None:
    if source.artifact.version not in (None, version):
        raise DigestError(
            f"the origin holds {version}, the spec pins {source.artifact.version}",
            where=redact(source.artifact.uri),
            hint="pin the version that is there, or put the pinned one back",
        )


def _proven_again(source: Source, store: NodeStore, progress: Progress, stop: Stop) -> CommitRecord | None:
    """A version that is complete but in doubt, because of a reboot or a touched file, once its bytes are proven."""
    for record in records(store, source.artifact.name):
        wanted = (
            record.version == source.content.version
            if isinstance(source.content, Manifest)
            else record.listing == source.key
        )
        if wanted:
            progress.say(
                f"{record.name}: {check_record(store, record.name, record.version).reason}; reading every byte"
            )
            if full_check(store, record.name, record.version, progress, stop=stop).ready:
                return read_record(store, record.name, record.version)
    return None


def _fetch_and_commit(
    source: Source,
    store: NodeStore,
    progress: Progress,
    throttle: Throttle,
    stop: Stop,
    trace: Trace,
    *,
    evict: bool,
) -> tuple[CommitRecord, int, int]:
    """Returns the record, the bytes that were fetched, and those that were set free for them."""
    name, key = source.artifact.name, source.key
    with trace.step("prepare", artifact=name):
        journal = prepare_partial(store, source)
        todo = make_plan(store, source, journal)
        if todo.committed is not None:  # meanwhile, by one that our lock did not keep out
            return todo.committed, 0, 0
        gone = make_room(store, todo, allowed=evict, say=progress.say, stop=stop)
    progress.start(name, todo.total_bytes)
    progress.advance(todo.reuse_bytes)
    tree = store.partial(key) / "tree"
    with trace.step("transfer", artifact=name, bytes=todo.fetch_bytes):
        journal.open()
        try:
            todo = reuse(todo, tree, journal, stop)
            inodes = transfer(todo, tree, journal, progress, throttle=throttle, stop=stop)
        finally:
            journal.close()
    with trace.step("commit", artifact=name):
        record = _commit(source, store, journal, inodes, stop)
    return record, todo.fetch_bytes, sum(one.bytes for one in gone)


def _check_stated(source: Source, content: Listing, store: NodeStore, stop: Stop) -> None:
    """What was staged without a manifest is compared with the digests that the origin's own list states, if it does."""
    items = (ObjectInfo(file.path, file.size, file.etag) for file in content.files)
    partial = store.partial(source.key)
    try:
        check_tree(source.origin, items, partial / "tree", stop)
    except DigestError:
        shutil.rmtree(partial, ignore_errors=True)  # its journal vouches for the wrong bytes
        raise


def _commit(
    source: Source, store: NodeStore, journal: Journal, inodes: Mapping[str, int], stop: Stop
) -> CommitRecord:
    """Commit what was transferred; if the same version is here by another way, that one serves."""
    name, content = source.artifact.name, source.content
    listing = content.key if isinstance(content, Listing) else ""
    manifest = seal_listing(content, journal) if isinstance(content, Listing) else content
    _check_pin(source, manifest.version)
    if isinstance(content, Listing):
        _check_stated(source, content, store, stop)
    if listing and check_record(store, name, manifest.version).verdict is not Verdict.HIT:
        old = set_aside(store, name, manifest.version)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
    try:
        return commit(
            store,
            name,
            source.key,
            manifest,
            inodes,
            uri=redact(source.artifact.uri),
            listing=listing,
            transport=source.artifact.transport,
        )
    except OSError:
        record = read_record(store, name, manifest.version)
        if record is None or check_record(store, name, manifest.version).verdict is not Verdict.HIT:
            raise
    record = replace(record, listing=listing or record.listing)
    write_record(store, record)
    shutil.rmtree(store.partial(source.key), ignore_errors=True)
    return record
