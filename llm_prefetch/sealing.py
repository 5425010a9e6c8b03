"""Sealing: a prefix that already holds the files gets its manifest, by reading every byte once where it lies."""

from __future__ import annotations

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from blake3 import blake3

from llm_prefetch import manifest as manifests
from llm_prefetch import settings
from llm_prefetch.errors import OriginChangedError, OriginUnavailableError, PrefetchError
from llm_prefetch.manifest import CHUNK_BYTES, Listing
from llm_prefetch.origins import ObjectInfo, Origin, RangeReader, open_origin
from llm_prefetch.progress import NoProgress, Progress
from llm_prefetch.publish import PublishReport
from llm_prefetch.redact import redact
from llm_prefetch.resolve import list_prefix
from llm_prefetch.spec import Artifact

_PIECE_BYTES = 2**18


def seal_prefix(uri: str, *, progress: Progress | None = None, dry_run: bool = False) -> PublishReport:
    """Hash what lies at `uri` and write the manifest beside it; `dry_run` writes nothing.

    Raises:
        OriginChangedError: an object changed while it was read.
        OriginError: the prefix is empty, or the origin refused.
    """
    progress = progress or NoProgress()
    origin = open_origin(uri)
    listing = list_prefix(Artifact(name="sealed", uri=uri), origin)
    progress.start("seal", listing.total_bytes)
    manifest = listing.seal(_digests(listing, origin, progress))
    if list_prefix(Artifact(name="sealed", uri=uri), origin) != listing:
        raise OriginChangedError(
            "objects changed while they were read", where=redact(uri), hint="seal again when all is uploaded"
        )
    if not dry_run:
        body = manifest.to_json()
        origin.write(manifests.PATH, io.BytesIO(body), len(body))
    return PublishReport(redact(uri), manifest.version, len(manifest.files), manifest.total_bytes)


def _digests(listing: Listing, origin: Origin, progress: Progress) -> list[list[str]]:
    """The chunk digests of every file, in order; each thread reads with a connection of its own."""
    jobs = [(file, start) for file in listing.files for start in range(0, file.size, CHUNK_BYTES)]
    threads = threading.local()
    readers: list[RangeReader] = []

    def digest(job: tuple[manifests.ListedFile, int]) -> str:
        if not hasattr(threads, "reader"):
            threads.reader = origin.reader()
            readers.append(threads.reader)
        file, start = job
        item = ObjectInfo(file.path, file.size, file.etag)
        return _with_retries(threads.reader, item, start, min(CHUNK_BYTES, file.size - start), progress)

    try:
        with ThreadPoolExecutor(settings.CONCURRENCY.get(), thread_name_prefix="seal") as pool:
            found = iter(list(pool.map(digest, jobs)))
    finally:
        for reader in readers:
            with closing(reader):
                pass
    return [[next(found) for _ in range(0, file.size, CHUNK_BYTES)] for file in listing.files]


def _with_retries(reader: RangeReader, item: ObjectInfo, start: int, length: int, progress: Progress) -> str:
    attempts = settings.ATTEMPTS.get()
    for attempt in range(1, attempts + 1):
        try:
            return _digest(reader, item, start, length, progress)
        except PrefetchError as error:
            reader.close()
            if not error.retryable or attempt == attempts:
                raise
    raise AssertionError("unreachable")


def _digest(reader: RangeReader, item: ObjectInfo, start: int, length: int, progress: Progress) -> str:
    hasher, done = blake3(), 0
    buffer = memoryview(bytearray(min(_PIECE_BYTES, length)))
    body = reader.open_range(item, start, length)
    try:
        while done < length:
            count = body.readinto(buffer[: length - done])
            if not count:
                raise OriginUnavailableError(f"{item.path!r} ended early", hint="seal again")
            hasher.update(buffer[:count])
            progress.advance(count)
            done += count
    except PrefetchError:
        progress.advance(-done)
        raise
    return hasher.hexdigest()
