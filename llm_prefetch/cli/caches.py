"""`caches`: the compile caches that are quarantined on this node, and an end to it."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import Any

from llm_prefetch.caches.quarantine import clear_marks, marks
from llm_prefetch.cli.display import print_json, print_table, say, short
from llm_prefetch.errors import SpecError
from llm_prefetch.store import open_store


def add_commands(commands: Any, parents: list[argparse.ArgumentParser]) -> None:  # noqa: ANN401 (argparse's private type)
    """Add `caches`."""
    parser = commands.add_parser(
        "caches",
        parents=parents,
        help="list the compile caches that broke a start, and offer them again",
        description="List the compile caches that are quarantined on this node: a start that used one has failed, or was\n"
        "killed before its engine was up. Replicas compile for themselves until the cache is cleared or a new version of\n"
        "it is staged.",
        epilog="example:\n  llm-prefetch caches --clear compile",
    )
    parser.add_argument(
        "--clear", metavar="NAME", help="offer it again: the name of an artifact or deployment, or a version"
    )
    parser.set_defaults(run=_caches)


def _caches(options: argparse.Namespace) -> int:
    store = open_store(options.root)
    found = marks(store) if options.clear is None else clear_marks(store, options.clear)
    if options.clear is not None and not found:
        raise SpecError(
            f"no compile cache {options.clear!r} is quarantined on this node",
            where=str(store.root),
            hint="see `llm-prefetch caches`",
        )
    if options.json:
        print_json({"cleared": options.clear is not None, "quarantined": [asdict(mark) for mark in found]})
        return 0
    if found:
        rows = ((m.name, short(m.version), m.deployment, _day(m.at), m.reason) for m in found)
        print_table(("cache", "version", "deployment", "since", "why"), rows)
    say(f"{len(found)} {'offered again' if options.clear is not None else 'quarantined'} in {store.root}")
    return 0


def _day(wall: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(wall))
