"""Links: an artifact under a path of the user's choice, for engines and tools that look in one fixed place.

What Ray's `CloudDownloader` does with `paths: [(uri, local)]`, an artifact does with `link: local`. The link leads
to the engine path, so it stays the same when the version changes, and switches with the deployment.
"""

from __future__ import annotations

from pathlib import Path

from llm_prefetch.errors import DiskError, disk_error
from llm_prefetch.store import NodeStore, write_link


def check_link(store: NodeStore, link: Path) -> None:
    """Pass if `link` is free, or is a link into this store.

    Raises:
        DiskError: something else is there.
    """
    try:
        ours = link.is_symlink() and link.readlink().is_relative_to(store.root / "live")
        taken = link.is_symlink() or link.exists()
    except OSError as error:
        raise disk_error(error, str(link)) from error
    if taken and not ours:
        raise DiskError(
            "something else is in the way of the link",
            where=str(link),
            hint="move it away, or choose another link",
        )


def place_link(store: NodeStore, deployment: str, name: str, link: Path) -> None:
    """Make `link` lead to the engine path of an artifact; folders above it are made.

    Raises:
        DiskError: something else is there, or the disk refused.
    """
    check_link(store, link)
    target = store.engine_path(deployment, name)
    try:
        if link.is_symlink() and link.readlink() == target:
            return
        link.parent.mkdir(parents=True, exist_ok=True)
        write_link(link, str(target))
    except OSError as error:
        raise disk_error(error, str(link)) from error
