"""`make bench`: measure and print; see `--help`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench import machine, rows
from tests.bench.origin import FastOrigin, fast_origin
from tests.bench.rows import Row

_REPOSITORY = Path(__file__).parents[2]


def main() -> None:
    """Run what is asked for and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description="Print the numbers that we quote."
    )
    parser.add_argument("--json", action="store_true", help="data on stdout instead of a table")
    parser.add_argument(
        "--runs", type=int, default=5, help="runs of the slow rows; quick ones take a multiple of it"
    )
    parser.add_argument("--gb", type=float, default=2.0, help="size of the staging from a fast origin")
    parser.add_argument(
        "--dir", type=Path, default=_REPOSITORY / ".bench", help="scratch folder, on the disk to measure"
    )
    parser.add_argument(
        "--only", choices=["verify", "import", "again", "fresh"], nargs="+", help="only these rows"
    )
    options = parser.parse_args()
    base = options.dir.resolve()
    base.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin"
    talk = Console(stderr=True)
    about = machine.describe(base)
    with contextlib.ExitStack() as stack:
        origin = _origin(stack, base, talk)
        size = int(options.gb * 1e9) // (8 * 2**20) * (8 * 2**20)
        jobs = {
            "verify": lambda: rows.quick_verify(base, options.runs),
            "import": lambda: rows.import_callback(base, options.runs),
            "again": lambda: rows.stage_again(base, options.runs, origin),
            "fresh": lambda: rows.stage_fresh(base, options.runs, origin, size),
        }
        found: list[Row] = []
        for name in options.only or jobs:
            talk.print(f"measuring {name} ...", style="dim")
            found += jobs[name]()
    if options.json:
        print(json.dumps({"machine": about, "rows": [asdict(row) for row in found]}, indent=2))
    else:
        _print(about, found)


def _origin(stack: contextlib.ExitStack, base: Path, talk: Console) -> FastOrigin | None:
    try:
        origin = stack.enter_context(fast_origin(base))
    except RuntimeError as error:
        talk.print(f"{error}; measuring file:// instead of s3://, without s5cmd")
        return None
    os.environ.update(origin.env)
    return origin


def _print(about: dict[str, str], found: list[Row]) -> None:
    console = Console(width=max(Console().width, 130))
    for name, text in about.items():
        console.print(f"{name:9} {text}", highlight=False)
    table = Table("what", "median", "", "range", "runs", "target", "note", box=None, header_style="bold")
    for column in (1, 3, 4):
        table.columns[column].justify = "right"
    for row in found:
        span = f"{row.low:.3g} to {row.high:.3g}"
        table.add_row(row.what, f"{row.value:.3g}", row.unit, span, str(row.runs), row.target, row.note)
    console.print(table)


if __name__ == "__main__":
    main()
