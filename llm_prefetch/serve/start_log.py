"""What this replica's process, and those that it started, have written about a start: lines with a moment each.

A Ray worker's standard output and error are files, and EngineCore and vLLM's CPU workers write to the same two. With
Ray as vLLM's executor the workers are actors, with files of their own in the same folder. The strings are those of
Ray 2.60 and vLLM 0.29; they are looked for anywhere in a line, as other versions put tags in front.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_prefetch.serve.ladder import told
from llm_prefetch.serve.start_phases import Line, Step, cut_phases

_log = logging.getLogger("ray.serve.llm_prefetch")
_SECONDS = 0.4
_TAIL_BYTES = 4_000_000
_OTHERS = 64
_OTHERS_TAIL_BYTES = 256_000
_HEAD_BYTES = 400
_HITS = 256
_LINE_BYTES = 2000
_START_TIME_FIELD = 19  # of /proc/PID/stat, counted from the one after the name

_Wanted = tuple[tuple[str, bytes], ...]

# What a line tells, and how it is known.
_CREATING = (("creating", b"Creating actor actor_id="),)
_INITIALIZING = (("replica", b"Started initializing replica."),)
_EXECUTOR = (("executor", b"Using executor class: "),)
_ENGINE = (
    ("core", b"Initializing a V1 LLM engine"),
    ("load", b"Starting to load model "),
    ("load", b"Loading model from scratch..."),
    ("weights", b"Loading weights took "),
    ("loaded", b"Model loading took "),
    ("compiling", b"Warming up model for the compilation..."),
    ("compiled", b"saved AOT compiled function to "),
    ("compiled", b"Directly load AOT compilation from path "),
    ("compile", b"torch.compile took "),
    ("profiling", b"Initial profiling/warmup run took "),
    ("graph capture", b"Graph capturing finished in "),
    ("init", b"init engine (profile, create kv cache, warmup model) took "),
)
_STATED = {
    "weights": re.compile(rb"took ([\d.]+) s"),
    "loaded": re.compile(rb" and ([\d.]+) s"),
    "compile": re.compile(rb"took ([\d.]+) s"),
    "profiling": re.compile(rb"took ([\d.]+) s"),
    "graph capture": re.compile(rb"finished in ([\d.]+) s"),
    "init": re.compile(rb" took ([\d.]+) s"),
}
# Ray's has milliseconds (or more) and the year, vLLM's neither.
_RAYS_STAMP = re.compile(rb"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)[,.](\d{3})")
_VLLMS_STAMP = re.compile(rb"(?<!\d)(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?!\d)")


def startup_phases(
    since_wall: float, began_wall: float, steps: Sequence[Step] = (), *, then: str = "engine config"
) -> dict[str, Any]:
    """Where the start that ends now has spent its time; facts for its row in the ledger.

    Bounded in time and memory, and never raises: what cannot be read is left out.

    Args:
        since_wall: What was written before is of an earlier start.
        began_wall: When our callback was called.
        steps: What the callback has measured itself: name, beginning (wall clock) and seconds of each.
        then: What comes after the last of them.

    Returns:
        `began`, the moment from which `at` counts, and `phases`, each with its `phase`, `at`, `seconds`, how far
        `seconds` may be off (`within`) and its `source`: `clock`, `ray log` or `vllm log`.
    """
    ended = time.time()
    try:
        process = process_began()
        lines = list(read_lines(Files.of_this_process(), since_wall, began_wall))
        return cut_phases(process, lines, began_wall, steps, ended, then=then)
    except Exception as error:  # noqa: BLE001 (a start must not fail by what is told of it)
        _log.warning("llm-prefetch: where this start spent its time cannot be told: %s", told(error))
        return {}


def process_began() -> float | None:
    """When this process was started, by the wall clock; `None` where the kernel does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[_START_TIME_FIELD])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.time() - age


