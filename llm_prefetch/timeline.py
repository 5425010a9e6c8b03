"""Starts and stagings as the ledger tells them: what each did, and where its time went."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

UNFINISHED = "unfinished"
"""The outcome of a start whose end is not in the ledger: it is in progress, or the process was killed."""

_VISIBLE_ERROR = 0.05
_SHORT = 0.1
_ENDLESS = 1e18  # more is no number of seconds or bytes; nor is "NaN", which Python's JSON reads
_STAGING_RUNGS = frozenset({"wait", "prefect", "stage"})


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a start or a staging; `at` counts from the beginning of the replica's process, or of the staging.

    What came before has a negative one. `seconds` is `None` where that is not known, and may be off by `within`. `source` says who has measured it.
    """

    name: str
    at: float
    seconds: float | None
    within: float
    source: str


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a replica; what is not known is `None` or empty.

    `at` is when the node had been checked. `seconds` is from the beginning of the process until the engine was ready, or
    its start had failed; from the check, where the ledger has no more.
    """

    id: str
    at: float
    deployment: str
    replica: str
    bundle: str
    verdict: str
    reason: str
    rung: str
    bytes: int | None
    seconds: float | None
    outcome: str
    phases: tuple[Phase, ...]
    node: str = ""
    """Its address, where starts of several nodes are together."""


@dataclass(frozen=True, slots=True)
class Staging:
    """One staging on this node, or a repair."""

    at: float
    deployment: str
    bytes: int
    seconds: float | None
    outcome: str
    phases: tuple[Phase, ...]
    reused: int = 0
    """Bytes that were on the node already."""
    node: str = ""
    """Its address, where stagings of several nodes are together."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A phase in two starts; `None` where one of them does not have it."""

    name: str
    first: float | None
    second: float | None

    @property
    def change(self) -> float | None:
        """Seconds that the second one took more."""
        return None if self.first is None or self.second is None else self.second - self.first


def read_starts(rows: Iterable[dict[str, Any]]) -> list[Start]:
    """The starts in a ledger's `rows`, oldest first."""
    begun: dict[str, dict[str, Any]] = {}
    ended: dict[str, dict[str, Any]] = {}
    staged: list[Staging] = []
    for row in rows:
        if row.get("kind") in ("start", "engine") and row.get("start"):
            (begun if row["kind"] == "start" else ended)[str(row["start"])] = row
        elif row.get("kind") == "stage":
            staged.append(_staging(row))
    return [_start(row, ended.get(name, {}), staged) for name, row in begun.items()]


def read_stagings(rows: Iterable[dict[str, Any]]) -> list[Staging]:
    """The stagings and repairs in a ledger's `rows`, oldest first."""
    return [_staging(row) for row in rows if row.get("kind") in ("stage", "repair")]


def by_phase(phases: Iterable[Phase]) -> dict[str, float]:
    """The seconds of each phase.

    One may come in several pieces; what one of them took may not be known, and then neither is the whole.
    """
    sums: dict[str, float] = {}
    found = list(phases)
    unknown = {phase.name for phase in found if phase.seconds is None}
    for phase in found:
        if phase.seconds is not None and phase.name not in unknown:
            sums[phase.name] = sums.get(phase.name, 0.0) + phase.seconds
    return sums


def compare(first: Start, second: Start) -> list[Difference]:
    """Phase by phase, each by its whole time, in the order of a start; then what both took in all."""
    sums = [by_phase(start.phases) for start in (first, second)]
    names = _merged([list(dict.fromkeys(phase.name for phase in start.phases)) for start in (first, second)])
    found = [Difference(name, sums[0].get(name), sums[1].get(name)) for name in names]
    return [*found, Difference("total", first.seconds, second.seconds)]


def exactly(phase: Phase) -> str:
    """The seconds of a phase as they may honestly be told."""
    if phase.seconds is None:
        return "unknown"
    if phase.within >= 1 and phase.seconds < phase.within:
        return f"< {phase.within:g} s"
    if phase.within >= _VISIBLE_ERROR:
        return f"{phase.seconds:.1f} s ± {phase.within:.1g}"
    return f"{phase.seconds * 1000:.1f} ms" if phase.seconds < _SHORT else f"{phase.seconds:.1f} s"


