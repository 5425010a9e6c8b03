"""`gc` and `pin`: delete what nothing on this node needs, and keep what it would delete."""

from __future__ import annotations

import argparse
import time
from typing import Any

from llm_prefetch.cli.display import print_json, print_table, say, short
from llm_prefetch.leftovers import delete, leftovers, pin
from llm_prefetch.paths import is_safe_name
from llm_prefetch.progress import size
from llm_prefetch.store import open_store


def add_commands(commands: Any, parents: list[argparse.ArgumentParser]) -> None:  # noqa: ANN401 (argparse's private type)
    """Add `gc` and `pin`."""
    collector = commands.add_parser(
        "gc",
        parents=parents,
        help="delete what nothing on this node needs",
        description="Delete versions that are not live, not in use by a replica or a staging, not pinned and not what\n"
        "a rollback goes to; unfinished work that nobody goes on with; and what was set aside. A staging that does\n"
        "not fit does the same by itself, oldest first and no more than it needs.",
    )
    collector.add_argument("--dry-run", action="store_true", help="only say what it would delete")
    collector.set_defaults(run=_gc)
    pinner = commands.add_parser(
        "pin",
        parents=parents,
        help="keep a version, whatever else happens",
        description="Keep a version on this node: neither gc nor a staging that needs room deletes it.",
        epilog="example:\n  llm-prefetch pin weights b3-7a4c37",
    )
    pinner.add_argument("name", metavar="ARTIFACT", type=_name, help="see `llm-prefetch ls`")
    pinner.add_argument("version", metavar="VERSION", type=_name, help="the beginning of it is enough")
    pinner.add_argument("--off", action="store_true", help="keep it no longer")
    pinner.set_defaults(run=_pin)


def _name(text: str) -> str:
    if not is_safe_name(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name")
    return text


def _gc(options: argparse.Namespace) -> int:
    store = open_store(options.root)
    found = leftovers(store)
    gone = [one for one in found if options.dry_run or delete(store, one, why="gc")]
    if options.json:
        print_json({
            "deleted": not options.dry_run,
            "bytes": sum(one.bytes for one in gone),
            "leftovers": [{"name": one.name, "version": one.version, "path": one.path, "bytes": one.bytes} for one in gone],
        })  # fmt: skip
        return 0
    rows = ((one.name, short(one.version), size(one.bytes), _day(one.at)) for one in gone)
    if gone:
        print_table(("what", "version", "size", "since"), rows)
    verb = "would be" if options.dry_run else "were"
    say(f"{size(sum(one.bytes for one in gone))} in {len(gone)} leftovers {verb} deleted from {store.root}")
    return 0


def _pin(options: argparse.Namespace) -> int:
    store = open_store(options.root)
    version = pin(store, options.name, options.version, on=not options.off)
    if options.json:
        print_json({"name": options.name, "version": version, "pinned": not options.off})
    else:
        say(f"{options.name} {short(version)} is {'no longer ' if options.off else ''}pinned in {store.root}")
    return 0


def _day(wall: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(wall))
