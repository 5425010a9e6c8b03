"""Publishing: a local folder becomes an artifact at an origin, with its manifest written last.

Each file is hashed while it is read for the upload, so it is read once. A prefix without its manifest is not
published, and a reader that finds the old manifest beside new files refuses them by their digests.

What the origin says of an upload is checked before the manifest is written: its own digest, where it states one
(`origins.stated`), and its etag, which must still be the one that the upload got.
"""

from __future__ import annotations

import errno
import io
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from blake3 import blake3

from llm_prefetch import manifest as manifests
from llm_prefetch.errors import (
    DiskError,
    DiskPermissionError,
    ManifestError,
    OriginChangedError,
    PrefetchError,
    UnsafePathError,
    UsageError,
)
from llm_prefetch.manifest import CHUNK_BYTES, FileEntry, Manifest
from llm_prefetch.origins import ObjectInfo, Origin, open_origin
from llm_prefetch.origins.asking import ask, wait_for
from llm_prefetch.origins.stated import Hasher, check, find_stated, foresee, new_hasher
from llm_prefetch.paths import check_paths
from llm_prefetch.progress import NoProgress, Progress
from llm_prefetch.redact import redact
from llm_prefetch.stop import Stop

ETAGS_PATH = f"{manifests.FOLDER}/etags.json"
"""Beside the manifest: the etag of each object as it was published, so that publishing again knows it."""
_WORKERS = 4
_LOOKS = 16
"""Questions at once for what is there."""


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What was published: the version to pin, and how much it is."""

    uri: str
    version: str
    files: int
    bytes: int
    kept: int = 0
    """Files that were there already and were not uploaded again."""


def publish(
    source: Path,
    uri: str,
    *,
    progress: Progress | None = None,
    dry_run: bool = False,
    identity: Mapping[str, Any] | None = None,
) -> PublishReport:
    """Upload the folder `source` to `uri` and write the manifest; `dry_run` only hashes.

    Files that the manifest at `uri` knows by the same digests, and that are there at their size, are not uploaded.
    The `identity` of a compile cache stands in its manifest, and so in its version.

    Raises:
        UsageError: the folder is not there, or holds nothing or something that is not a file.
        UnsafePathError: a file's name cannot be published.
        OriginChangedError: an object was replaced while the others went up.
        DigestError: the origin states another digest than what was sent has.
        OriginError: the origin refused.
    """
    progress, ended = progress or NoProgress(), threading.Event()
    stop = Stop(ended)
    origin = ask(lambda: open_origin(uri), stop)
    try:
        paths = _files(source)
        sizes = {path: (source / path).stat().st_size for path in paths}
    except OSError as error:
        raise _unreadable(error, source) from error
    progress.start("publish", sum(sizes.values()))
    there = {} if dry_run else _published(origin, uri, stop)
    kept: set[str] = set()
    made: dict[str, str] = {}

    def upload(path: str) -> FileEntry:
        known, etag = there.get(path, (None, ""))
        # By its etag too: an upload that was cut short may have left other bytes of the same size.
        if known is not None and known.size == sizes[path] and etag and etag == _etag(origin, path, stop):
            entry, _ = _upload(source, path, sizes[path], origin, progress, ended, dry_run=True)
            if entry == known:
                kept.add(path)
                made[path] = etag
                return entry
            progress.advance(-sizes[path])
        entry, made[path] = _upload(source, path, sizes[path], origin, progress, ended, dry_run=dry_run)
        return entry

    with _threads(_WORKERS, ended) as pool:
        entries = list(pool.map(upload, paths))
    manifest = Manifest(tuple(entries), identity=identity or {})
    if not dry_run:
        with _threads(_LOOKS, ended) as pool:
            etags = _check_etags(pool, origin, uri, made, stop)
        for path, body in (
            (ETAGS_PATH, manifests.canonical_json(etags)),
            (manifests.PATH, manifest.to_json()),
        ):
            _write(origin, path, body, stop)
    return PublishReport(uri, manifest.version, len(entries), manifest.total_bytes, len(kept))


@contextmanager
def _threads(count: int, ended: threading.Event) -> Iterator[ThreadPoolExecutor]:
    """Threads whose work ends when that of one fails, or on Ctrl-C: the others may have many GB to go."""
    with ThreadPoolExecutor(count, thread_name_prefix="publish") as pool:
        try:
            yield pool
        except BaseException:
            ended.set()
            raise


def _write(origin: Origin, path: str, body: bytes, stop: Stop) -> None:
    ask(lambda: origin.write(path, io.BytesIO(body), len(body)), stop)


def _published(origin: Origin, uri: str, stop: Stop) -> dict[str, tuple[FileEntry, str]]:
    """What was published before, by path: the entry in the manifest and the etag that the object had then."""
    try:
        if not all(ask(partial(origin.stat, path), stop) for path in (manifests.PATH, ETAGS_PATH)):
            return {}
        body, noted = (
            ask(partial(origin.read, path, manifests.MAX_MANIFEST_BYTES), stop)
            for path in (manifests.PATH, ETAGS_PATH)
        )
        found, etags = manifests.parse_manifest(body, uri), json.loads(noted)
    except (ManifestError, UnsafePathError, ValueError):
        return {}
    if found.chunk_bytes != CHUNK_BYTES or not isinstance(etags, dict):
        return {}
    return {file.path: (file, str(etags.get(file.path, ""))) for file in found.files}


def _check_etags(
    pool: ThreadPoolExecutor, origin: Origin, uri: str, made: Mapping[str, str], stop: Stop
) -> dict[str, str]:
    """The etag of every object now, which must be the one that its upload got, where that is known."""
    found = dict(zip(made, pool.map(lambda path: _etag(origin, path, stop), made), strict=True))
    for path, etag in made.items():
        if etag and etag != found[path]:
            raise OriginChangedError(
                f"{path!r} was replaced after it was uploaded",
                where=redact(uri),
                hint="let one publish to this place at a time, then publish again",
            )
    return found


def _etag(origin: Origin, path: str, stop: Stop) -> str:
    info = ask(lambda: origin.stat(path), stop)
    return info.etag if info is not None else ""


def _files(source: Path) -> list[str]:
    if not source.is_dir():
        raise UsageError(
            "not a folder" if source.exists() else "no such folder",
            where=str(source),
            hint="name the folder that holds the model's files",
        )
    paths = []
    for folder, folders, names in os.walk(source, onerror=_raise):
        if Path(folder) == source and manifests.FOLDER in folders:
            folders.remove(manifests.FOLDER)
        for name in [*names, *(name for name in folders if Path(folder, name).is_symlink())]:
            path = Path(folder, name)
            inside = path.relative_to(source).as_posix()
            if not path.is_file():
                raise UsageError(f"{inside!r} is not a regular file", where=str(source), hint="remove it")
            paths.append(inside)
    if not paths:
        raise UsageError(
            "the folder is empty", where=str(source), hint="name the folder that holds the model's files"
        )
    check_paths(paths, str(source))
    return sorted(paths)


def _raise(error: OSError) -> None:
    raise error


def _unreadable(error: OSError, source: Path) -> PrefetchError:
    kind = DiskPermissionError if isinstance(error, PermissionError) else DiskError
    return kind(
        f"cannot read {str(error.filename)!r}: {error.strerror}",
        where=str(source),
        hint="make it readable for this user, then publish again",
    )


def _upload(
    source: Path,
    path: str,
    size: int,
    origin: Origin,
    progress: Progress,
    ended: threading.Event,
    *,
    dry_run: bool,
) -> tuple[FileEntry, str]:
    """The entry in the manifest, and the etag that the object got."""
    stop = Stop(ended)
    etag, also = "", "" if dry_run else foresee(origin, size)
    try:
        opened = (source / path).open("rb", buffering=0)
    except OSError as error:
        raise _unreadable(error, source) from error
    with opened as file:
        hashing = _Hashing(file, progress, ended, partial(new_hasher, also, size) if also else None)
        if dry_run:
            while hashing.read(2**20):
                pass
        else:
            etag = wait_for(lambda: origin.write(path, hashing, size), stop)  # type: ignore[arg-type]  # read and seek are all that origins use
    if hashing.bytes != size:
        raise OriginChangedError(
            f"{path!r} changed while it was read", where=str(source), hint="publish again"
        )
    if hashing.also is not None:
        stated = ask(lambda: find_stated(origin, ObjectInfo(path, size, etag)), stop)
        if stated is not None and stated.kind == also:
            check(stated, hashing.also, path, redact(origin.uri))
    return FileEntry(path, size, hashing.digests()), etag


class _Hashing(io.RawIOBase):
    """A file that computes the digest of each chunk as it is read from front to back, and `also` one of the whole."""

    def __init__(
        self,
        file: io.FileIO,
        progress: Progress,
        stop: threading.Event,
        make_also: Callable[[], Hasher] | None = None,
    ) -> None:
        self._file, self._progress, self._stop, self._make_also = file, progress, stop, make_also
        self.also: Hasher | None = None
        self.bytes = 0
        self._restart()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Uploaders look for the size, then go back to the front; going back starts the digests anew."""
        position = self._file.seek(offset, whence)
        if position == 0:
            self._restart()
        return position

    def read(self, size: int = -1) -> bytes:
        """Not by `readinto`, as the base class would: that clears the memory before and copies it after."""
        if self._stop.is_set():
            raise OSError(errno.ECANCELED, "cancelled")
        data: bytes = self._file.read(size) or b""
        self._take(memoryview(data))
        return data

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def digests(self) -> tuple[str, ...]:
        """Digest of each chunk read so far."""
        tail = (self._hasher.hexdigest(),) if self._in_chunk else ()
        return (*self._done, *tail)

    def _restart(self) -> None:
        self._progress.advance(-self.bytes)
        self._done: list[str] = []
        self._hasher, self._in_chunk, self.bytes = blake3(), 0, 0
        self.also = self._make_also() if self._make_also is not None else None

    def _take(self, data: memoryview) -> None:
        self.bytes += len(data)
        self._progress.advance(len(data))
        if self.also is not None:
            self.also.update(data)
        while data:
            piece = data[: CHUNK_BYTES - self._in_chunk]
            self._hasher.update(piece)
            self._in_chunk += len(piece)
            data = data[len(piece) :]
            if self._in_chunk == CHUNK_BYTES:
                self._done.append(self._hasher.hexdigest())
                self._hasher, self._in_chunk = blake3(), 0
