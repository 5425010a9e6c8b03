"""The transfer: fetch the chunks of a plan in parallel, hash them in memory, put each straight to its place.

Each worker owns one connection and one small buffer that it reuses: a piece is read into it, hashed while it
is still in the processor's cache, and written to its offset in the file. So memory does not depend on the
size of files or chunks, and no byte is read back to be verified. A chunk enters the journal only after its
digest was found right; until then its bytes in the partial file mean nothing.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from llm_prefetch import settings
from llm_prefetch.errors import DigestError, OriginUnavailableError, PrefetchError, disk_error
from llm_prefetch.journal import Journal
from llm_prefetch.origins import ObjectInfo, RangeReader
from llm_prefetch.paths import open_beneath, open_own_beneath
from llm_prefetch.plan import Chunk, Plan
from llm_prefetch.progress import Progress

PIECE_BYTES = 256 * 2**10
"""Small enough to stay in a core's own cache from the socket through the hash to the page cache: measured in
docs/explanation/transfer-performance.md."""
_BACKOFF_SECONDS = 0.2
_LONGEST_BACKOFF_SECONDS = 20.0


class Throttle:
    """Lets at most so many bytes per second pass, over all workers."""

    def __init__(self, bytes_per_second: float | None) -> None:
        """`None` means no limit."""
        self._rate = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, count: int, stop: threading.Event) -> None:
        """Wait until `count` bytes may pass, or until `stop`."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_at)
            self._free_at = begin + count / self._rate
        if begin > now:
            stop.wait(begin - now)


def transfer(
    plan: Plan, tree: Path, journal: Journal, progress: Progress, *, throttle: Throttle, stop: threading.Event
) -> Mapping[str, int]:
    """Bring every chunk of `plan` into `tree` and enter it into `journal`, which must be open.

    Returns:
        The inode of each file by path: the commit checks that just these files are what it publishes.

    Raises:
        OriginError: the origin failed for good, or longer than the retries last.
        DigestError: the origin delivers other bytes than the manifest says.
        UnsafePathError: something in `tree` is in the way.
        DiskError: the disk refused.
    """
    job = _Job(plan, journal, progress, throttle, stop)
    try:
        inodes = job.files.prepare(tree)
    except OSError as error:
        raise disk_error(error, str(tree)) from error
    workers = min(settings.CONCURRENCY.get(), len(plan.chunks))
    if not workers:
        return inodes
    with ThreadPoolExecutor(workers, thread_name_prefix="transfer") as pool:
        futures = [pool.submit(job.work) for _ in range(workers)]
        try:
            wait(futures)
        finally:
            job.failed.set()
    if job.error is not None:
        raise job.error
    job.raise_if_stopped()
    return inodes


