"""`timeline`: the starts of replicas on this node, where their time went, and how two of them differ."""

from __future__ import annotations

import argparse
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from llm_prefetch import ledger
from llm_prefetch.cli.display import print_json, print_table, say
from llm_prefetch.cli.on_cluster import add_options, on_cluster
from llm_prefetch.errors import PrefetchError, UsageError
from llm_prefetch.progress import size
from llm_prefetch.spec import NodeSelector
from llm_prefetch.store import open_store
from llm_prefetch.timeline import (
    Difference,
    Phase,
    Staging,
    Start,
    compare,
    exactly,
    read_stagings,
    read_starts,
)
from llm_prefetch.waterfall import draw

_T = TypeVar("_T", Start, Staging)
_LAST = 20
_HOURS = 24.0
_NODE = ("node",)
_WIDTHS = range(10, 49)
_BESIDE = 62  # characters of the other columns
_SHORT, _LONG = 0.1, 10.0
_OUTCOME_CHARACTERS = 60


def add_commands(commands: Any, parents: list[argparse.ArgumentParser]) -> None:  # noqa: ANN401 (argparse's private type)
    """Add `timeline`."""
    teller = commands.add_parser(
        "timeline",
        parents=parents,
        help="where the starts of replicas spent their time, on this node or on all",
        description="The starts of replicas on this node, the latest last: what the check said, the rung that it was\n"
        "started by, bytes fetched, seconds, and how it ended. One start alone is shown phase by phase.",
        epilog="examples:\n"
        "  llm-prefetch timeline llama-3-8b --last 1\n"
        "  llm-prefetch timeline --compare 3f2a 91bc\n"
        "  llm-prefetch timeline --last 5 --html starts.html\n"
        "  llm-prefetch timeline --cluster --hours 2",
    )
    teller.add_argument("deployment", metavar="DEPLOYMENT", nargs="?", help="only this one's")
    teller.add_argument(
        "--last", metavar="N", type=_count, default=_LAST, help=f"the last N (default: {_LAST})"
    )
    which = teller.add_mutually_exclusive_group()
    which.add_argument("--start", metavar="ID", help="this start (the beginning of its id is enough)")
    which.add_argument("--compare", metavar="ID", nargs=2, help="these two starts, phase by phase")
    which.add_argument("--stagings", action="store_true", help="stagings and repairs, not starts")
    add_options(teller, "every node of the cluster")
    teller.add_argument(
        "--hours",
        metavar="H",
        type=_hours,
        default=_HOURS,
        help=f"with --cluster: so far back (default: {_HOURS:g})",
    )
    teller.add_argument("--html", metavar="FILE", type=Path, help="draw the starts into a page of its own")
    teller.set_defaults(run=_timeline)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of starts")
    return int(text)


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = 0.0
    if not 0 < hours < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hours")
    return hours


def _timeline(options: argparse.Namespace) -> int:
    if options.html and options.stagings:
        raise UsageError("--html draws starts", hint="leave out --stagings")
    starts, stagings, failed = _cluster(options) if options.cluster else _node(options)
    if options.stagings:
        _show_stagings(_of(stagings, options.deployment)[-options.last :], failed, options)
    else:
        starts = _of(starts, options.deployment)
        if options.compare or options.start is not None:
            starts = [_find(starts, given, options) for given in options.compare or [options.start]]
        else:
            starts = starts[-options.last :]
        if options.html and starts:
            options.html.write_text(draw(starts), "utf-8")
            say(f"drew {len(starts)} start{'' if len(starts) == 1 else 's'} into {options.html}")
        if starts or options.json:
            _show_starts(starts, failed, options)
        else:
            say(_nothing(options))
    for node, error in failed:
        say(f"{node.address}: {error}")
    return failed[0][1].exit_code if failed else 0


_Failed = Sequence[tuple[Any, PrefetchError]]
"""The nodes that could not say, each with its error."""


def _node(options: argparse.Namespace) -> tuple[Sequence[Start], Sequence[Staging], _Failed]:
    rows = ledger.read(open_store(options.root), "start", "engine", "stage", "repair")
    return read_starts(rows), read_stagings(rows), ()


def _cluster(options: argparse.Namespace) -> tuple[Sequence[Start], Sequence[Staging], _Failed]:
    with on_cluster(options.address) as cluster:
        found = cluster.collect_ledgers(
            cluster.select_nodes(NodeSelector()),
            root=options.root,
            deployment=options.deployment or "",
            hours=options.hours,
            stop=options.stop,
        )
    return found.starts[::-1], found.stagings[::-1], found.failed


