"""What the commands print: tables for people, JSON for programs, errors on one line."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from llm_prefetch.errors import PrefetchError

_RIGHT = frozenset({"files", "size", "fetch", "reuse", "evict", "free", "fetched", "reused", "seconds"})
_ENDLESS = 10_000
_DIGEST_CHARACTERS = 12


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    print(json.dumps(plain(value), indent=2))


def plain(value: object) -> object:
    """Dataclasses, errors and paths as what JSON knows."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, PrefetchError):
        return {"code": value.code, "message": value.message, "where": value.where, "hint": value.hint}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def print_error(error: PrefetchError, *, as_json: bool) -> None:
    """One line on stderr, and the error as data on stdout where data was asked for."""
    say_error(error)
    if as_json:
        print_json({"error": error})


def say_error(error: PrefetchError) -> None:
    """One line on stderr."""
    say(f"llm-prefetch: {error.code}: {' '.join(str(error).split())}")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on stdout; numbers are aligned to the right. Not wrapped where stdout is no terminal."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in _RIGHT else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _ENDLESS
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())


def say(line: str) -> None:
    """Talk."""
    print(line, file=sys.stderr, flush=True)


def short(identity: str) -> str:
    """A version or a bundle as people read it; programs get all of it."""
    prefix, dash, digest = identity.partition("-")
    return f"{prefix}{dash}{digest[:_DIGEST_CHARACTERS]}"
