"""From what an engine's start left behind to a folder that can be published.

The cache root was the capture's own, so all of it is this start's. Values of the environment stay on the node.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llm_prefetch.caches.factors import OURS_FILE, VLLMS_FILE, read_factors
from llm_prefetch.caches.places import ELSEWHERE, INSIDE
from llm_prefetch.errors import UnsafePathError, UsageError

_LEFT_OUT = (".lock", ".tmp")


@dataclass(frozen=True, slots=True)
class Harvest:
    """What was taken, by family: the number of files and their bytes."""

    folder: Path
    families: Mapping[str, tuple[int, int]]


def harvest(root: Path, target: Path) -> Harvest:
    """Put what a start has left into the new folder `target`, as it is to be published.

    Args:
        root: The `VLLM_CACHE_ROOT` that it had for itself.
        target: On the same disk as `root`, best: then nothing is copied.

    Raises:
        UnsafePathError: there is a symbolic link, or something that is no file.
        UsageError: the engine has compiled nothing.
        OSError: the disk refused.
    """
    families: dict[str, tuple[int, int]] = {}
    for name, place in {**{name: name for name in INSIDE}, **ELSEWHERE}.items():
        count = size = 0
        for path in _wanted(root / place):
            _take(path, target / name / path.relative_to(root / place))
            count, size = count + 1, size + path.stat().st_size
        if count:
            families[name] = (count, size)
    if INSIDE[0] not in families:
        raise UsageError(
            "the engine has compiled nothing",
            where=str(root),
            hint="with enforce_eager: true, or with compilation off, there is no cache to capture",
        )
    (target / OURS_FILE).write_text(json.dumps(read_factors(root), indent=1, sort_keys=True), "utf-8")
    return Harvest(target, families)


def _take(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, target)
    except OSError:  # another file system, or a file of another user
        shutil.copyfile(path, target)


def _wanted(folder: Path) -> Iterator[Path]:
    """All files but locks, leftovers and the list with the values of the environment.

    Raises:
        UnsafePathError: one of them is a link or no file.
    """
    for top, folders, names in os.walk(folder):
        for name in sorted([*names, *(name for name in folders if Path(top, name).is_symlink())]):
            path = Path(top, name)
            if name == VLLMS_FILE or name.endswith(_LEFT_OUT):
                continue
            if not stat.S_ISREG(path.lstat().st_mode):
                raise UnsafePathError(
                    f"{path.relative_to(folder)} is a link or no regular file",
                    where=str(folder),
                    hint="a cache is published without such; capture again into an empty folder",
                )
            yield path
