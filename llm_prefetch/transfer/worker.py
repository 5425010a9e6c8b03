"""One worker: a thread with a connection and a small buffer, that fetches one chunk after the other.

A piece is read into the buffer, hashed while it is still in the processor's cache, and written to its offset in the
file. A chunk enters the journal only after its digest was found right; until then its bytes mean nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from blake3 import blake3

from llm_prefetch.errors import DigestError, OriginUnavailableError, PrefetchError, disk_error
from llm_prefetch.journal import Journal
from llm_prefetch.origins import RangeReader
from llm_prefetch.plan import Chunk, Plan
from llm_prefetch.progress import Progress
from llm_prefetch.stop import Stop
from llm_prefetch.transfer.pacing import Retries, Throttle
from llm_prefetch.transfer.partial_files import PartialFiles

PIECE_BYTES = 256 * 2**10
"""Small enough to stay in a core's own cache from the socket through the hash to the page cache: measured in
docs/explanation/transfer-performance.md."""
_POLL_SECONDS = 0.1
_T = TypeVar("_T")


@dataclass
class Job:
    """What the workers of one transfer share."""

    plan: Plan
    files: PartialFiles
    journal: Journal
    progress: Progress
    throttle: Throttle
    retries: Retries
    stop: Stop
    queue: deque[tuple[Chunk, int]] = field(init=False)
    """Chunks to fetch, each with the number of its next try."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    """Notified when a worker ends."""
    error: BaseException | None = None
    """The first failure: the others are often only its echo."""

    def __post_init__(self) -> None:
        self.queue = deque((chunk, 1) for chunk in self.plan.chunks)

    @property
    def ending(self) -> bool:
        """Whether no more is to be fetched, whatever is left."""
        return self.error is not None or self.stop.is_set()

    def pause(self, seconds: float) -> None:
        """Wait, but not beyond the end.

        Raises:
            OriginUnavailableError: the job ends; only an echo of why.
        """
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self.ending:
            time.sleep(min(left, _POLL_SECONDS))
        self.stop.raise_if_set()
        if self.error is not None:
            raise OriginUnavailableError("another range failed", hint="see what that one says")


class GivenUpError(BaseException):
    """The worker was given up while its reader did not answer: whatever it still gets counts for nothing."""


class Worker(threading.Thread):
    """Fetches chunks until none is left, the job ends, or there are more workers than wanted."""

    def __init__(
        self, job: Job, may_go_on: Callable[[Worker], bool], on_end: Callable[[Worker], None]
    ) -> None:
        """`may_go_on` is asked before each chunk; `on_end` is told at the end, unless the worker was given up."""
        # A daemon: a reader that never answers must not keep the process.
        super().__init__(name="transfer", daemon=True)
        self.job = job
        self.task: tuple[Chunk, int] | None = None
        self.arrived = 0
        """Bytes so far, for the rate."""
        self._may_go_on, self._on_end = may_go_on, on_end
        self._reader: RangeReader | None = None
        self._counted = 0
        self._lock = threading.Lock()
        self._asked_at: float | None = None
        self._given_up = False
        self._stalled = ""

    def run(self) -> None:
        """Work; a failure is kept in the job."""
        job = self.job
        try:
            with closing(self._ask(job.plan.source.origin.reader)) as self._reader:
                buffer = memoryview(bytearray(PIECE_BYTES))
                while not job.ending and self._may_go_on(self):
                    try:
                        self.task = job.queue.popleft()
                    except IndexError:
                        break
                    self._fetch_with_retries(*self.task, buffer)
                    self.task = None
        except GivenUpError:
            return
        except BaseException as error:  # noqa: BLE001 (raised again by `transfer`)
            with job.changed:
                job.error = job.error or error
        self._on_end(self)

    def silent_seconds(self) -> float:
        """How long the reader has not answered; 0 while it is not asked."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    def interrupt(self, reason: str) -> None:
        """Make the reader's call fail, if it can be made to."""
        self._stalled = reason
        abort = getattr(self._reader, "abort", None)
        if abort is not None:
            with suppress(Exception):
                abort()

    def give_up(self) -> bool:
        """Leave this worker to itself if its reader still does not answer; whether that was so."""
        with self._lock:
            if self._asked_at is None:
                return False
            self._given_up = True
        self.job.progress.advance(-self._counted)
        return True

    def _fetch_with_retries(self, chunk: Chunk, attempt: int, buffer: memoryview) -> None:
        job = self.job
        while True:
            job.pause(job.retries.delay())
            self._stalled = ""
            try:
                self._fetch(chunk, buffer)
            except OSError as error:  # origins raise their own errors: this is the disk
                raise disk_error(error, job.files.items[chunk.file].path) from error
            except PrefetchError as error:
                assert self._reader is not None  # noqa: S101 (set before the first chunk)
                self._reader.close()
                job.pause(0)
                job.pause(job.retries.again(self._explained(error, chunk), attempt))
                attempt += 1
                self.task = (chunk, attempt)
            else:
                return

    def _fetch(self, chunk: Chunk, buffer: memoryview) -> None:
        """Fetch one chunk; bytes that do not count in the end are taken off the progress again."""
        files = self.job.files
        fd = files.acquire(chunk.file)
        self._counted = 0
        try:
            for offset, piece in self._pieces(chunk, buffer):
                _write_all(fd, piece, offset)
                self._counted += len(piece)
                self.arrived += len(piece)
                self.job.progress.advance(len(piece))
        except Exception:
            self.job.progress.advance(-self._counted)
            raise
        finally:
            files.release(chunk.file)

    def _pieces(self, chunk: Chunk, buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
        """The pieces of a chunk with their offsets; ends by entering it into the journal if its digest is right."""
        job, reader = self.job, self._reader
        assert reader is not None  # noqa: S101 (set before the first chunk)
        item = job.files.items[chunk.file]
        where = job.plan.source.origin.uri
        hasher = blake3()
        done, body = 0, None
        while done < chunk.length:
            job.pause(job.throttle.delay(min(PIECE_BYTES, chunk.length - done)))
            # Not before the wait: what the origin sends meanwhile has passed, whoever reads it when.
            body = body or self._ask(partial(reader.open_range, item, chunk.start, chunk.length))
            count = self._ask(partial(body.readinto, buffer[: chunk.length - done]))
            if not count:
                raise OriginUnavailableError(f"{item.path!r} ended early", where=where, hint="stage again")
            hasher.update(buffer[:count])
            yield chunk.start + done, buffer[:count]
            done += count
        digest = hasher.hexdigest()
        if chunk.digest and digest != chunk.digest:
            raise DigestError(
                f"{item.path!r}: bytes {chunk.start} to {chunk.start + chunk.length} do not match the manifest",
                where=where,
                hint="the origin was changed or damaged after it was published; publish it again",
            )
        job.journal.enter(chunk.file, chunk.index, digest)

    def _ask(self, call: Callable[[], _T]) -> _T:
        """Call the reader, and be given up at no other time: what comes after that must never be written."""
        with self._lock:
            self._asked_at = time.monotonic()
        try:
            return call()
        finally:
            with self._lock:
                self._asked_at = None
                if self._given_up:
                    raise GivenUpError

    def _explained(self, error: PrefetchError, chunk: Chunk) -> PrefetchError:
        """What an interrupted call fails with says nothing of why it was interrupted."""
        if not self._stalled or not error.retryable:
            return error
        return OriginUnavailableError(
            f"{self.job.files.items[chunk.file].path!r}: {self._stalled}",
            where=self.job.plan.source.origin.uri,
            hint="check the network, then stage again",
        )


def _write_all(fd: int, piece: memoryview, offset: int) -> None:
    while piece:
        written = os.pwrite(fd, piece, offset)
        piece, offset = piece[written:], offset + written
