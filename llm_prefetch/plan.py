"""The plan: which chunks a staging would fetch on this node, and what it would reuse. Reads, never writes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from llm_prefetch.held import Held, find_held
from llm_prefetch.journal import Journal, read_journal
from llm_prefetch.manifest import CHUNK_BYTES, FileEntry, Manifest
from llm_prefetch.record import CommitRecord, Verdict, check_record, records
from llm_prefetch.redact import redact
from llm_prefetch.resolve import Source
from llm_prefetch.store import NodeStore


@dataclass(frozen=True, slots=True)
class Chunk:
    """One range to fetch: indices in the manifest, offset and length in bytes, and the digest if it is known."""

    file: int
    index: int
    start: int
    length: int
    digest: str


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A plan in numbers, small enough to send and print; sizes in bytes."""

    name: str
    uri: str
    version: str
    """Empty when the origin has no manifest: the digests are computed while staging."""
    committed: bool
    files: int
    total_bytes: int
    fetch_bytes: int
    reuse_bytes: int
    space_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What staging one artifact on this node means."""

    source: Source
    committed: CommitRecord | None
    """The version is here already: nothing to do."""
    chunks: tuple[Chunk, ...]
    """To fetch."""
    total_bytes: int
    reuse_bytes: int
    """Bytes that are on this disk already: in a partial folder or in a committed version."""
    free_bytes: int
    local: tuple[Chunk, ...] = ()
    """To bring from where `held` says."""
    held: Held = field(default_factory=Held)

    @property
    def fetch_bytes(self) -> int:
        """Bytes to read from the origin."""
        return self.total_bytes - self.reuse_bytes

    @property
    def space_bytes(self) -> int:
        """Bytes of the disk that it takes: what is fetched and what is copied. A file that is linked takes none."""
        copied = 0
        for number, chunks in groupby(self.local, key=lambda chunk: chunk.file):
            entry, here = self.source.content.files[number], list(chunks)
            linked = isinstance(entry, FileEntry) and self.held.file(entry) and len(here) == len(entry.chunks)
            copied += 0 if linked else sum(chunk.length for chunk in here)
        return self.fetch_bytes + copied

    @property
    def summary(self) -> PlanSummary:
        """The plan in numbers."""
        content, artifact = self.source.content, self.source.artifact
        version = content.version if isinstance(content, Manifest) else ""
        return PlanSummary(
            name=artifact.name,
            uri=redact(artifact.uri),
            version=self.committed.version if self.committed else version,
            committed=self.committed is not None,
            files=len(content.files),
            total_bytes=self.total_bytes,
            fetch_bytes=self.fetch_bytes,
            reuse_bytes=self.reuse_bytes,
            space_bytes=self.space_bytes,
            free_bytes=self.free_bytes,
        )


def make_plan(store: NodeStore, source: Source, journal: Journal | None = None) -> Plan:
    """Compare what is wanted with what is on the disk, as `journal` tells or, without one, the journal there.

    Raises:
        OSError: the store cannot be read.
    """
    content = source.content
    free = free_bytes(store.root)
    committed = find_committed(store, source)
    if committed is not None:
        return Plan(source, committed, (), committed.bytes, committed.bytes, free)
    done = (journal or read_journal(store.partial(source.key) / "journal")).done
    missing = [chunk for chunk in all_chunks(source) if not _is_done(chunk, done)]
    held = find_held(store, {chunk.digest for chunk in missing} - {""})
    chunks = tuple(chunk for chunk in missing if chunk.digest not in held.chunks)
    local = tuple(chunk for chunk in missing if chunk.digest in held.chunks)
    reuse_bytes = content.total_bytes - sum(chunk.length for chunk in chunks)
    return Plan(source, None, chunks, content.total_bytes, reuse_bytes, free, local, held)


def free_bytes(root: Path) -> int:
    """Bytes that are free on the disk of `root`, or on the one where it would be made."""
    while True:
        try:
            found = os.statvfs(root)
        except FileNotFoundError:
            root = root.parent
        else:
            return found.f_bavail * found.f_frsize


def find_committed(store: NodeStore, source: Source) -> CommitRecord | None:
    """The record of exactly this content, if the quick check says `HIT`."""
    name = source.artifact.name
    for record in records(store, name):
        if isinstance(source.content, Manifest):
            same = record.version == source.content.version
        else:
            same = record.listing == source.key
        if same and check_record(store, name, record.version).verdict is Verdict.HIT:
            return record
    return None


def all_chunks(source: Source) -> list[Chunk]:
    """Every chunk of the content, file by file."""
    content = source.content
    if isinstance(content, Manifest):
        chunk_bytes, digests = content.chunk_bytes, [file.chunks for file in content.files]
    else:
        chunk_bytes, digests = CHUNK_BYTES, [()] * len(content.files)
    sizes = [file.size for file in content.files]
    return [
        Chunk(number, index, start, min(chunk_bytes, size - start), known[index] if known else "")
        for number, (size, known) in enumerate(zip(sizes, digests, strict=True))
        for index, start in enumerate(range(0, size, chunk_bytes))
    ]


def _is_done(chunk: Chunk, done: Mapping[tuple[int, int], str]) -> bool:
    digest = done.get((chunk.file, chunk.index), "")
    return digest == chunk.digest if chunk.digest else bool(digest)
