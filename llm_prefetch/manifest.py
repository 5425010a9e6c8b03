"""Manifests: the immutable list of an artifact's files, and the version that is its digest.

A manifest is canonical JSON (sorted keys, no spaces, files sorted by path), so that the same bytes always give
the same version, whoever computed it. Each file carries the BLAKE3 digest of each of its chunks, which makes
chunks verifiable on their own: in parallel, on resume and for repair.

A prefix that nobody published has no digests yet. It is described by a `Listing`, which becomes a manifest
once the first staging has hashed the bytes on their way to the disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from blake3 import blake3

from llm_prefetch.errors import ManifestError
from llm_prefetch.paths import check_paths

FORMAT = "llm-prefetch/manifest/1"
FOLDER = ".llm-prefetch"
"""Folder beside the published data that holds the manifest; never part of an artifact."""
PATH = f"{FOLDER}/manifest.json"
CHUNK_BYTES = 16 * 2**20
"""Chunk size of every manifest made by this version: 16 MiB."""
MAX_MANIFEST_BYTES = 256 * 2**20
_DIGEST = re.compile(r"^[0-9a-f]{64}$")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file: its path relative to the artifact, its size in bytes and the digest of each chunk."""

    path: str
    size: int
    chunks: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """The files of one version of an artifact, sorted by path."""

    files: tuple[FileEntry, ...]
    chunk_bytes: int = CHUNK_BYTES
    identity: Mapping[str, Any] = field(default_factory=dict)
    """What a compile cache was built for; empty for everything else."""

    @cached_property
    def version(self) -> str:
        """`b3-` and the BLAKE3 digest of the canonical JSON."""
        return "b3-" + blake3(self.to_json()).hexdigest()

    @property
    def total_bytes(self) -> int:
        """Sum of all sizes."""
        return sum(file.size for file in self.files)

    def to_json(self) -> bytes:
        """The canonical JSON."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "chunk_bytes": self.chunk_bytes,
            "files": [[file.path, file.size, list(file.chunks)] for file in self.files],
        }
        if self.identity:
            body["identity"] = self.identity
        return canonical_json(body)

    def select(self, keep: Sequence[str]) -> Manifest:
        """The manifest of only the files whose path is in `keep`."""
        wanted = set(keep)
        files = tuple(file for file in self.files if file.path in wanted)
        return Manifest(files, self.chunk_bytes, self.identity)


@dataclass(frozen=True, slots=True)
class ListedFile:
    """One object at the origin: `etag` changes when its bytes do."""

    path: str
    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of an artifact whose digests are not known yet, sorted by path."""

    files: tuple[ListedFile, ...]

    @property
    def total_bytes(self) -> int:
        """Sum of all sizes."""
        return sum(file.size for file in self.files)

    @property
    def key(self) -> str:
        """Names this listing: the same objects, unchanged, give the same key."""
        rows = [[file.path, file.size, file.etag] for file in self.files]
        return "ls-" + blake3(canonical_json(rows)).hexdigest()

    def seal(self, digests: Sequence[Sequence[str]]) -> Manifest:
        """The manifest, given the chunk digests of each file in order."""
        files = (
            FileEntry(f.path, f.size, tuple(chunks)) for f, chunks in zip(self.files, digests, strict=True)
        )
        return Manifest(tuple(files))


def chunk_count(size: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Chunks of a file of `size` bytes; an empty file has none."""
    return -(-size // chunk_bytes)


def canonical_json(value: object) -> bytes:
    """JSON with sorted keys, no spaces and no escapes: equal values give equal bytes."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Read and check a manifest that came from outside.

    Raises:
        ManifestError: it is not a manifest, is of an unknown format, or contradicts itself.
        UnsafePathError: it names a path that must not be written.
    """
    try:
        body = json.loads(data)
        if body["format"] != FORMAT:
            raise _bad(f"its format is {body['format']!r}, not {FORMAT!r}", where, "use a newer llm-prefetch")
        chunk_bytes = body["chunk_bytes"]
        if type(chunk_bytes) is not int or chunk_bytes < 1:
            raise _bad("chunk_bytes is not a positive number", where)
        files = tuple(_entry(path, size, chunks, chunk_bytes, where) for path, size, chunks in body["files"])
        identity = body.get("identity", {})
    except ManifestError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _bad(f"it does not parse ({type(error).__name__})", where) from error
    manifest = Manifest(files, chunk_bytes, identity)
    _check(manifest, where)
    return manifest


def _entry(path: Any, size: Any, chunks: Any, chunk_bytes: int, where: str) -> FileEntry:  # noqa: ANN401 (unchecked JSON)
    if not isinstance(path, str) or type(size) is not int or size < 0:
        raise _bad(f"the entry of {path!r} has no proper path and size", where)
    if not isinstance(chunks, list) or len(chunks) != chunk_count(size, chunk_bytes):
        raise _bad(f"{path!r} does not have the chunks of {size} bytes", where)
    if not all(isinstance(chunk, str) and _DIGEST.fullmatch(chunk) for chunk in chunks):
        raise _bad(f"{path!r} has a chunk without a BLAKE3 digest", where)
    return FileEntry(path, size, tuple(chunks))


def _check(manifest: Manifest, where: str) -> None:
    if not manifest.files:
        raise _bad("it lists no files", where)
    if not isinstance(manifest.identity, dict):
        raise _bad("its identity is not a mapping", where)
    check_paths((file.path for file in manifest.files), where)
    if list(manifest.files) != sorted(manifest.files, key=lambda file: file.path):
        raise _bad("its files are not sorted by path", where)
    try:
        manifest.version  # noqa: B018 (computed once and kept; Python's JSON reads NaN and half surrogates, which have none)
    except ValueError as error:
        raise _bad("its identity is not plain JSON", where) from error


def _bad(reason: str, where: str, hint: str = "publish the artifact again") -> ManifestError:
    return ManifestError(f"not a usable manifest: {reason}", where=where, hint=hint)
