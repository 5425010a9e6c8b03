"""Whether an engine found what a compile cache holds: decided from what its start wrote, never from what was staged.

vLLM 0.29 keeps one folder for each key, `torch_compile_cache/torch_aot_compile/<key>`: the compiled graph of each rank
(`rank_<rank>_<dp>/model`) and the kernels that it is made of (`inductor_cache`). A key that no one has met before gets a
new folder, without a word in the log. So there are three things to look at: the folders before and after, the files
that this start added, and vLLM's log lines.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

GRAPHS = "torch_compile_cache/torch_aot_compile"
"""Below `VLLM_CACHE_ROOT`: a folder for each key."""
PIECES = "torch_compile_cache"
"""The folders of the piecewise backend are beside it: one of ten hexadecimal digits for each of its keys."""
KERNELS = "inductor_cache"
_COMPILED = (".so", ".cubin", ".hsaco")
"""What a kernel is in the end: on CPUs, and by Triton on GPUs. A warm start adds a few small notes beside them."""

_LOADED = "Directly load AOT compilation from path "
_REFUSED = "Compiling model again due to a load failure from "
_SAVED = "saved AOT compiled function to "
_UNSAVED = "unable to save AOT compiled function to "
_COMPILE = "torch.compile took "
_INIT = "init engine (profile, create kv cache, warmup model) took "
LINES = (_LOADED, _REFUSED, _SAVED, _UNSAVED, _COMPILE, _INIT)
"""The log lines that tell of the cache; tags of later versions stand in front of them, so look anywhere in a line."""

_KEY = re.compile(r"/torch_aot_compile/([^/\s]+)/rank_")
_SECONDS = re.compile(r"took ([\d.]+) s")
_COMPILATION = re.compile(r"compilation: ([\d.]+) s")
_PIECES_KEY = re.compile(r"[0-9a-f]{10}")
_KEY_CHARACTERS = 10
_REASON_CHARACTERS = 200


class Outcome(StrEnum):
    """What a start had of the cache that it found."""

    HIT = "hit"
    """Every compiled graph was loaded; nothing was compiled."""
    PARTIAL = "partial"
    """The key was there, but something was compiled again: see the reason and the number of new kernels."""
    MISS = "miss"
    """There was a cache, and none of it had this start's key: the engine compiled all of it."""
    NONE = "none"
    """There was no cache to find, or the engine compiles nothing."""


@dataclass(frozen=True, slots=True)
class Before:
    """What lay in the cache when a start began."""

    root: Path
    at: float
    keys: frozenset[str]
    pieces: frozenset[str]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a start had of its cache, and the facts that decided."""

    outcome: Outcome
    reason: str
    keys: tuple[str, ...] = ()
    """The keys that this start asked for."""
    new_keys: tuple[str, ...] = ()
    """Those among them that were not there before."""
    loaded: int = 0
    """Compiled graphs that were loaded: one for each rank and each part of the model."""
    compiled: int = 0
    """Compiled graphs that were made and saved."""
    kernels: int = 0
    """Kernels that were there before, in the folders of its keys."""
    new_kernels: int = 0
    """Kernels that this start added there."""
    compile_seconds: float | None = None
    """What vLLM says that torch.compile took; it says nothing on CPUs."""
    init_seconds: float | None = None
    """What vLLM says that the engine's initialization took, of which compiling is a part."""

    @property
    def used(self) -> bool:
        """Whether the engine made no kernel that the cache should have held."""
        return self.outcome is Outcome.HIT or (self.outcome is Outcome.PARTIAL and self.new_kernels == 0)

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def look(root: Path) -> Before:
    """What lies in the cache at `root` now; microseconds, as only names are read."""
    return Before(root, time.time(), frozenset(_names(root / GRAPHS)), frozenset(_pieces(root)))


def judge(before: Before, lines: Iterable[str], *, staged: Collection[str] | None = None) -> Evidence:
    """What became of the start that began with `before`.

    Args:
        before: Of the cache root that the engine was given.
        lines: Of this start's log, those that hold one of `LINES`; others do no harm.
        staged: The keys of the cache that was staged for this start, none of them if it was not given to the engine;
            `None` where none was staged.
    """
    told = _Told()
    for line in lines:
        told.take(line)
    keys = told.keys = told.keys or _touched(before)
    new = {key for key in keys if key not in before.keys}
    facts: dict[str, Any] = {
        "keys": tuple(sorted(keys)),
        "new_keys": tuple(sorted(new)),
        "loaded": told.loaded,
        "compiled": told.saved,
        "compile_seconds": told.compile_seconds,
        "init_seconds": told.init_seconds,
    }
    facts["kernels"], facts["new_kernels"] = _kernels(before, keys)
    outcome, reason = _decide(before, told, new, facts["new_kernels"], staged)
    return Evidence(outcome, reason[:_REASON_CHARACTERS], **facts)


