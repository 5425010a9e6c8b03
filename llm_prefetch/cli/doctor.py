"""`doctor`: what is wrong with Prefect, the cluster or a node, one line each, and the command that mends it."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm_prefetch.cli.display import print_json, say

_PREFECT_FILES = ("prefect.yaml", "deployments/prefect.yaml")
_DESCRIPTION = """\
Look at Prefect (server, credentials, work pool, worker, deployments), at the Ray cluster and at the store, disk,
clock and packages of every node. Changes nothing. Exit code 1 if something would keep a staging from working."""


def add_commands(commands: Any, parents: list[argparse.ArgumentParser]) -> None:  # noqa: ANN401 (argparse's private type)
    """Add `doctor`."""
    parser = commands.add_parser(
        "doctor",
        parents=parents,
        help="what would keep this from working, and the mend",
        description=_DESCRIPTION,
    )
    parser.add_argument(
        "--address", help="address of the Ray cluster (else RAY_ADDRESS, else the one on this machine)"
    )
    parser.add_argument(
        "--prefect-file", metavar="FILE", type=Path,
        help=f"what the server's deployments are compared with (else {' or '.join(_PREFECT_FILES)}, where there is one)",
    )  # fmt: skip
    parser.add_argument("--only", choices=("prefect", "cluster", "node"), help="look at one of them alone")
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from llm_prefetch import doctor

    found: list[doctor.Finding] = []
    if options.only in (None, "prefect"):
        found += doctor.prefect_findings(os.environ, options.prefect_file or _prefect_file())
    if options.only == "node":
        found += doctor.store_findings(
            "this machine", doctor.look(str(options.root) if options.root else None)
        )
    if options.only in (None, "cluster"):
        found += doctor.cluster_findings(options.address, options.root)
    if options.json:
        print_json({"healthy": doctor.healthy(found), "findings": found})
    else:
        _print(found)
    return 0 if doctor.healthy(found) else 1


def _prefect_file() -> Path | None:
    return next((Path(name) for name in _PREFECT_FILES if Path(name).is_file()), None)


def _print(found: Sequence[Any]) -> None:
    width = max((len(finding.about) for finding in found), default=0)
    for finding in found:
        mend = f"\n{'':9}{'':{width}}  -> {finding.mend}" if finding.mend else ""
        print(f"{finding.outcome:8} {finding.about:{width}}  {finding.says}{mend}")
    count = Counter(str(finding.outcome) for finding in found)
    say(", ".join(f"{number} {outcome}" for outcome, number in sorted(count.items())))
