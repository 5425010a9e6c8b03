"""Every `LLM_PREFETCH_*` environment variable, with its type, default and meaning.

A leaf module: the environment is read on access, so that a test or a Ray runtime environment can change a
value at any time. A value that cannot be read falls back to its default with a warning, because a typing
slip must never stop a replica.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """One environment variable."""

    name: str
    default: str
    parse: Callable[[str], T]
    doc: str

    def get(self) -> T:
        """The value in force."""
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.parse(self.default)
        try:
            return self.parse(text)
        except ValueError as error:
            _log.warning("%s=%r is ignored (%s); using %s", self.name, text, error, self.default)
            return self.parse(self.default)


def _absolute_path(text: str) -> Path:
    # Not Path.expanduser, which raises a RuntimeError for a user without a home, as in many containers.
    path = Path(os.path.expanduser(text))  # noqa: PTH111
    if not path.is_absolute():
        raise ValueError(f"{text!r} is not an absolute path")
    return path


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("not a positive number")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError("not a number of seconds")
    return value


def _some_seconds(text: str) -> float:
    value = _seconds(text)
    if not value:
        raise ValueError("not more than 0 seconds")
    return value


def _yes_or_no(text: str) -> int:
    if text not in ("0", "1"):
        raise ValueError("neither 0 nor 1")
    return int(text)


ROOT = Setting(
    "LLM_PREFETCH_ROOT",
    "~/.cache/llm-prefetch",
    _absolute_path,
    "Root of the node store: one absolute path on a fast local disk, the same on every node.",
)
CONCURRENCY = Setting(
    "LLM_PREFETCH_CONCURRENCY",
    "64",
    _positive_int,
    "Most ranges in flight on one node; it starts with 4 and adds more while that brings more bytes.",
)
STALL_SECONDS = Setting(
    "LLM_PREFETCH_STALL_SECONDS",
    "30",
    _some_seconds,
    "A range that delivers less than 256 KiB in so long is given up and tried again.",
)
ATTEMPTS = Setting("LLM_PREFETCH_ATTEMPTS", "8", _positive_int, "Tries per range before a staging fails.")
LOCK_SECONDS = Setting(
    "LLM_PREFETCH_LOCK_SECONDS",
    "3600",
    _seconds,
    "How long a staging waits for another one of the same version.",
)
SWITCH_SECONDS = Setting(
    "LLM_PREFETCH_SWITCH_SECONDS",
    "900",
    _seconds,
    "How long a switch of `live/` waits for replicas that are starting.",
)
ALLOW_HTTP = Setting(
    "LLM_PREFETCH_ALLOW_HTTP",
    "0",
    _yes_or_no,
    "1: read `http://` origins from other hosts than this one, though anybody on the way can change the bytes.",
)

ALL: tuple[Setting[Path] | Setting[int] | Setting[float], ...] = (
    ROOT,
    CONCURRENCY,
    STALL_SECONDS,
    ATTEMPTS,
    LOCK_SECONDS,
    SWITCH_SECONDS,
    ALLOW_HTTP,
)
