"""The crew of a transfer: as many workers as pay, none of them stuck."""

from __future__ import annotations

import os
import time

from llm_prefetch import settings
from llm_prefetch.errors import OriginUnavailableError, PrefetchError
from llm_prefetch.transfer.concurrency import WINDOW_SECONDS, Concurrency
from llm_prefetch.transfer.worker import PIECE_BYTES, Job, Worker

_TICK_SECONDS = 0.1
_GRACE_SECONDS = 0.5
"""From the interruption of a call until its worker is given up."""


class Crew:
    """Runs one job; its own thread only watches."""

    def __init__(self, job: Job, most: int) -> None:
        """Work with at most `most` workers at once."""
        self._job = job
        self._concurrency = Concurrency(most)
        self._workers: set[Worker] = set()
        self._gone_bytes = 0
        self._interrupted: dict[Worker, float] = {}
        self._window = _Window()

    def work(self) -> None:
        """Fetch everything; raises the first failure.

        Raises:
            PrefetchError: as `transfer`.
        """
        job = self._job
        try:
            while self._hire():
                with job.changed:
                    if self._workers:
                        job.changed.wait(_TICK_SECONDS)
                self._watch()
        except BaseException as error:
            with job.changed:
                job.error = job.error or error
            self._dismiss()
            raise
        if job.error is not None:
            raise job.error
        job.stop.raise_if_set()

    def _hire(self) -> bool:
        """Bring the crew to the number wanted; whether anybody is left or needed."""
        job = self._job
        while True:
            with job.changed:
                wanted = min(self._concurrency.limit, len(self._workers) + len(job.queue))
                if job.ending or len(self._workers) >= wanted:
                    return bool(self._workers)
                worker = Worker(job, self._may_go_on, self._on_end)
                self._workers.add(worker)
            try:
                worker.start()
            except RuntimeError:  # no more threads for this user
                with job.changed:
                    self._leave(worker)
                    self._concurrency.limit = max(1, len(self._workers))
                    if not self._workers:
                        raise

    def _may_go_on(self, worker: Worker) -> bool:
        """Asked by a worker before each chunk: one that is too many ends."""
        with self._job.changed:
            if len(self._workers) <= self._concurrency.limit:
                return True
            self._leave(worker)
            return False

    def _on_end(self, worker: Worker) -> None:
        with self._job.changed:
            self._leave(worker)
            self._job.changed.notify_all()

    def _leave(self, worker: Worker) -> None:
        if worker in self._workers:
            self._workers.discard(worker)
            self._gone_bytes += worker.arrived
        self._interrupted.pop(worker, None)

    def _watch(self) -> None:
        """Interrupt calls that take too long, give up workers that this does not help, and measure."""
        job, now = self._job, time.monotonic()
        with job.changed:
            workers = list(self._workers)
        stall_seconds, ending = settings.STALL_SECONDS.get(), job.ending
        for worker in workers:
            if worker.silent_seconds() <= (0.0 if ending else stall_seconds):
                self._interrupted.pop(worker, None)
            elif worker not in self._interrupted:
                self._interrupted[worker] = now
                worker.interrupt(f"stalled: less than {PIECE_BYTES // 1024} KiB in {stall_seconds:g} s")
            elif now - self._interrupted[worker] > _GRACE_SECONDS and worker.give_up():
                self._replace(worker, stall_seconds)
        if self._window.seconds >= WINDOW_SECONDS:
            arrived = self._gone_bytes + sum(worker.arrived for worker in workers)
            rate, busy, failures = self._window.close(arrived, job.retries.count)
            self._concurrency.observe(rate, busy=busy, failures=failures)

    def _replace(self, worker: Worker, stall_seconds: float) -> None:
        """Put the chunk of a worker that was given up back; the next one that is hired takes it."""
        job, task = self._job, worker.task
        if task is not None and not job.ending:
            chunk, attempt = task
            stalled = OriginUnavailableError(
                f"{job.files.items[chunk.file].path!r}: no answer in {stall_seconds:g} s",
                where=job.plan.source.origin.uri,
                hint="check the network, then stage again",
            )
            try:
                job.retries.again(stalled, attempt)
            except PrefetchError as error:
                with job.changed:
                    job.error = job.error or error
            job.queue.appendleft((chunk, attempt + 1))
        with job.changed:
            self._leave(worker)

    def _dismiss(self) -> None:
        """Wait until nobody writes any more; who waits for a reader is left to itself."""
        while self._workers:
            self._watch()
            with self._job.changed:
                if self._workers:
                    self._job.changed.wait(_TICK_SECONDS)


class _Window:
    """What happened since it was opened."""

    def __init__(self) -> None:
        self._cores = len(os.sched_getaffinity(0))
        self._arrived, self._failures = 0, 0
        self._open()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    def close(self, arrived: int, failures: int) -> tuple[float, float, int]:
        """Bytes per second, the part of the processors used and the retries; opens the next window."""
        seconds = self.seconds
        busy = (time.process_time() - self._processor) / (seconds * self._cores)
        result = (arrived - self._arrived) / seconds, busy, failures - self._failures
        self._arrived, self._failures = arrived, failures
        self._open()
        return result

    def _open(self) -> None:
        self._since, self._processor = time.monotonic(), time.process_time()