@dataclass
class _Job:
    plan: Plan
    journal: Journal
    progress: Progress
    throttle: Throttle
    stop: threading.Event
    queue: deque[Chunk] = field(init=False)
    files: _Files = field(init=False)
    failed: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    """The first failure: the others are often only its echo."""
    _error_lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.queue = deque(self.plan.chunks)
        self.files = _Files(self.plan)

    def work(self) -> None:
        """Fetch chunks until none is left or another worker failed; a failure is kept in `error`."""
        try:
            with closing(self.plan.source.origin.reader()) as reader:
                buffer = memoryview(bytearray(PIECE_BYTES))
                while not self.failed.is_set() and not self.stop.is_set():
                    try:
                        chunk = self.queue.popleft()
                    except IndexError:
                        return
                    self._fetch_with_retries(reader, chunk, buffer)
        except BaseException as error:  # noqa: BLE001 (raised again by `transfer`)
            with self._error_lock:
                self.error = self.error or error
            self.failed.set()

    def raise_if_stopped(self) -> None:
        if self.stop.is_set():
            raise OriginUnavailableError(
                "the staging was cancelled", hint="stage again: what is done is kept"
            )

    def _fetch_with_retries(self, reader: RangeReader, chunk: Chunk, buffer: memoryview) -> None:
        attempts = settings.ATTEMPTS.get()
        for attempt in range(1, attempts + 1):
            try:
                self._fetch(reader, chunk, buffer)
            except OSError as error:  # origins raise their own errors: this is the disk
                raise disk_error(error, self.files.items[chunk.file].path) from error
            except PrefetchError as error:
                reader.close()
                # A digest may differ because a bit flipped on the way; an origin that lies does so again.
                worth_it = error.retryable or (isinstance(error, DigestError) and attempt == 1)
                if not worth_it or attempt == attempts or self.failed.is_set() or self.stop.is_set():
                    raise
                longest = min(_LONGEST_BACKOFF_SECONDS, _BACKOFF_SECONDS * 2**attempt)
                self.stop.wait(random.uniform(longest / 2, longest))  # noqa: S311 (jitter, not a secret)
            else:
                return

    def _fetch(self, reader: RangeReader, chunk: Chunk, buffer: memoryview) -> None:
        """Fetch one chunk; bytes that do not count in the end are taken off the progress again."""
        fd = self.files.acquire(chunk.file)
        counted = 0
        try:
            for offset, piece in self._pieces(reader, chunk, buffer):
                _write_all(fd, piece, offset)
                counted += len(piece)
                self.progress.advance(len(piece))
        except BaseException:
            self.progress.advance(-counted)
            raise
        finally:
            self.files.release(chunk.file)

    def _pieces(
        self, reader: RangeReader, chunk: Chunk, buffer: memoryview
    ) -> Iterator[tuple[int, memoryview]]:
        """The pieces of a chunk with their offsets; ends by entering it into the journal if its digest is right."""
        item = self.files.items[chunk.file]
        origin = self.plan.source.origin.uri
        hasher = blake3()
        done = 0
        body = reader.open_range(item, chunk.start, chunk.length)
        while done < chunk.length:
            self.throttle.take(min(PIECE_BYTES, chunk.length - done), self.stop)
            if self.failed.is_set() or self.stop.is_set():
                raise OriginUnavailableError(
                    "the staging was cancelled", hint="stage again: what is done is kept"
                )
            count = body.readinto(buffer[: chunk.length - done])
            if not count:
                raise OriginUnavailableError(f"{item.path!r} ended early", where=origin, hint="stage again")
            hasher.update(buffer[:count])
            yield chunk.start + done, buffer[:count]
            done += count
        digest = hasher.hexdigest()
        if chunk.digest and digest != chunk.digest:
            raise DigestError(
                f"{item.path!r}: bytes {chunk.start} to {chunk.start + chunk.length} do not match the manifest",
                where=origin,
                hint="the origin was changed or damaged after it was published; publish it again",
            )
        self.journal.enter(chunk.file, chunk.index, digest)


class _Files:
    """The partial files: made at full size at first, then held open only while chunks of them are on their way."""

    def __init__(self, plan: Plan) -> None:
        content = plan.source.content
        etags = {file.path: getattr(file, "etag", "") for file in content.files}
        self.items = [ObjectInfo(file.path, file.size, etags[file.path]) for file in content.files]
        self._incomplete = {self.items[chunk.file].path for chunk in plan.chunks}
        self._lock = threading.Lock()
        self._open: dict[int, tuple[int, int]] = {}

    def prepare(self, tree: Path) -> dict[str, int]:
        """Make every file that is to be written to at its size, and empty ones; returns the inodes."""
        self._path = tree
        inodes = {}
        root_fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for item in self.items:
                inodes[item.path] = _prepare_file(root_fd, item, write=item.path in self._incomplete)
        finally:
            os.close(root_fd)
        return inodes

    def acquire(self, file: int) -> int:
        """A descriptor of the file, shared by the workers that write to it."""
        with self._lock:
            fd, users = self._open.get(file, (-1, 0))
            if fd < 0:
                root_fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fd = open_beneath(root_fd, self.items[file].path, os.O_WRONLY)
                finally:
                    os.close(root_fd)
            self._open[file] = (fd, users + 1)
            return fd

    def release(self, file: int) -> None:
        """Close the descriptor when nobody writes to the file any more."""
        with self._lock:
            fd, users = self._open.pop(file)
            if users > 1:
                self._open[file] = (fd, users - 1)
            else:
                os.close(fd)


def _prepare_file(root_fd: int, item: ObjectInfo, *, write: bool) -> int:
    """Make one file at its size, our own if it will be written to; its inode."""
    fd = (
        open_own_beneath(root_fd, item.path)
        if write
        else open_beneath(root_fd, item.path, os.O_RDONLY | os.O_CREAT)
    )
    try:
        if write:
            os.ftruncate(fd, item.size)
        return os.fstat(fd).st_ino
    finally:
        os.close(fd)


def _write_all(fd: int, piece: memoryview, offset: int) -> None:
    while piece:
        written = os.pwrite(fd, piece, offset)
        piece, offset = piece[written:], offset + written
