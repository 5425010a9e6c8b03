"""`timeline`: the starts of replicas on this node, where their time went, and how two of them differ."""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from llm_prefetch import ledger
from llm_prefetch.cli.display import print_json, print_table, say, size
from llm_prefetch.errors import UsageError
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
_WIDTHS = range(10, 49)
_BESIDE = 62  # characters of the other columns
_SHORT, _LONG = 0.1, 10.0
_OUTCOME_CHARACTERS = 60


def add_commands(commands: Any, parents: list[argparse.ArgumentParser]) -> None:  # noqa: ANN401 (argparse's private type)
    """Add `timeline`."""
    teller = commands.add_parser(
        "timeline",
        parents=parents,
        help="where the starts of replicas on this node spent their time",
        description="The starts of replicas on this node, the latest last: what the check said, the rung that it was\n"
        "started by, bytes fetched, seconds, and how it ended. One start alone is shown phase by phase.",
        epilog="examples:\n"
        "  llm-prefetch timeline llama-3-8b --last 1\n"
        "  llm-prefetch timeline --compare 3f2a 91bc\n"
        "  llm-prefetch timeline --last 5 --html starts.html",
    )
    teller.add_argument("deployment", metavar="DEPLOYMENT", nargs="?", help="only this one's")
    teller.add_argument(
        "--last", metavar="N", type=_count, default=_LAST, help=f"the last N (default: {_LAST})"
    )
    which = teller.add_mutually_exclusive_group()
    which.add_argument("--start", metavar="ID", help="this start (the beginning of its id is enough)")
    which.add_argument("--compare", metavar="ID", nargs=2, help="these two starts, phase by phase")
    which.add_argument("--stagings", action="store_true", help="stagings and repairs, not starts")
    teller.add_argument("--html", metavar="FILE", type=Path, help="draw the starts into a page of its own")
    teller.set_defaults(run=_timeline)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of starts")
    return int(text)


def _timeline(options: argparse.Namespace) -> int:
    if options.html and options.stagings:
        raise UsageError("--html draws starts", hint="leave out --stagings")
    store = open_store(options.root)
    rows = ledger.read(store, "start", "engine", "stage", "repair")
    if options.stagings:
        _show_stagings(_of(read_stagings(rows), options.deployment)[-options.last :], options)
        return 0
    starts = _of(read_starts(rows), options.deployment)
    if options.compare or options.start is not None:
        starts = [_find(starts, given) for given in options.compare or [options.start]]
    else:
        starts = starts[-options.last :]
    if not starts and not options.json:
        say(f"no replica has started from {store.root} yet; this node's ledger is {store.ledger}")
        return 0
    if options.html:
        options.html.write_text(draw(starts), "utf-8")
        say(f"drew {len(starts)} start{'' if len(starts) == 1 else 's'} into {options.html}")
    _show_starts(starts, options)
    return 0


def _of(found: list[_T], deployment: str | None) -> list[_T]:
    return [one for one in found if deployment in (None, one.deployment)]


def _find(starts: Sequence[Start], given: str) -> Start:
    found = [start for start in starts if start.id.startswith(given)]
    if len(found) != 1:
        raise UsageError(
            f"{len(found) or 'no'} starts have an id that begins with {given!r}",
            hint="`llm-prefetch timeline` lists them",
        )
    return found[0]


def _show_starts(starts: Sequence[Start], options: argparse.Namespace) -> None:
    differences = compare(*starts) if options.compare else []
    if options.json:
        print_json({
            "starts": starts,
            **({"compare": [{"phase": d.name, "first": d.first, "second": d.second, "change": d.change}
                            for d in differences]} if options.compare else {}),
        })  # fmt: skip
        return
    print_table(
        ("start", "when", "deployment", "verdict", "rung", "fetched", "seconds", "outcome"),
        (
            (s.id, _when(s.at), s.deployment, s.verdict, s.rung, "?" if s.bytes is None else size(s.bytes),
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


def _show_stagings(stagings: Sequence[Staging], options: argparse.Namespace) -> None:
    if options.json:
        print_json({"stagings": stagings})
        return
    if not stagings:
        say("nothing has been staged on this node yet")
        return
    print_table(
        ("when", "deployment", "fetched", "seconds", "outcome"),
        (
            (_when(s.at), s.deployment, size(s.bytes), _seconds(s.seconds), _short(s.outcome))
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
