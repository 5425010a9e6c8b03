"""The cache root of a deployment while a capture has it for itself: what was there is set aside until that has ended.

What an engine compiles may hold the path of its cache root, so a capture needs that very folder, and it publishes all
that lies there. A mark keeps away whoever would put a staged cache there meanwhile.

    <root>/caches/<deployment>/.capture         the mark: until when, by the wall clock, the capture has the folder
    <root>/caches/.<deployment>.aside           what was there

Whoever calls this holds the lock of installations.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from llm_prefetch.manifest import canonical_json
from llm_prefetch.store import read_json, write_file

_MARK = ".capture"


def set_aside(root: Path, seconds: float) -> None:
    """Empty a cache root for a capture, which has it for so many seconds.

    Raises:
        OSError: the disk refused.
    """
    put_back(root)
    empty = _captured(root)
    empty.mkdir(mode=0o700, parents=True)
    prolong(empty, seconds)
    if root.exists():
        shutil.rmtree(_aside(root), ignore_errors=True)
        root.rename(_aside(root))
    empty.rename(root)


def prolong(root: Path, seconds: float) -> None:
    """Let the capture have the folder for so many seconds from now.

    Raises:
        OSError: the disk refused.
    """
    write_file(root / _MARK, canonical_json({"until": time.time() + seconds}))


def captured_until(root: Path) -> float | None:
    """Until when a capture has a cache root, by the wall clock; `None` if none has it."""
    if not (root / _MARK).exists():
        return None
    found = read_json(root / _MARK)
    until = found.get("until") if isinstance(found, dict) else None
    return float(until) if isinstance(until, int | float) else 0.0


def put_back(root: Path) -> None:
    """End a capture, also one that was killed at any step: its folder goes. Harmless where none was.

    Raises:
        OSError: the disk refused.
    """
    shutil.rmtree(_captured(root), ignore_errors=True)
    if captured_until(root) is not None:
        root.rename(_captured(root))
    if _aside(root).exists() and not root.exists():
        _aside(root).rename(root)
    shutil.rmtree(_captured(root), ignore_errors=True)


def _aside(root: Path) -> Path:
    return root.with_name(f".{root.name}.aside")


def _captured(root: Path) -> Path:
    """On its way to being a capture's own, or to being deleted."""
    return root.with_name(f".{root.name}.captured")
