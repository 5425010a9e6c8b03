"""Sealing: a prefix that already holds the files gets its manifest, by reading every byte once where it lies.

What the origin states about a file (`origins.stated`) is checked on the way. Such a file is read from its front to its
end by one thread, because its digest is one of the whole; of any other the chunks are read in parallel.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from blake3 import blake3

from llm_prefetch import manifest as manifests
from llm_prefetch import settings
from llm_prefetch.errors import OriginChangedError, OriginUnavailableError, PrefetchError
from llm_prefetch.manifest import CHUNK_BYTES, Listing
from llm_prefetch.origins import ObjectInfo, Origin, RangeReader, open_origin
from llm_prefetch.origins.asking import ask
from llm_prefetch.origins.stated import Hasher, Stated, check, find_stated, new_hasher
from llm_prefetch.progress import NoProgress, Progress
from llm_prefetch.publish import PublishReport
from llm_prefetch.redact import redact
from llm_prefetch.resolve import list_prefix
from llm_prefetch.spec import Artifact
from llm_prefetch.stop import Stop

_PIECE_BYTES = 2**18


def seal_prefix(uri: str, *, progress: Progress | None = None, dry_run: bool = False) -> PublishReport:
    """Hash what lies at `uri` and write the manifest beside it; `dry_run` writes nothing.

    Raises:
        OriginChangedError: an object changed while it was read.
        DigestError: the origin states another digest than an object's bytes have.
        OriginError: the prefix is empty, or the origin refused.
    """
    progress = progress or NoProgress()
    stop, artifact = Stop(), Artifact(name="sealed", uri=uri)
    origin = ask(lambda: open_origin(uri), stop)
    listing = list_prefix(artifact, origin, stop)
    progress.start("seal", listing.total_bytes)
    manifest = listing.seal(_digests(listing, origin, progress))
    if list_prefix(artifact, origin, stop) != listing:
        raise OriginChangedError(
            "objects changed while they were read", where=redact(uri), hint="seal again when all is uploaded"
        )
    if not dry_run:
        body = manifest.to_json()
        ask(lambda: origin.write(manifests.PATH, io.BytesIO(body), len(body)), stop)
    return PublishReport(redact(uri), manifest.version, len(manifest.files), manifest.total_bytes)


def _digests(listing: Listing, origin: Origin, progress: Progress) -> list[list[str]]:
    """The chunk digests of every file, in order; each thread reads with a connection of its own."""
    threads, ended = threading.local(), threading.Event()
    stop = Stop(ended)
    readers: list[RangeReader] = []

    def digest(job: _Job) -> list[str]:
        if not hasattr(threads, "reader"):
            threads.reader = ask(origin.reader, stop)
            readers.append(threads.reader)
        found = [
            _with_retries(threads.reader, job, start, progress, stop, origin.uri) for start in job.starts
        ]
        if job.stated is not None and job.whole is not None:
            check(job.stated, job.whole, job.item.path, origin.uri)
        return found

    with ThreadPoolExecutor(settings.CONCURRENCY.get(), thread_name_prefix="seal") as pool:
        try:
            items = [ObjectInfo(file.path, file.size, file.etag) for file in listing.files]
            stated = list(pool.map(lambda item: ask(partial(find_stated, origin, item), stop), items))
            jobs = [_jobs(item, said) for item, said in zip(items, stated, strict=True)]
            found = iter(list(pool.map(digest, (job for each in jobs for job in each))))
        except BaseException:  # Ctrl-C too: the others may wait for an origin that does not answer
            ended.set()
            # By a thread that nobody waits for: closing waits for what a reader does now.
            threading.Thread(target=_end, args=[readers], name="origin", daemon=True).start()
            raise
    for reader in readers:
        reader.close()
    return [[chunk for _ in each for chunk in next(found)] for each in jobs]


def _end(readers: Iterable[RangeReader]) -> None:
    for reader in readers:
        with suppress(Exception):  # its thread may be at work with it
            getattr(reader, "abort", reader.close)()
            reader.close()


@dataclass
class _Job:
    """Chunks of one file for one thread: all of them if the origin states a digest of the whole."""

    item: ObjectInfo
    starts: Sequence[int]
    stated: Stated | None = None
    whole: Hasher | None = None


def _jobs(item: ObjectInfo, stated: Stated | None) -> list[_Job]:
    starts = range(0, item.size, CHUNK_BYTES)
    if stated is None:
        return [_Job(item, [start]) for start in starts]
    return [_Job(item, starts, stated, new_hasher(stated.kind, item.size))]


def _with_retries(
    reader: RangeReader, job: _Job, start: int, progress: Progress, stop: Stop, where: str
) -> str:
    def once() -> str:
        try:
            return _digest(reader, job, start, progress, where)
        except PrefetchError:
            reader.close()
            raise

    return ask(once, stop, most_tries=settings.ATTEMPTS.get())


def _digest(reader: RangeReader, job: _Job, start: int, progress: Progress, where: str) -> str:
    item, length = job.item, min(CHUNK_BYTES, job.item.size - start)
    hasher, whole, done = blake3(), job.whole and job.whole.copy(), 0
    buffer = memoryview(bytearray(min(_PIECE_BYTES, length)))
    body = reader.open_range(item, start, length)
    try:
        while done < length:
            count = body.readinto(buffer[: length - done])
            if not count:
                raise OriginUnavailableError(f"{item.path!r} ended early", where=where, hint="seal again")
            hasher.update(buffer[:count])
            if whole is not None:
                whole.update(buffer[:count])
            progress.advance(count)
            done += count
    except PrefetchError:
        progress.advance(-done)
        raise
    job.whole = (
        whole  # now that the chunk is there: one that is tried again starts from where the one before ended
    )
    return hasher.hexdigest()
