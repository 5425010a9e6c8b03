"""What committed versions on this node hold already: whole files and chunks, found by their digests."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

from llm_prefetch.errors import PrefetchError
from llm_prefetch.manifest import FileEntry, parse_manifest
from llm_prefetch.record import Verdict, check_record, records
from llm_prefetch.store import NodeStore


@dataclass(frozen=True, slots=True)
class Held:
    """Where equal bytes lie."""

    files: Mapping[tuple[int, tuple[str, ...]], Path] = field(default_factory=dict)
    """By size and chunk digests: a file that can be linked."""
    chunks: Mapping[str, tuple[Path, int]] = field(default_factory=dict)
    """By digest: a file and the offset in it."""

    def file(self, entry: FileEntry) -> Path | None:
        """A file with the bytes of `entry`."""
        return self.files.get((entry.size, entry.chunks))


def find_held(store: NodeStore, wanted: AbstractSet[str]) -> Held:
    """Look for the chunks `wanted` in every version whose quick check says `HIT`.

    Raises:
        OSError: the store cannot be read.
    """
    files: dict[tuple[int, tuple[str, ...]], Path] = {}
    chunks: dict[str, tuple[Path, int]] = {}
    for record in records(store) if wanted else ():
        try:
            manifest = parse_manifest(
                store.manifest(record.name, record.version).read_bytes(), record.version
            )
        except (FileNotFoundError, PrefetchError):
            continue
        matching = [file for file in manifest.files if not wanted.isdisjoint(file.chunks)]
        if not matching or check_record(store, record.name, record.version).verdict is not Verdict.HIT:
            continue
        base = store.artifact(record.name, record.version)
        for file in matching:
            files[file.size, file.chunks] = base / file.path
            for index, digest in enumerate(file.chunks):
                if digest in wanted:
                    chunks[digest] = (base / file.path, index * manifest.chunk_bytes)
    return Held(files, chunks)
