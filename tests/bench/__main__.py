"""`make bench`: measure, print, and write down; see `--help`."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
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
_ALONE = ("verify", "import", "again", "checks", "replica", "compile-cache", "orchestration")
_MINUTES = {"throughput": 25, "publish": 4, "resume": 2, "update": 1, "slow": 3}
"""What the groups that need the fast origin take in three runs, roughly."""


GROUPS = (*_ALONE, *_MINUTES)
"""In the order of the page."""


def main() -> None:
    """Run what is asked for and print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description="Print the numbers that we quote."
    )
    parser.add_argument("--runs", type=int, default=3, help="rounds; what takes milliseconds runs oftener")
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the bytes, to try the benchmark")
    parser.add_argument("--only", choices=GROUPS, nargs="+", help="only these groups")
    parser.add_argument(
        "--dir", type=Path, default=_REPOSITORY / ".bench", help="scratch folder, on the disk to measure"
    )
    parser.add_argument(
        "--write", action="store_true", help="write tables and plot to docs, of all groups as last measured"
    )
    options = parser.parse_args()
    if options.write and options.quick:
        parser.error("--write is not for --quick")
    base = options.dir.resolve()
    base.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin"
    talk = Console(stderr=True)
    folder = base / "results-quick" if options.quick else base / "results"
    groups = options.only or list(GROUPS)
    failed = _measure(base, options, folder, talk)
    report.show(Console(width=max(Console().width, 130)), report.kept(folder, groups))
    talk.print(f"kept in {folder}")
    if options.write and not failed:
        report.write(report.kept(folder, GROUPS))
        talk.print("written to docs/explanation/measurements.md and docs/images/throughput.svg")
    sys.exit(1 if failed else 0)


def _measure(base: Path, options: argparse.Namespace, folder: Path, talk: Console) -> list[str]:
    """Run the groups and keep what each has found; those that failed."""
    groups, runs = options.only or list(GROUPS), options.runs

    def say(text: str) -> None:
        talk.print(f"  {text}", style="dim", highlight=False)

    failed: list[str] = []
    with contextlib.ExitStack() as stack:
        origin = _origin(stack, base, talk)
        corpora = _corpora(origin, groups, options, talk) if origin and set(groups) & set(_MINUTES) else {}
        jobs = _jobs(base, runs, origin, corpora, say, quick=options.quick)
        begin = time.monotonic()
        for group in groups:
            talk.print(f"{group}, {time.monotonic() - begin:.0f} s so far")
            about = machine.describe(base)
            try:
                found = jobs[group]() if group in jobs else None
            except RuntimeError as error:  # the other groups are worth their time
                talk.print(f"{group} failed: {error}", style="red", highlight=False)
                failed.append(group)
            else:
                if found is not None:
                    report.keep(
                        replace(found, group=group, day=time.strftime("%Y-%m-%d"), machine=about), folder
                    )
    return failed


def _jobs(
    base: Path,
    runs: int,
    origin: FastOrigin | None,
    corpora: dict[str, Corpus],
    say: Callable[[str], object],
    *,
    quick: bool,
) -> dict[str, Callable[[], report.Results]]:
    """What measures each group, without those that lack what they need."""

    def alone(measure: Callable[[], list[Row]]) -> Callable[[], report.Results]:
        return lambda: report.Results("", "", {}, measure())

    def all_starts() -> report.Results:
        started = starts.measure(base, runs, say, quick=quick)
        return report.Results("", "", {}, starts.rows(started), starts=started)

    jobs = {
        "verify": alone(lambda: node.quick_verify(base, runs)),
        "import": alone(lambda: node.import_callback(base, runs)),
        "again": alone(lambda: node.stage_again(base, runs, origin)),
        "checks": alone(lambda: replica.checks_at_once(base, runs * 3)),
        "replica": all_starts,
        "orchestration": alone(lambda: orchestration.measure(base, runs, say)),
        "compile-cache": alone(lambda: compile_cache.measure(runs, say)),
    }
    if origin is None or not corpora:
        return jobs
    shards = corpora["shards"]

    def all_clients() -> report.Results:
        samples = list(throughput.measure(base, origin, corpora, runs, say))
        return report.Results("", "", {}, throughput.rows(samples), samples)

    return jobs | {
        "throughput": all_clients,
        "publish": alone(lambda: publishing.measure(base, shards, runs, say)),
        "resume": alone(lambda: rereading.after_kill(base, origin, shards, runs, say)),
        "update": alone(lambda: rereading.second_version(base, origin, shards, runs, say)),
        "slow": alone(lambda: slow_origin.measure(base, origin, shards, runs, say)),
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
