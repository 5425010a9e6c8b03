"""What vLLM and Prefect make anew in every home, kept for this installation: it depends on nothing else.

It is found out by processes that take seconds of the processor each, and tests give every host and server a home of its own.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
from importlib.metadata import version
from pathlib import Path

_FOLDER = Path(sys.prefix) / "var" / "llm-prefetch-tests"


def share_model_infos(home: Path) -> None:
    """Let vLLM find in `home` what it knows of its models; it imports each one's module in a process to find it out."""
    shared, link = _FOLDER / "modelinfos", home / ".cache" / "vllm" / "modelinfos"
    shared.mkdir(parents=True, exist_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(shared)


def give_database(path: Path) -> bool:
    """Put an empty database of Prefect's at `path`, with all its migrations done, if there is one."""
    try:
        kept = _database().read_bytes()
    except FileNotFoundError:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(kept)
    return True


def keep_database(path: Path) -> None:
    """Keep the database of a server that has just started, and that nobody has told anything."""
    kept = _database()
    new = kept.with_suffix(f".{os.getpid()}.tmp")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with (
        contextlib.closing(sqlite3.connect(path)) as source,
        contextlib.closing(sqlite3.connect(new)) as target,
    ):
        source.backup(target)
    new.replace(kept)


def _database() -> Path:
    return _FOLDER / f"prefect-{version('prefect')}.db"
