"""The processes that die: a warm parent that forks one process for each job, and what such a process does.

`python -m tests.crash.child` reads batches of jobs, one JSON list a line, forks a process for every job, lets the
processes of a batch go at the same moment, and answers with one JSON list of `Result`. Forking costs milliseconds where
a new interpreter costs half a second, so that a test can afford to kill at every single step.

Where it runs as root it gives up the right to write to read-only files first: a staging that only works for root is a
fault that such tests must find.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llm_prefetch import ledger, live
from llm_prefetch.spec import parse_spec
from llm_prefetch.stage import stage
from llm_prefetch.store import open_store

JOURNAL_ENTRY_BYTES = 40
_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE = 24, 1
_CHANGES = frozenset(
    f"os.{name}"
    for name in ("rename", "remove", "mkdir", "rmdir", "symlink", "link", "truncate", "chmod", "utime")
) | {"open"}


@dataclass(frozen=True)
class Job:
    """What one process does, and where it dies; counts begin at 1, 0 means never."""

    root: str
    action: str
    """`stage` or `rollback`."""
    spec: dict[str, Any] = field(default_factory=dict)
    trail: str = ""
    """File that gets the name of every step and change, one a line, before it is taken."""
    kill_step: int = 0
    """Die as this step begins, counting all steps."""
    kill_change: int = 0
    """Die before this change to the file system, counting all below the root."""
    kill_path: str = ""
    """Die before the first change to a path that ends so."""
    kill_bytes: int = 0
    """Die when so many bytes have arrived."""
    kill_entry: int = 0
    """Die while writing this entry of a journal, which is left torn."""
    kill_after: float = 0.0
    """Be killed from outside after so many seconds, at whatever instruction that is."""
    blind_locks: bool = False
    """Stands for a network file system on which `flock` lets everybody in at once (Lustre, GPFS, NFS without locks)."""
    delay: float = 0.0


@dataclass(frozen=True)
class Result:
    """How the process ended: `killed`, `done`, or the error's code and text."""

    outcome: str
    detail: str = ""
    data: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    """Serve batches until standard input ends."""
    _drop_privilege()
    import obstore.store  # noqa: F401 (what is imported here need not be imported by each process)

    import llm_prefetch.origins.local
    import llm_prefetch.origins.s3  # noqa: F401

    for line in sys.stdin:
        results = _run_batch([Job(**job) for job in json.loads(line)])
        print(json.dumps([asdict(result) for result in results]), flush=True)


def _drop_privilege() -> None:
    """Start anew without `CAP_DAC_OVERRIDE`, if we have it."""
    held = int(Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16)
    if held & 1 << _CAP_DAC_OVERRIDE:
        ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, 0, 0, 0)
        os.execv(sys.executable, [sys.executable, "-m", "tests.crash.child"])


def _run_batch(jobs: list[Job]) -> list[Result]:
    gate, opener = os.pipe()
    running = []
    for job in jobs:
        mouth, ear = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(opener)
            os.close(mouth)
            os.read(gate, 1)  # ends when the parent closes its end
            _die_as_told(job, ear)
        os.close(ear)
        running.append((pid, mouth))
    os.close(gate)
    os.close(opener)
    results = []
    for pid, mouth in running:
        with os.fdopen(mouth, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            results.append(Result("killed"))
        else:
            results.append(Result(**json.loads(said)))
    return results


def _die_as_told(job: Job, ear: int) -> None:
    try:
        result = _do(job)
    except Exception as error:
        code = getattr(error, "code", "")
        result = Result(code or "crash", str(error) if code else traceback.format_exc())
    os.write(ear, json.dumps(asdict(result)).encode())
    os._exit(0)


def _do(job: Job) -> Result:
    time.sleep(job.delay)
    progress = _Progress(job.kill_bytes)
    if job.blind_locks:
        fcntl.flock = lambda *_: None
    if job.kill_entry:
        os.write = _tearing(job.kill_entry)
    _arm(job)
    if job.kill_after:
        _hire_killer(job.kill_after)
    store = open_store(Path(job.root), create=True)
    if job.action == "rollback":
        return Result("done", data={"bundle": live.rollback(store, job.spec["deployment"]).id})
    report = stage(parse_spec(job.spec, "test"), store, progress=progress)
    data = {"fetched": report.fetched_bytes, "verdict": report.verdict, "bytes": progress.arrived}
    return Result("done", data=data)


def _arm(job: Job) -> None:
    """Watch steps and changes; audit events come before the change they announce."""
    trail = os.open(job.trail, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666) if job.trail else -1
    step, change = _Countdown(job.kill_step), _Countdown(job.kill_change)

    def on_step(name: str) -> None:
        if trail >= 0:
            os.write(trail, f"step {name}\n".encode())
        step.tick()

    def on_event(event: str, args: tuple[Any, ...]) -> None:
        if event not in _CHANGES or not _below(job.root, event, args):
            return
        if trail >= 0:
            os.write(trail, f"change {event} {args[0]}\n".encode())
        change.tick()
        if job.kill_path and str(args[0]).endswith(job.kill_path):
            _die()

    ledger.observers.append(on_step)
    if job.kill_change or job.kill_path or job.trail:
        sys.addaudithook(on_event)


def _hire_killer(seconds: float) -> None:
    """A process that kills this one, unless it ends before."""
    victim = os.getpid()
    if os.fork():
        return
    os.closerange(3, 1024)  # the pipe too, or the victim's result would be waited for until here
    end = time.monotonic() + seconds
    while os.getppid() == victim:
        if (left := end - time.monotonic()) <= 0:
            os.kill(victim, signal.SIGKILL)
            break
        time.sleep(min(left, 0.01))
    os._exit(0)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # in a thread that is not the first, the signal may take a moment


def _below(root: str, event: str, args: tuple[Any, ...]) -> bool:
    """Whether the event changes something in the store; a name relative to a descriptor is taken for one."""
    if event == "open":
        path, _, flags = args
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return bool(writes) and isinstance(path, str | os.PathLike) and _in(root, os.fspath(path))
    path = args[1] if event == "os.symlink" else args[0]
    return isinstance(path, int) or _in(root, os.fspath(path))


def _in(root: str, path: str | bytes) -> bool:
    text = os.fsdecode(path)
    return text.startswith(f"{root}/") or not text.startswith("/")


class _Countdown:
    """Dies at the n-th tick."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()

    def tick(self, by: int = 1) -> None:
        with self._lock:
            before, self._left = self._left, self._left - by
        if before > 0 >= self._left:
            _die()


class _Progress:
    """Counts what arrives, and dies at a byte."""

    def __init__(self, kill_bytes: int) -> None:
        self.arrived = 0
        self._countdown = _Countdown(kill_bytes)
        self._reused = True

    def start(self, label: str, total_bytes: int) -> None:
        self._reused = True

    def advance(self, delta_bytes: int) -> None:
        if self._reused:  # the first call says what was on the disk already
            self._reused = False
            return
        self.arrived += delta_bytes
        if delta_bytes > 0:
            self._countdown.tick(delta_bytes)

    def say(self, line: str) -> None:
        pass


def _tearing(number: int) -> Callable[[int, bytes], int]:
    """An `os.write` that dies in the middle of the n-th entry of a journal."""
    write, left = os.write, [number]
    lock = threading.Lock()

    def torn(fd: int, data: bytes) -> int:
        if len(data) == JOURNAL_ENTRY_BYTES:
            with lock:
                left[0] -= 1
                last = left[0] == 0
                if last:
                    write(fd, data[:17])
                    _die()
        return write(fd, data)

    return torn


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