def _nothing(options: argparse.Namespace) -> str:
    if options.cluster:
        return f"no replica has started on the cluster in the last {options.hours:g} h"
    store = open_store(options.root)
    return f"no replica has started from {store.root} yet; this node's ledger is {store.ledger}"


def _of(found: Sequence[_T], deployment: str | None) -> list[_T]:
    return [one for one in found if deployment in (None, one.deployment)]


def _find(starts: Sequence[Start], given: str, options: argparse.Namespace) -> Start:
    found = [start for start in starts if start.id.startswith(given)]
    if len(found) != 1:
        raise UsageError(
            f"{len(found) or 'no'} starts have an id that begins with {given!r}",
            where="the cluster" if options.cluster else str(open_store(options.root).ledger),
            hint="`llm-prefetch timeline` lists them",
        )
    return found[0]


def _show_starts(starts: Sequence[Start], failed: _Failed, options: argparse.Namespace) -> None:
    differences = compare(*starts) if options.compare else []
    if options.json:
        print_json({
            "starts": starts,
            **({"compare": [{"phase": d.name, "first": d.first, "second": d.second, "change": d.change}
                            for d in differences]} if options.compare else {}),
            **_failures(failed, options),
        })  # fmt: skip
        return
    print_table(
        (*_NODE[: options.cluster], "start", "when", "deployment", "verdict", "rung", "fetched", "seconds", "outcome"),
        (
            (*[s.node][: options.cluster], s.id, _when(s.at), s.deployment, s.verdict, s.rung, "?" if s.bytes is None else size(s.bytes),
             _seconds(s.seconds), _short(s.outcome))
            for s in starts
        ),
    )  # fmt: skip
    if options.compare:
        print()
        _show_differences(starts, differences)
    elif len(starts) == 1:
        print()
        _show_phases(starts[0].phases)


def _show_phases(phases: Sequence[Phase]) -> None:
    """A waterfall of text."""
    first = min((phase.at for phase in phases), default=0.0)
    span = max((phase.at + (phase.seconds or 0.0) for phase in phases), default=0.0) - first
    free = shutil.get_terminal_size((_BESIDE + _WIDTHS[-1], 0)).columns - _BESIDE
    width = min(max(free, _WIDTHS[0]), _WIDTHS[-1])
    digits = 1 if span >= _LONG else 3
    print_table(
        ("phase", "from", "seconds", "", "measured by"),
        ((p.name, f"{p.at:6.{digits}f}", exactly(p), _bar(p, first, span, width), p.source) for p in phases),
    )


def _bar(phase: Phase, first: float, span: float, width: int) -> str:
    if phase.seconds is None or span <= 0:
        return "·" * width
    left = min(width - 1, int(width * (phase.at - first) / span))
    long = max(1, round(width * (phase.at + phase.seconds - first) / span) - left)
    return ("·" * left + "█" * long).ljust(width, "·")


def _show_differences(starts: Sequence[Start], differences: Sequence[Difference]) -> None:
    print_table(
        ("phase", starts[0].id, starts[1].id, "change"),
        (
            (d.name, f"{_seconds(d.first):>12}", f"{_seconds(d.second):>12}", _change(d.change))
            for d in differences
        ),
    )


def _change(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:+7.1f}"


def _failures(failed: _Failed, options: argparse.Namespace) -> dict[str, Any]:
    return {"failed": [{"node": node, "error": error} for node, error in failed]} if options.cluster else {}


def _show_stagings(stagings: Sequence[Staging], failed: _Failed, options: argparse.Namespace) -> None:
    if options.json:
        print_json({"stagings": stagings, **_failures(failed, options)})
        return
    if not stagings:
        say(
            "nothing has been staged there yet"
            if options.cluster
            else "nothing has been staged on this node yet"
        )
        return
    print_table(
        (*_NODE[: options.cluster], "when", "deployment", "fetched", "seconds", "outcome"),
        (
            (
                *[s.node][: options.cluster],
                _when(s.at),
                s.deployment,
                size(s.bytes),
                _seconds(s.seconds),
                _short(s.outcome),
            )
            for s in stagings
        ),
    )
    if len(stagings) == 1:
        print()
        _show_phases(stagings[0].phases)


def _when(wall: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(wall))


def _seconds(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds:.1f}" if not 0 < seconds < _SHORT else f"{seconds:.3f}"


def _short(outcome: str) -> str:
    return outcome if len(outcome) <= _OUTCOME_CHARACTERS else f"{outcome[: _OUTCOME_CHARACTERS - 1]}…"
