"""The command line: data on stdout, talk on stderr, one line for every error, and an exit code that says why.

0 done; 1 the check says no; 2 bad usage or spec; 3 origin, network or cluster; 4 disk; 5 trust
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from llm_prefetch import __version__, settings
from llm_prefetch.cli import caches, capture, doctor, leftovers, node, publishing, staging, timeline
from llm_prefetch.cli.display import print_error
from llm_prefetch.cli.interrupt import exit_code, interruptible
from llm_prefetch.errors import DiskError, PrefetchError, UsageError, disk_error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in arguments  # looked for by hand: the arguments themselves may be what is wrong
    try:
        options = make_parser().parse_args(arguments)
        with interruptible() as stop:
            options.stop = stop
            code: int = options.run(options)
        sys.stdout.flush()
    except PrefetchError as error:
        print_error(error, as_json=as_json)
        return error.exit_code
    except BrokenPipeError:  # whoever reads, as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except OSError as error:
        print_error(disk_error(error, str(error.filename or "")), as_json=as_json)
        return DiskError.exit_code
    except KeyboardInterrupt as interrupt:
        return exit_code(interrupt)
    return code


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing its usage, so that a slip gets one line too."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 (argparse's)
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        top = " " not in self.prog
        form = f"write `{self.prog} COMMAND [options]`, " if top else ""
        raise UsageError(message, hint=f"{form}see `{self.prog} --help`")


def _root(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: there is no such home folder") from error


_EPILOG = """\
in this order:
  llm-prefetch publish ./llama-3-8b s3://bucket/models/llama-3-8b    once, from where the files are
  llm-prefetch plan llama-3-8b.yaml                                  on the node: what would be fetched?
  llm-prefetch stage llama-3-8b.yaml                                 on the node: fetch, verify, go live
  llm-prefetch verify llama-3-8b                                     is it still right?

exit codes: 0 done, 1 the check says no, 2 usage or spec, 3 origin, network or cluster, 4 disk, 5 trust"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print data as JSON on stdout")
    stored = argparse.ArgumentParser(add_help=False)
    stored.add_argument(
        "--root",
        metavar="DIR",
        type=_root,
        help=f"root of the node store (else {settings.ROOT.name}, else {settings.ROOT.default})",
    )
    parser = _Parser(
        prog="llm-prefetch",
        description="Stage, verify and commit what an LLM replica needs on its node before it is scheduled.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"llm-prefetch {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    publishing.add_commands(commands, [common])
    staging.add_commands(commands, [common, stored])
    node.add_commands(commands, [common, stored])
    leftovers.add_commands(commands, [common, stored])
    timeline.add_commands(commands, [common, stored])
    doctor.add_commands(commands, [common, stored])
    capture.add_commands(commands, [common, stored])
    caches.add_commands(commands, [common, stored])
    return parser
