"""Room on the disk: a staging that does not fit deletes leftovers, oldest first, and no more than it needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

from llm_prefetch import settings
from llm_prefetch.errors import NoSpaceError
from llm_prefetch.leftovers import BLOCK_BYTES, Leftover, Version, delete, files_below, kept, leftovers
from llm_prefetch.plan import Plan, free_bytes
from llm_prefetch.stop import Stop
from llm_prefetch.store import NodeStore, locked

_RESERVE_BYTES = 64 * 2**20
"""For journals, records and the ledger; of a small staging, a hundredth."""


def make_room(
    store: NodeStore,
    plan: Plan,
    *,
    allowed: bool,
    say: Callable[[str], None],
    stop: Stop,
    free: Callable[[Path], int] = free_bytes,
) -> list[Leftover]:
    """Have as much free as `plan` takes, by deleting leftovers. Returns what went.

    What the plan itself takes bytes from stays. Where even all leftovers are too few, none is deleted.

    Args:
        store: Where.
        plan: Of one artifact.
        allowed: Whether anything may be deleted at all.
        say: Told of each deletion.
        stop: Ends the wait for another staging that makes room.
        free: How many bytes the disk below a folder has left.

    Raises:
        NoSpaceError: it does not fit; the hint says what holds the bytes.
        OSError: the disk refused.
    """
    name, need, gone = plan.source.artifact.name, plan.space_bytes, list[Leftover]()
    if free(store.root) >= need:
        return gone
    if not allowed:
        raise _no_space(store, plan, free(store.root), " (policy.make_room is off)")
    waiting, patience = "another staging that makes room", settings.LOCK_SECONDS.get()
    with locked(store.lock("room"), seconds=patience, waiting_for=waiting, stop=stop):
        found = leftovers(store, spare=drawn_on(store, plan))
        if free(store.root) + sum(one.bytes for one in found) < need:
            found = []
        for one in found:
            if free(store.root) >= need + _reserve(need):
                break
            stop.raise_if_set()
            if delete(store, one, why=f"room for {name}"):
                say(f"deleted {one.label} ({one.bytes} bytes) to make room for {name}")
                gone.append(one)
    if free(store.root) < need:
        raise _no_space(store, plan, free(store.root))
    return gone


def missing_bytes(need: int, free: int) -> int:
    """How many bytes are to be made free before a staging that takes `need`; 0 where it fits."""
    return 0 if free >= need else need + _reserve(need) - free


def enough(found: Collection[Leftover], missing: int) -> list[Leftover]:
    """The first of `found` that together set `missing` bytes free; all of them where that is not enough."""
    chosen, sum_bytes = list[Leftover](), 0
    for one in found:
        if sum_bytes >= missing:
            break
        chosen.append(one)
        sum_bytes += one.bytes
    return chosen


def drawn_on(store: NodeStore, plan: Plan) -> set[Version]:
    """The committed versions that `plan` takes bytes from."""
    artifacts = store.root / "artifacts"
    paths = {path for path, _ in plan.held.chunks.values()}
    return {(name, version) for name, version, *_ in (path.relative_to(artifacts).parts for path in paths)}


def _reserve(need: int) -> int:
    return min(_RESERVE_BYTES, need // 100)


def _no_space(store: NodeStore, plan: Plan, free: int, why: str = "") -> NoSpaceError:
    holders = [f"{count} by {reason}" for reason, count in _holders(store).items() if count]
    held = f"; this store holds {', '.join(holders)}" if holders else ""
    return NoSpaceError(
        f"{plan.source.artifact.name!r} needs {plan.space_bytes} bytes, {free} are free{why}",
        where=str(store.root),
        hint=f"free at least {plan.space_bytes - free + _RESERVE_BYTES} bytes on this disk, then stage again{held}",
    )


def _holders(store: NodeStore) -> dict[str, int]:
    """Bytes of the store by what holds them, in words; a linked file counts once."""
    reasons, sums, seen = kept(store), Counter[str](), set[tuple[int, int]]()
    versions = [path for path in store.root.glob("artifacts/*/b3-*") if path.is_dir()]
    folders = [(reasons.get((path.parent.name, path.name), "other versions"), path) for path in versions]
    folders += [("unfinished work", path) for path in store.root.glob("partial/*")]
    folders += [("what was set aside", path) for path in store.root.glob("quarantine/*")]
    for reason, path in sorted(folders):
        for found in files_below(path):
            if (found.st_dev, found.st_ino) not in seen:
                seen.add((found.st_dev, found.st_ino))
                sums[reason] += found.st_blocks * BLOCK_BYTES
    return dict(sums)
