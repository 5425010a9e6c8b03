"""The rung `wait`: a staging of the deployment is in progress on this node, so let it finish."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from llm_prefetch.leases import staging_in_progress
from llm_prefetch.serve.ladder import Note
from llm_prefetch.store import NodeStore

_POLL_SECONDS = 0.5
_BLOCK = 512
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


async def wait_for_staging(
    store: NodeStore | None, deployment: str, note: Note, ready: Callable[[], bool]
) -> str:
    """Return when no staging is in progress on this node any more, or the node is ready; what happened."""
    if store is None or not staging_in_progress(store, deployment):
        return "no staging is in progress on this node"
    note.describe = Placed(store, f"another process stages {deployment} on this node")
    while staging_in_progress(store, deployment):
        if ready():  # it is live before its last byte is synced
            return "the staging has made the node ready"
        await asyncio.sleep(_POLL_SECONDS)
    return "the staging has ended"


class Placed:
    """Says how many bytes stagings in progress on this node have placed, and how many a second since it last said so."""

    def __init__(self, store: NodeStore, what: str) -> None:
        """`what` begins each line."""
        self._store, self._what = store, what
        self._last = (time.monotonic(), _placed(store))

    def __call__(self) -> str:
        """The line."""
        (then, before), (now, placed) = self._last, (time.monotonic(), _placed(self._store))
        self._last = (now, placed)
        rate = max(0, placed - before) / max(now - then, 1e-9)
        return f"{self._what}: {_size(placed)} are in work, {_size(rate)}/s"


def _placed(store: NodeStore) -> int:
    """Files in work are sparse: what is not placed yet has no blocks."""
    blocks = 0
    for folder, _, names in os.walk(store.root / "partial"):
        for name in names:
            try:
                blocks += os.lstat(os.path.join(folder, name)).st_blocks  # noqa: PTH118 (called for every file)
            except OSError:  # committed meanwhile
                continue
    return blocks * _BLOCK


def _size(count: float) -> str:
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} bytes"
