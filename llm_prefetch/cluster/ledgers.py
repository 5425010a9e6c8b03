"""The ledgers of many nodes in one: which replicas started where, what they waited for, and what was staged.

Each node answers with the newest of its own, and says how long ago it was rather than when: clocks of nodes differ, and
what is older is compared by the clock of whoever asks.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from llm_prefetch import ledger
from llm_prefetch.cluster.asking import Answer, ask_nodes
from llm_prefetch.cluster.reports import Node
from llm_prefetch.errors import PrefetchError, disk_error
from llm_prefetch.store import open_store
from llm_prefetch.timeline import Phase, Staging, Start, by_phase, read_stagings, read_starts

_SECONDS = 60.0
_LEDGER_BYTES = 16 * 2**20
_MOST = 200
"""Starts, and stagings, of one node."""
_TEXT_CHARACTERS = 300
_HOUR = 3600.0
_One = TypeVar("_One", Start, Staging)


@dataclass(frozen=True, slots=True)
class Told:
    """What one node answers, newest first; `at` is seconds from now, and never more than 0."""

    starts: tuple[Start, ...]
    stagings: tuple[Staging, ...]
    left_out: int
    """Older ones, which were too many."""


@dataclass(frozen=True, slots=True)
class ClusterLedger:
    """The starts and stagings of all nodes, newest first, and the nodes that could not say."""

    starts: tuple[Start, ...]
    stagings: tuple[Staging, ...]
    failed: tuple[tuple[Node, PrefetchError], ...]
    left_out: int

    def rows(self) -> list[dict[str, Any]]:
        """One row for each node that failed, each start and each staging, as tables show them."""
        failed = [
            {**_EMPTY, "node": node.address, "what": "error", "outcome": str(error)}
            for node, error in self.failed
        ]
        told = [*map(_start_row, self.starts), *map(_staging_row, self.stagings)]
        return failed + sorted(told, key=lambda row: str(row["at"]), reverse=True)

    def counts(self) -> dict[str, Any]:
        """What all of it comes to; seconds are of starts that became ready."""
        seconds = sorted(
            start.seconds for start in self.starts if start.seconds is not None and start.outcome == "ready"
        )
        return {
            "starts": len(self.starts),
            "verdicts": dict(Counter(start.verdict for start in self.starts).most_common()),
            "rungs": dict(Counter(start.rung for start in self.starts).most_common()),
            "median_seconds": round(median(seconds), 3) if seconds else None,
            "slowest_seconds": seconds[-1] if seconds else None,
            "stagings": len(self.stagings),
            "fetched_bytes": sum(staging.bytes for staging in self.stagings),
            "reused_bytes": sum(staging.reused for staging in self.stagings),
            "left_out": self.left_out,
            "failed_nodes": len(self.failed),
        }


def collect_ledgers(
    nodes: Sequence[Node],
    *,
    root: Path | None,
    deployment: str = "",
    hours: float = 24.0,
    stop: threading.Event | None = None,
) -> ClusterLedger:
    """Ask `nodes` for the starts and stagings of the last `hours`; raises no error of a node.

    Args:
        nodes: Which.
        root: Root of the node store; `None` leaves it to the node's own `LLM_PREFETCH_ROOT`.
        deployment: Only of this one; empty is all.
        hours: How far back.
        stop: When set, the nodes that have not answered have an error.
    """
    answered: dict[str, float] = {}

    def note(answer: Answer[Told]) -> None:
        answered[answer.node.id] = time.time()

    where = str(root) if root else None
    answers = ask_nodes(
        nodes, _told_there, where, deployment, hours, seconds=_SECONDS, stop=stop, on_answer=note
    )
    return gather(answers, answered)


def gather(answers: Sequence[Answer[Told]], answered: dict[str, float]) -> ClusterLedger:
    """Put the `answers` together; `answered` is when each came, by node id and the clock here."""
    told = [
        (answer.node, answer.value, answered.get(answer.node.id, 0.0)) for answer in answers if answer.value
    ]
    starts = [
        replace(one, at=one.at + now, node=node.address) for node, told_, now in told for one in told_.starts
    ]
    stagings = [
        replace(one, at=one.at + now, node=node.address)
        for node, told_, now in told
        for one in told_.stagings
    ]
    return ClusterLedger(
        tuple(sorted(starts, key=lambda one: one.at, reverse=True)),
        tuple(sorted(stagings, key=lambda one: one.at, reverse=True)),
        tuple((answer.node, answer.error) for answer in answers if answer.error is not None),
        sum(told_.left_out for _, told_, _ in told),
    )


def told_by(root: Path | None, deployment: str, hours: float) -> Told:
    """What the node that this runs on has to tell; one without a store has nothing.

    Raises:
        DiskError: its ledger cannot be read.
    """
    store = open_store(root, missing_ok=True)
    try:
        rows = ledger.read(store, "start", "engine", "stage", "repair", last_bytes=_LEDGER_BYTES)
    except OSError as error:
        raise disk_error(error, str(store.ledger)) from error
    now = time.time()
    starts = _recent(read_starts(rows), deployment, now, hours)
    stagings = _recent(read_stagings(rows), deployment, now, hours)
    left_out = max(0, len(starts) - _MOST) + max(0, len(stagings) - _MOST)
    return Told(tuple(starts[:_MOST]), tuple(stagings[:_MOST]), left_out)


def _told_there(root: str | None, deployment: str, hours: float) -> Told:
    return told_by(Path(root) if root else None, deployment, hours)


def _recent(found: Sequence[_One], deployment: str, now: float, hours: float) -> list[_One]:
    """Newest first. What comes from after a clock was set back is of now."""
    chosen = [
        replace(
            one,
            at=min(0.0, one.at - now),
            outcome=one.outcome[:_TEXT_CHARACTERS],
            phases=tuple(_sane(phase) for phase in one.phases),
        )
        for one in found
        if deployment in ("", one.deployment) and one.at >= now - hours * _HOUR
    ]
    return sorted(chosen, key=lambda one: one.at, reverse=True)


def _sane(phase: Phase) -> Phase:
    """Lines of two logs may be read with clocks of different steps: nothing takes less than no time."""
    return phase if phase.seconds is None or phase.seconds >= 0 else replace(phase, seconds=0.0)


_EMPTY: dict[str, Any] = {
    "at": "", "node": "", "what": "", "deployment": "", "replica": "", "id": "", "verdict": "", "rung": "",
    "fetched_bytes": None, "reused_bytes": None, "seconds": None, "outcome": "", "phases": "",
}  # fmt: skip


def _start_row(start: Start) -> dict[str, Any]:
    return {
        **_EMPTY, "at": _utc(start.at), "node": start.node, "what": "start", "deployment": start.deployment,
        "replica": start.replica, "id": start.id, "verdict": start.verdict, "rung": start.rung,
        "fetched_bytes": start.bytes, "seconds": start.seconds, "outcome": start.outcome,
        "phases": _told_phases(start.phases),
    }  # fmt: skip


def _staging_row(staging: Staging) -> dict[str, Any]:
    return {
        **_EMPTY, "at": _utc(staging.at), "node": staging.node, "what": "staging", "deployment": staging.deployment,
        "fetched_bytes": staging.bytes, "reused_bytes": staging.reused, "seconds": staging.seconds,
        "outcome": staging.outcome, "phases": _told_phases(staging.phases),
    }  # fmt: skip


def _told_phases(phases: Sequence[Phase]) -> str:
    return ", ".join(f"{name} {seconds:.3g} s" for name, seconds in by_phase(phases).items())


def _utc(wall: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(wall))