def _decide(
    before: Before, told: _Told, new: set[str], new_kernels: int, staged: Collection[str] | None
) -> tuple[Outcome, str]:
    again = told.saved or told.refused or told.unsaved
    if not told.keys:
        return Outcome.NONE, "nothing was compiled, and no log line speaks of a cache"
    if staged is not None and told.keys.isdisjoint(staged):
        return Outcome.MISS, _missed(told.keys, staged, known=not new)
    if told.loaded and not again:
        return Outcome.HIT, f"{_count(told.loaded, 'compiled graph')} loaded, nothing compiled"
    if new == told.keys and not told.loaded:
        if before.keys:
            return (
                Outcome.MISS,
                f"the engine's key is {_short(told.keys)}; the cache has {_short(before.keys)}",
            )
        return Outcome.NONE, "the cache was empty; the engine compiled for itself"
    made = _count(new_kernels, "new kernel") if new_kernels else "all kernels were there"
    why = f": {told.refused[0]}" if told.refused else ""
    if not told.loaded:
        return Outcome.PARTIAL, f"the graph was compiled again, {made}{why}"
    graphs = told.loaded + max(told.saved, len(told.refused), 1)
    return Outcome.PARTIAL, f"{told.loaded} of {graphs} graphs were loaded, {made}{why}"


def _missed(keys: Collection[str], staged: Collection[str], *, known: bool) -> str:
    """A key that an earlier start on this node has compiled for is warm here, and cold on every other node."""
    if not staged:
        return "the staged cache was not given to the engine"
    here = "; an earlier start on this node has compiled for that key" if known else ""
    return f"the engine's key is {_short(keys)}; the staged cache has {_short(staged)}{here}"


@dataclass(slots=True)
class _Told:
    """What the log says."""

    keys: set[str] = field(default_factory=set)
    loaded: int = 0
    saved: int = 0
    unsaved: int = 0
    refused: list[str] = field(default_factory=list)
    compile_seconds: float | None = None
    init_seconds: float | None = None

    def take(self, line: str) -> None:
        if found := _KEY.search(line):
            self.keys.add(found[1])
        if _LOADED in line:
            self.loaded += 1
        elif _REFUSED in line:
            self.refused.append(line.partition(", reason: ")[2].strip() or "vLLM gives no reason")
        elif _SAVED in line:
            self.saved += 1
        elif _UNSAVED in line:
            self.unsaved += 1
        elif _COMPILE in line and (found := _SECONDS.search(line)):
            self.compile_seconds = max(self.compile_seconds or 0.0, float(found[1]))
        elif _INIT in line and (found := _SECONDS.search(line)):
            self.init_seconds = float(found[1])
            if found := _COMPILATION.search(line):
                self.compile_seconds = max(self.compile_seconds or 0.0, float(found[1]))


def _touched(before: Before) -> set[str]:
    """Where no log can be read: the keys that are new, or into whose folder something was written."""
    return {
        key
        for key in _names(before.root / GRAPHS)
        if key not in before.keys
        or any(_is_new(entry, before) for entry in _files(before.root / GRAPHS / key))
    }


def _kernels(before: Before, keys: set[str]) -> tuple[int, int]:
    """Kernels in the folders of `keys`: those from before, and those that this start added."""
    old = new = 0
    for key in keys:
        for entry in _files(before.root / GRAPHS / key / KERNELS):
            if not entry.name.endswith(_COMPILED):
                continue
            if _is_new(entry, before):
                new += 1
            else:
                old += 1
    return old, new


def _is_new(entry: os.DirEntry[str], before: Before) -> bool:
    try:
        return entry.stat(follow_symlinks=False).st_mtime > before.at
    except OSError:
        return False


def _files(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _files(Path(entry.path))
                else:
                    yield entry
    except OSError:
        return


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 (names are enough)
    except OSError:
        return []


def _pieces(root: Path) -> Iterator[str]:
    return (name for name in _names(root / PIECES) if _PIECES_KEY.fullmatch(name))


def _short(keys: Iterable[str]) -> str:
    return ", ".join(sorted(key[:_KEY_CHARACTERS] for key in keys))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
