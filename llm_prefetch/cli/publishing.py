"""`publish`: a local folder becomes an artifact at an origin."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from llm_prefetch.cli.bars import progress_bar
from llm_prefetch.cli.display import print_json, size
from llm_prefetch.publish import publish


def add_commands(commands: Any, parents: list[argparse.ArgumentParser]) -> None:  # noqa: ANN401 (argparse's private type)
    """Add `publish`."""
    parser = commands.add_parser(
        "publish",
        parents=parents,
        help="copy a local folder to an origin, with its manifest",
        description="Copy the folder SRC to URI, with a manifest that makes every chunk verifiable. Prints the\n"
        "version, which an artifact of a SPEC may pin.",
        epilog="example:\n  llm-prefetch publish ./llama-3-8b s3://bucket/models/llama-3-8b",
    )
    parser.add_argument("src", metavar="SRC", type=Path, help="local folder")
    parser.add_argument("uri", metavar="URI", help="s3://bucket/prefix or file:///folder")
    parser.add_argument("--dry-run", action="store_true", help="compute the version; copy nothing")
    parser.set_defaults(run=_publish)


def _publish(options: argparse.Namespace) -> int:
    with progress_bar(quiet=options.json) as progress:
        report = publish(options.src, options.uri, progress=progress, dry_run=options.dry_run)
    if options.json:
        print_json(report)
    else:
        done = "would publish" if options.dry_run else "published"
        files = "1 file" if report.files == 1 else f"{report.files} files"
        print(f"{done} {files}, {size(report.bytes)}, to {report.uri}\nversion: {report.version}")
    return 0
