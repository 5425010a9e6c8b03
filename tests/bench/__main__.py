"""`make bench`: measure, print, and write down; see `--help`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from tests.bench import (
    compile_cache,
    machine,
    node,
    orchestration,
    publishing,
    replica,
    report,
    rereading,
    slow_origin,
    starts,
    throughput,
)
from tests.bench.corpora import Corpus, make_corpora
from tests.bench.origin import FastOrigin, fast_origin
from tests.bench.table import Row

_REPOSITORY = Path(__file__).parents[2]
_ALONE = ("verify", "import", "again", "replica", "compile-cache", "orchestration")
_MINUTES = {"throughput": 25, "publish": 4, "resume": 2, "update": 1, "slow": 3}
"""What the groups that need the fast origin take in three runs, roughly."""


def main() -> None:
    """Run what is asked for and print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description="Print the numbers that we quote."
    )
    parser.add_argument("--runs", type=int, default=3, help="rounds; what takes milliseconds runs oftener")
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the bytes, to try the benchmark")
    parser.add_argument("--only", choices=[*_ALONE, *_MINUTES], nargs="+", help="only these groups")
    parser.add_argument(
        "--dir", type=Path, default=_REPOSITORY / ".bench", help="scratch folder, on the disk to measure"
    )
    parser.add_argument("--json", action="store_true", help="data on stdout instead of tables")
    parser.add_argument(
        "--write", action="store_true", help="write tables and plot to docs, after a whole run"
    )
    options = parser.parse_args()
    if options.write and (options.quick or options.only):
        parser.error("--write is for a whole run: without --quick and --only")
    base = options.dir.resolve()
    base.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin"
    talk = Console(stderr=True)
    found = _measure(base, options, lambda text: talk.print(f"  {text}", style="dim", highlight=False), talk)
    results = base / ("results-quick.json" if options.quick else "results.json")
    results.write_text(json.dumps(found, indent=1))
    if options.json:
        print(results.read_text())
    else:
        report.show(Console(width=max(Console().width, 130)), found)
    talk.print(f"kept in {results}")
    if options.write and not found["failed"]:
        report.write(found)
        talk.print("written to docs/explanation/measurements.md and docs/images/throughput.svg")
    sys.exit(1 if found["failed"] else 0)


def _measure(
    base: Path, options: argparse.Namespace, say: Callable[[str], object], talk: Console
) -> report.Results:
    groups, runs = options.only or [*_ALONE, *_MINUTES], options.runs
    about = machine.describe(base)
    rows: list[Row] = []
    samples: list[throughput.Sample] = []
    started: list[starts.Sample] = []
    failed: list[str] = []
    with contextlib.ExitStack() as stack:
        origin = _origin(stack, base, talk)

        def all_starts() -> list[Row]:
            started.extend(starts.measure(base, runs, say, quick=options.quick))
            return [*replica.checks_at_once(base, runs), *starts.rows(started)]

        jobs: dict[str, Callable[[], list[Row]]] = {
            "verify": lambda: node.quick_verify(base, runs),
            "import": lambda: node.import_callback(base, runs),
            "again": lambda: node.stage_again(base, runs, origin),
            "replica": all_starts,
            "orchestration": lambda: orchestration.measure(base, runs, say),
            "compile-cache": lambda: compile_cache.measure(runs, say),
        }
        if origin and set(groups) & set(_MINUTES):
            corpora = _corpora(origin, groups, options, talk)
            shards = corpora["shards"]

            def all_clients() -> list[Row]:
                samples.extend(throughput.measure(base, origin, corpora, runs, say))
                return throughput.rows(samples)

            jobs |= {
                "throughput": all_clients,
                "publish": lambda: publishing.measure(base, shards, runs, say),
                "resume": lambda: rereading.after_kill(base, origin, shards, runs, say),
                "update": lambda: rereading.second_version(base, origin, shards, runs, say),
                "slow": lambda: slow_origin.measure(base, origin, shards, runs, say),
            }
        begin = time.monotonic()
        for group in groups:
            talk.print(f"{group}, {time.monotonic() - begin:.0f} s so far")
            try:
                rows += jobs[group]() if group in jobs else []
            except RuntimeError as error:  # the other groups are worth their time
                talk.print(f"{group} failed: {error}", style="red", highlight=False)
                failed.append(group)
    return {
        "failed": failed,
        "machine": about,
        "quick": options.quick,
        "rows": [asdict(row) for row in rows],
        "samples": [asdict(sample) for sample in samples],
        "starts": [asdict(sample) for sample in started],
    }


def _origin(stack: contextlib.ExitStack, base: Path, talk: Console) -> FastOrigin | None:
    try:
        origin = stack.enter_context(fast_origin(base))
    except RuntimeError as error:
        talk.print(f"{error}; leaving out what needs it")
        return None
    os.environ.update(origin.doors["plain"].env)
    return origin


def _corpora(
    origin: FastOrigin, groups: list[str], options: argparse.Namespace, talk: Console
) -> dict[str, Corpus]:
    minutes = sum(_MINUTES.get(group, 0) for group in groups) * options.runs / 3
    minutes = minutes / 8 if options.quick else minutes
    free = shutil.disk_usage(origin.data).free / 1e9
    talk.print(f"about {minutes:.0f} minutes; needs 16 GB of disk at most, {free:.0f} GB are free")
    return make_corpora(origin, quick=options.quick)


if __name__ == "__main__":
    main()
