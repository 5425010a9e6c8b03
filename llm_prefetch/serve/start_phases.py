"""From moments to phases: one after the other, without gaps, from when the replica was asked for until it is ready.

A phase that no line tells apart from its neighbour is joined with it (`weights + warm-up`); one that nothing tells of
is left out. How far the seconds of a phase may be off is said with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

Step = tuple[str, float, float]
"""Something that the callback has measured: its name, its beginning by the wall clock, its seconds."""

# A worker process that has waited for longer was there before, for whatever would come.
_FRESH_SECONDS = 60.0
# What begins with a line, in the order of a start; the last one ends with it.
_CHAIN = (
    ("executor", "engine process"),
    ("core", "engine workers"),
    ("load", "weights"),
    ("loaded", "warm-up"),
    ("init", "ready"),
)
_SAME_SECONDS = 2.0
_SHORTEST = 1e-6


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a log: the moment that it was written, known to `resolution`, and the duration that it states.

    That duration may be off by `off`.
    """

    what: str
    wall: float
    resolution: float
    seconds: float | None
    source: str
    off: float = 0.0

    @property
    def latest(self) -> float:
        """The last moment at which it may have been written."""
        return self.wall + self.resolution / 2


@dataclass(frozen=True, slots=True)
class _Piece:
    """A phase from `begin` to `end`; `off` is how far its length may be off."""

    name: str
    begin: float
    end: float
    off: float
    source: str


@dataclass(frozen=True, slots=True)
class _Mark:
    """The moment at which a phase begins, how far it may be off, and who says so."""

    name: str
    wall: float
    off: float
    source: str


def cut_phases(
    process: float | None,
    lines: Sequence[Line],
    began: float,
    steps: Sequence[Step],
    ended: float,
    *,
    then: str = "engine config",
) -> dict[str, Any]:
    """The facts of the ledger's row: `began`, and the `phases`.

    Args:
        process: When the replica's process was started.
        lines: What the logs say.
        began: When our callback was called.
        steps: What it has measured.
        ended: When the engine was ready, or its start had failed.
        then: What follows the last of the steps.
    """
    marks = [*_before(process, lines, began), *_own(began, steps, then), *_engine(lines, ended)]
    pieces = _cut(marks, ended)
    for line in _stated(lines):
        pieces = _carve(pieces, line)
    pieces = _tidy(pieces)
    zero = next((p.begin for p in pieces if p.name != "schedule"), began)
    return {
        "began": round(zero, 3),
        "phases": [
            {
                "phase": piece.name,
                "at": round(piece.begin - zero, 3),
                "seconds": round(piece.end - piece.begin, 6 if piece.source == "clock" else 3),
                "within": round(piece.off, 3),
                "source": piece.source,
            }
            for piece in pieces
        ],
    }


def _before(process: float | None, lines: Sequence[Line], began: float) -> list[_Mark]:
    """Until our callback is called. A line of each kind may be there for each start; the last one is of this start."""
    last = {line.what: line for line in sorted(lines, key=lambda line: line.wall) if line.wall <= began}
    starting, creating, replica = last.get("starting"), last.get("creating"), last.get("replica")
    marks = []
    if starting is not None:
        marks.append(_mark("schedule", starting))
    if process is not None:
        asked = starting.wall if starting else creating.wall - _FRESH_SECONDS if creating else process
        if process >= asked:
            name = "process" if creating else "imports"
            marks.append(_Mark(name, process, 0.0, "clock"))
    if creating is not None:
        marks.append(_mark("imports", creating))
    if replica is not None:
        marks.append(_mark("replica", replica))
    return marks


def _own(began: float, steps: Sequence[Step], then: str) -> list[_Mark]:
    """What the callback has measured. Between its steps it looks at the node again; after them it is Ray's turn."""
    if not steps:
        return [_Mark(f"verify + {then}", began, 0.0, "clock")]
    marks = [_Mark("verify", began, 0.0, "clock")]
    for name, wall, seconds in sorted(steps, key=lambda step: step[1]):
        marks += [_Mark(name, wall, 0.0, "clock"), _Mark("verify", wall + seconds, 0.0, "clock")]
    return [*marks[:-1], replace(marks[-1], name=then)]


