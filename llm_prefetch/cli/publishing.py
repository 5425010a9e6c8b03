"""`publish`: a local folder becomes an artifact at an origin."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from llm_prefetch.cli.display import print_json, progress_bar, size
from llm_prefetch.publish import publish


def add_commands(commands: Any, parents: list[argparse.ArgumentParser]) -> None:  # noqa: ANN401 (argparse's private type)
    """Add `publish`."""
    parser = commands.add_parser(
        "publish",
        parents=parents,
        help="copy a local folder to an origin, with its manifest",
        description="Copy the folder SRC to URI, with a manifest that makes every chunk verifiable. Prints the version.",
    )
    parser.add_argument("src", metavar="SRC", type=Path, help="local folder")
    parser.add_argument("uri", metavar="URI", help="s3://bucket/prefix or file:///folder")
    parser.add_argument("--dry-run", action="store_true", help="only compute the version")
    parser.set_defaults(run=_publish)


def _publish(options: argparse.Namespace) -> int:
    with progress_bar(quiet=options.json) as progress:
        report = publish(options.src, options.uri, progress=progress, dry_run=options.dry_run)
    if options.json:
        print_json(report)
    else:
        done = "would publish" if options.dry_run else "published"
        print(
            f"{done} {report.files} files, {size(report.bytes)}, to {report.uri}\nversion: {report.version}"
        )
    return 0
