"""The command line: data on stdout, talk on stderr, one line for every error, and an exit code that says why.

0 done; 1 the check says no; 2 bad usage or spec; 3 origin, network or cluster; 4 disk; 5 trust
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from llm_prefetch import __version__, settings
from llm_prefetch.cli import node, publishing, staging
from llm_prefetch.cli.display import print_error
from llm_prefetch.errors import DiskError, PrefetchError, UsageError, disk_error

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options: argparse.Namespace | None = None
    try:
        options = _parser().parse_args(arguments)
        code: int = options.run(options)
    except PrefetchError as error:
        print_error(error, as_json=options is not None and options.json)
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except OSError as error:
        print_error(
            disk_error(error, str(error.filename or "")), as_json=options is not None and options.json
        )
        return DiskError.exit_code
    except KeyboardInterrupt:
        print("llm-prefetch: interrupted; run the same again, what is done is kept", file=sys.stderr)
        return _INTERRUPTED
    return code


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing its usage, so that a slip gets one line too."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"see `{self.prog} --help`")


def _absolute(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print data as JSON on stdout")
    stored = argparse.ArgumentParser(add_help=False)
    stored.add_argument(
        "--root",
        metavar="DIR",
        type=_absolute,
        help=f"root of the node store (else {settings.ROOT.name}, else {settings.ROOT.default})",
    )
    parser = _Parser(
        prog="llm-prefetch",
        description="Stage, verify and commit what an LLM replica needs on its node before it is scheduled.",
        epilog="Exit codes: 0 done, 1 the check says no, 2 usage or spec, 3 origin or network, 4 disk, 5 trust.",
    )
    parser.add_argument("--version", action="version", version=f"llm-prefetch {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    publishing.add_commands(commands, [common])
    staging.add_commands(commands, [common, stored])
    node.add_commands(commands, [common, stored])
    return parser