def _engine(lines: Sequence[Line], ended: float) -> list[_Mark]:
    """The engine's start. What lies between two known lines is named by all that begins between them."""
    known = _chain(lines)
    marks: list[_Mark] = []
    names: list[str] = []
    for what, phase in _CHAIN:
        line = known.get(what)
        if line is None or line.wall > ended + 1:
            names.append(phase)
            continue
        if marks:
            marks[-1] = replace(marks[-1], name=" + ".join([marks[-1].name, *names]))
        names = []
        marks.append(_mark(phase, line))
    return marks


def _chain(lines: Sequence[Line]) -> dict[str, Line]:
    """Of several ranks, the first to begin and the last to end."""
    kinds: dict[str, list[Line]] = {}
    for line in sorted(lines, key=lambda line: line.wall):
        kinds.setdefault(line.what, []).append(line)
    known: dict[str, Line] = {what: kinds[what][0] for what in kinds if what in {"executor", "core", "load"}}
    loaded = kinds.get("loaded") or kinds.get("weights")
    if loaded:
        known["loaded"] = loaded[-1]
    if "init" in kinds:
        known["init"] = kinds["init"][-1]
    return known


def _mark(name: str, line: Line) -> _Mark:
    return _Mark(name, line.wall, line.resolution / 2, line.source)


def _cut(marks: Sequence[_Mark], ended: float) -> list[_Piece]:
    """From each mark to the next. Time stamps that are cut to a second may be out of order by less than one."""
    pieces: list[_Piece] = []
    moments: list[float] = []
    for mark in marks:
        moments.append(min(max(mark.wall, moments[-1] if moments else mark.wall), ended))
    for n, mark in enumerate(marks):
        last = n + 1 == len(marks)
        end, off = (ended, 0.0) if last else (moments[n + 1], marks[n + 1].off)
        source = mark.source if last or mark.off >= marks[n + 1].off else marks[n + 1].source
        pieces.append(_Piece(mark.name, moments[n], end, mark.off + off, source))
    return pieces


def _stated(lines: Sequence[Line]) -> list[Line]:
    """What vLLM has measured itself; one line of all ranks, that of the slowest."""
    found: list[Line] = []
    for line in sorted(lines, key=lambda line: line.wall):
        if line.what not in {"compile", "profiling", "graph capture"} or not line.seconds:
            continue
        same = [n for n, f in enumerate(found) if f.what == line.what and line.wall - f.wall < _SAME_SECONDS]
        if same:
            found[same[-1]] = max(found[same[-1]], line, key=lambda line: line.seconds or 0.0)
        else:
            found.append(line)
    return found if any(line.what == "compile" for line in found) else [*_compiled(lines), *found]


def _compiled(lines: Sequence[Line]) -> list[Line]:
    """What vLLM does not state on CPUs: from the warm-up's beginning until the compiled code is saved or loaded."""
    compiling = min((line.wall for line in lines if line.what == "compiling"), default=None)
    compiled = max(
        (line for line in lines if line.what == "compiled"), key=lambda line: line.wall, default=None
    )
    if compiling is None or compiled is None or compiled.wall <= compiling:
        return []
    off = compiled.resolution
    return [Line("compile", compiled.wall, off, compiled.wall - compiling, compiled.source, off)]


def _carve(pieces: Sequence[_Piece], line: Line) -> list[_Piece]:
    """Take what `line` states, which ended when it was written, out of the phase that it was a part of."""
    seconds = line.seconds or 0.0
    begin, end = line.wall - seconds, line.wall
    middle = (begin + end) / 2
    carved: list[_Piece] = []
    for piece in pieces:
        if not piece.begin <= middle < piece.end:
            carved.append(piece)
            continue
        begin = max(begin, piece.begin)
        if begin - piece.begin < line.resolution / 2:  # no gap where the time stamp cannot show one
            begin = piece.begin
        end = min(begin + seconds, piece.end)
        off = max(piece.off, line.resolution)
        carved += [
            replace(piece, end=begin, off=off),
            _Piece(line.what, begin, end, line.off, line.source),
            replace(piece, begin=end, off=off),
        ]
    return carved


def _tidy(pieces: Iterable[_Piece]) -> list[_Piece]:
    """Without what took no time at all, unless its time stamps could not have shown it; neighbours of a name as one."""
    tidy: list[_Piece] = []
    for piece in pieces:
        if piece.end - piece.begin < _SHORTEST and (piece.off < 1 or piece.name in {p.name for p in tidy}):
            continue
        if tidy and tidy[-1].name == piece.name:
            tidy[-1] = replace(tidy[-1], end=piece.end, off=max(tidy[-1].off, piece.off))
        else:
            tidy.append(piece)
    return tidy
