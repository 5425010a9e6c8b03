"""`publish`: a local folder becomes an artifact at an origin."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from llm_prefetch.cli.bars import progress_bar
from llm_prefetch.cli.display import print_json
from llm_prefetch.errors import UsageError
from llm_prefetch.progress import size
from llm_prefetch.publish import publish
from llm_prefetch.sealing import seal_prefix


def add_commands(commands: Any, parents: list[argparse.ArgumentParser]) -> None:  # noqa: ANN401 (argparse's private type)
    """Add `publish`."""
    parser = commands.add_parser(
        "publish",
        parents=parents,
        help="copy a local folder to an origin, with its manifest",
        description="Copy the folder SRC to URI, with a manifest that makes every chunk verifiable. Prints the\n"
        "version, which an artifact of a SPEC may pin.",
        epilog="example:\n  llm-prefetch publish ./llama-3-8b s3://bucket/models/llama-3-8b\n"
        "  llm-prefetch publish --manifest-only s3://bucket/models/llama-3-8b",
    )
    parser.add_argument("src", metavar="SRC", type=Path, nargs="?", help="local folder")
    parser.add_argument("uri", metavar="URI", help="s3://bucket/prefix or file:///folder")
    parser.add_argument("--dry-run", action="store_true", help="compute the version; write nothing")
    parser.add_argument(
        "--manifest-only",
        action="store_true",
        help="URI holds the files already: read them there, write the manifest",
    )
    parser.set_defaults(run=_publish)


def _publish(options: argparse.Namespace) -> int:
    if options.manifest_only == (options.src is not None):
        what = "--manifest-only takes no SRC" if options.manifest_only else "SRC is missing"
        raise UsageError(what, hint="publish SRC URI, or publish --manifest-only URI")
    with progress_bar(quiet=options.json) as progress:
        if options.manifest_only:
            report = seal_prefix(options.uri, progress=progress, dry_run=options.dry_run)
        else:
            report = publish(options.src, options.uri, progress=progress, dry_run=options.dry_run)
    if options.json:
        print_json(report)
    else:
        done = "would publish" if options.dry_run else "sealed" if options.manifest_only else "published"
        files = "1 file" if report.files == 1 else f"{report.files} files"
        kept = f" ({report.kept} were there already)" if report.kept else ""
        print(f"{done} {files}, {size(report.bytes)}, to {report.uri}{kept}\nversion: {report.version}")
    return 0