def _start(begun: dict[str, Any], ended: dict[str, Any], staged: Sequence[Staging]) -> Start:
    phases = _phases(ended.get("phases")) or _coarse(begun, ended)
    return Start(
        id=str(begun["start"]),
        at=_number(begun.get("at")) or 0.0,
        deployment=str(begun.get("deployment", "")),
        replica=str(begun.get("replica", "")),
        bundle=str(begun.get("bundle", "")),
        verdict=str(begun.get("verdict", "")),
        reason=str(begun.get("reason", "")),
        rung=str(begun.get("rung", "")),
        bytes=_fetched(begun, staged),
        seconds=_length(phases) if ended else None,
        outcome=str(ended.get("outcome", UNFINISHED)),
        phases=phases,
    )


def _fetched(begun: dict[str, Any], staged: Sequence[Staging]) -> int | None:
    """What the replica waited for: nothing on a hit, else what stagings of its deployment fetched meanwhile."""
    if _number(begun.get("bytes")) is not None:
        return _count(begun["bytes"])
    if begun.get("rung") == "hit":
        return 0
    until = _number(begun.get("at")) or 0.0
    since = until - sum(_number(attempt.get("seconds")) or 0.0 for attempt in _ladder(begun))
    meanwhile = [
        staging.bytes
        for staging in staged
        if staging.deployment == begun.get("deployment")
        and staging.at >= since
        and staging.at - (staging.seconds or 0.0) <= until
    ]
    return sum(meanwhile) if meanwhile and begun.get("rung") in _STAGING_RUNGS else None


def _ladder(begun: dict[str, Any]) -> list[dict[str, Any]]:
    return _dicts(begun.get("ladder"))


def _phases(given: object) -> tuple[Phase, ...]:
    return tuple(
        Phase(
            name=str(row.get("phase", "")),
            at=_number(row.get("at")) or 0.0,
            seconds=_number(row.get("seconds")),
            within=_number(row.get("within")) or 0.0,
            source=str(row.get("source", "")),
        )
        for row in _dicts(given)
    )


def _coarse(begun: dict[str, Any], ended: dict[str, Any]) -> tuple[Phase, ...]:
    """Of a start that has not told its phases: the check, the rungs one after the other, and the rest as `engine`."""
    steps = [
        ("verify", _number(begun.get("seconds"))),
        *((str(attempt.get("rung")), _number(attempt.get("seconds"))) for attempt in _ladder(begun)),
        ("engine", _number(ended.get("seconds"))),
    ]
    phases, at = [], 0.0
    for name, seconds in steps:
        phases.append(Phase(name, round(at, 6), seconds, 0.0, "clock"))
        at += seconds or 0.0
    return tuple(phases)


def _staging(row: dict[str, Any]) -> Staging:
    artifacts = _dicts(row.get("artifacts"))
    return Staging(
        at=_number(row.get("at")) or 0.0,
        deployment=str(row.get("deployment") or row.get("artifact", "")),
        bytes=sum(_count(found.get("fetched")) for found in artifacts),
        seconds=_number(row.get("seconds")),
        outcome=str(row.get("outcome", "")),
        phases=tuple(
            Phase(
                name=" ".join(filter(None, [str(step.get("step", "")), str(step.get("artifact") or "")])),
                at=_number(step.get("at")) or 0.0,
                seconds=_number(step.get("seconds")),
                within=0.0,
                source="clock",
            )
            for step in _dicts(row.get("steps"))
        ),
        reused=sum(_count(found.get("reused")) for found in artifacts),
    )


def _merged(orders: Sequence[list[str]]) -> list[str]:
    """The names of both, each after the one that it follows in its own start."""
    merged = list(orders[0])
    for order in orders[1:]:
        at = 0
        for name in order:
            if name in merged:
                at = merged.index(name) + 1
            else:
                merged.insert(at, name)
                at += 1
    return merged


def _length(phases: Sequence[Phase]) -> float:
    """Until the last one ends; what came before the process does not count, as not every node knows it."""
    return round(max((phase.at + (phase.seconds or 0.0) for phase in phases), default=0.0), 3)


def _dicts(given: object) -> list[dict[str, Any]]:
    """What can be used of a part of a row; a ledger is a file that anything may have happened to."""
    return [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []


def _count(value: object) -> int:
    return int(_number(value) or 0)


def _number(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _ENDLESS:
        return float(value)
    return None
