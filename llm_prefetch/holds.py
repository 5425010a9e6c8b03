"""Holds: what a rollback decided on a node, so that nothing that runs by itself undoes it.

`holds/<deployment>/<bundle>.json` says that a rollback went back to `bundle`, and which bundles it left. It counts
while that bundle is the live one; then no staging switches to a bundle that was left, and `reconcile` keeps the one
that was gone back to. Staging any other bundle ends it, and so does going forward to the one that was left first.
"""

from __future__ import annotations

import getpass
import shutil
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from llm_prefetch.manifest import canonical_json
from llm_prefetch.store import NodeStore, read_json, write_file


@dataclass(frozen=True, slots=True)
class Hold:
    """A rollback that is in force."""

    bundle: str
    """What was gone back to."""
    left: tuple[str, ...]
    """What was gone back from, the newest first."""
    at: float
    by: str
    why: str = ""

    def __str__(self) -> str:
        """For a person."""
        day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.at))
        return f"rolled back on {day} by {self.by}{f': {self.why}' if self.why else ''}"


def read_hold(store: NodeStore, deployment: str, live: str | None) -> Hold | None:
    """The hold on `live`, the bundle that is live, if a rollback put one there."""
    body = read_json(_path(store, deployment, live)) if live else None
    if not isinstance(body, dict):
        return None
    try:
        hold = Hold(**{**body, "at": float(body["at"]), "left": tuple(body["left"])})
    except (TypeError, KeyError, ValueError):
        return None
    return hold if hold.left and hold.bundle == live else None


def next_hold(
    store: NodeStore, deployment: str, live: str, target: str, *, by: str = "", why: str = ""
) -> Hold:
    """The hold of a rollback from `live` to `target`; it holds nothing if that goes all the way forward again."""
    before = read_hold(store, deployment, live)
    left = before.left if before else ()
    if target in left:
        left = left[: left.index(target)]
    elif target != live:
        left = (*left, live)
    return Hold(target, left, round(time.time(), 3), by or somebody(), why)


def write_hold(store: NodeStore, deployment: str, hold: Hold) -> None:
    """Put it into force, as soon as its bundle is live.

    Raises:
        OSError: the disk refused.
    """
    path = _path(store, deployment, hold.bundle)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, canonical_json(asdict(hold)))


def lift(store: NodeStore, deployment: str) -> None:
    """End every hold on a deployment."""
    shutil.rmtree(_folder(store, deployment), ignore_errors=True)


def somebody() -> str:
    """The user and the host of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in many containers
        user = "somebody"
    return f"{user}@{socket.gethostname()}"


def _folder(store: NodeStore, deployment: str) -> Path:
    return store.root / "holds" / deployment


def _path(store: NodeStore, deployment: str, bundle: str) -> Path:
    return _folder(store, deployment) / f"{bundle}.json"