@dataclass(frozen=True, slots=True)
class Files:
    """Where a replica writes: its standard output and error, and Serve's log of it."""

    outputs: tuple[Path, ...]
    serve_log: Path | None

    @classmethod
    def of_this_process(cls) -> Files:
        """Found through its open files; a terminal or a pipe is left out."""
        outputs, serve_log = [], None
        for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208 (names are enough)
            with contextlib.suppress(OSError):
                target = Path(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115 (may be no path)
                if fd in {"1", "2"} and target.is_file():
                    outputs.append(target)
                elif target.name.startswith("replica_") and target.parent.name == "serve":
                    serve_log = target
        return cls(tuple(dict.fromkeys(outputs)), serve_log)

    @property
    def workers(self) -> tuple[Path, ...]:
        """Our own, where Ray has named them."""
        return tuple(path for path in self.outputs if path.name.startswith("worker-"))

    @property
    def folder(self) -> Path | None:
        """The logs of the Ray session."""
        if self.workers:
            return self.workers[0].parent
        return self.serve_log.parent.parent if self.serve_log else None


def read_lines(files: Files, since: float, began: float) -> Iterator[Line]:
    """Those that tell of this start; reading stops when it has taken too long."""
    until = time.monotonic() + _SECONDS
    for path, wanted in _sources(files):
        yield from (line for line in _find(path, wanted, since, _TAIL_BYTES) if _counts(line, since, began))
        if time.monotonic() > until:
            return
    for path in _worker_actors(files, began):
        yield from (line for line in _find(path, _ENGINE, since, _OTHERS_TAIL_BYTES) if line.latest >= since)
        if time.monotonic() > until:
            return


def find_text(files: Files, wanted: Sequence[str], since: float) -> Iterator[str]:
    """The lines, as they stand there, that hold one of the `wanted` and were written since then; as `read_lines`."""
    until = time.monotonic() + _SECONDS
    looked_for = tuple(("", text.encode()) for text in wanted)
    sources = [(path, _TAIL_BYTES) for path in files.outputs]
    sources += [(path, _OTHERS_TAIL_BYTES) for path in _worker_actors(files, since)]
    for path, size in sources:
        for _, line, at in _hits(path, looked_for, size):
            read = _read_line("", line, at, since)
            if read is not None and read.latest >= since:
                yield line.decode(errors="replace")
        if time.monotonic() > until:
            return


def _counts(line: Line, since: float, began: float) -> bool:
    """Before our callback is called, the last of each kind is the one; `cut_phases` takes care of that."""
    if line.what in {"starting", "creating", "replica"}:
        return line.wall <= began
    return line.latest >= since


def _sources(files: Files) -> Iterator[tuple[Path, _Wanted]]:
    for path in files.outputs:
        yield path, (*_EXECUTOR, *_ENGINE)
    if files.serve_log is not None:
        yield files.serve_log, (*_INITIALIZING, *_EXECUTOR)
        replica = files.serve_log.stem.rpartition("_")[2]
        starting = (("starting", b"Starting Replica(id='%s'" % replica.encode()),)
        # The controller is on the head: on another node its log is not here, and `schedule` stays unknown.
        for path in _newest(files.serve_log.parent.glob("controller_*.log"), 2):
            yield path, starting
    if files.workers:
        worker, _, pid = files.workers[0].stem.removeprefix("worker-").partition("-")
        yield files.workers[0].parent / f"python-core-worker-{worker}_{pid.rpartition('-')[2]}.log", _CREATING


def _worker_actors(files: Files, began: float) -> list[Path]:
    """What other processes of Ray wrote since then, unless another replica starts an engine here at the same time.

    Then nothing says whose workers they are.
    """
    if files.folder is None:
        return []
    for path in _newest(files.folder.glob("serve/replica_*.log"), _OTHERS, since=began):
        others = _find(path, _EXECUTOR, began, _OTHERS_TAIL_BYTES)
        if path != files.serve_log and any(line.latest >= began for line in others):
            return []
    found = _newest(files.folder.glob("worker-*"), _OTHERS, since=began)
    return [path for path in found if path not in files.workers and not _is_replica(path)]


def _is_replica(path: Path) -> bool:
    return b":actor_name:ServeReplica" in _tail(path, _HEAD_BYTES, from_start=True)


def _newest(paths: Iterator[Path], count: int, *, since: float = 0.0) -> list[Path]:
    dated = []
    for path in paths:
        with contextlib.suppress(OSError):
            dated.append((path.stat().st_mtime, path))
    return [path for changed, path in sorted(dated, reverse=True)[:count] if changed >= since]


def _find(path: Path, wanted: _Wanted, near: float, size: int) -> Iterator[Line]:
    """The lines of `path` with one of the `wanted` strings; those without a time stamp are of no use."""
    for what, found, at in _hits(path, wanted, size):
        line = _read_line(what, found, at, near)
        if line is not None:
            yield line


def _hits(path: Path, wanted: _Wanted, size: int) -> Iterator[tuple[str, bytes, int]]:
    """What each line tells, the line, and where in it the string stands."""
    text = _tail(path, size)
    for what, literal in wanted:
        at = -1
        for _ in range(_HITS):
            at = text.find(literal, at + 1)
            if at < 0:
                break
            begin = text.rfind(b"\n", max(0, at - _LINE_BYTES), at) + 1
            end = text.find(b"\n", at, at + _LINE_BYTES)
            yield what, text[begin : end if end >= 0 else at + _LINE_BYTES], at - begin


def _tail(path: Path, size: int, *, from_start: bool = False) -> bytes:
    try:
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size
            file.seek(0 if from_start else max(0, length - size))
            return file.read(size)
    except OSError:
        return b""


def _read_line(what: str, line: bytes, at: int, near: float) -> Line | None:
    stated = _STATED[what].search(line, at) if what in _STATED else None
    seconds = float(stated[1]) if stated else None
    if found := _RAYS_STAMP.search(line):
        year, month, day, hour, minute, second, milliseconds = map(int, found.groups())
        wall = _wall(year, month, day, hour, minute, second) + milliseconds / 1000
        return Line(what, wall, 0.001, seconds, "ray log")
    if found := _VLLMS_STAMP.search(line):
        # The middle of its second, in the year that brings it closest.
        month, day, hour, minute, second = map(int, found.groups())
        this = time.localtime(near).tm_year
        walls = [_wall(year, month, day, hour, minute, second) + 0.5 for year in (this - 1, this, this + 1)]
        return Line(what, min(walls, key=lambda wall: abs(wall - near)), 1.0, seconds, "vllm log")
    return None


@functools.lru_cache(1024)
def _wall(year: int, month: int, day: int, hour: int, minute: int, second: int) -> float:
    """Both write local time, of this process's time zone."""
    return time.mktime((year, month, day, hour, minute, second, 0, 0, -1))
