"""Links: an artifact under a path of the user's choice, for engines and tools that look in one fixed place.

What Ray's `CloudDownloader` does with `paths: [(uri, local)]`, an artifact does with `link: local`. The link leads
to the engine path, so it stays the same when the version changes, and switches with the deployment.
"""

from __future__ import annotations

import os
from pathlib import Path

from llm_prefetch.errors import DiskError, disk_error
from llm_prefetch.spec import Artifact, Spec
from llm_prefetch.store import NodeStore, write_link


def check_link(store: NodeStore, spec: Spec, artifact: Artifact) -> None:
    """Pass if the link of `artifact` is free, its own already, or a link of ours to what is live no more.

    So a link goes over to an artifact that takes the place of another one in `spec`, because the old one is not live
    after the switch. It never goes over from one that stays, be it in the same spec: somebody looks there.

    Raises:
        DiskError: something else is there, or the link of another artifact.
    """
    link = Path(artifact.link or "")
    try:
        taken = os.path.lexists(link)
        target = link.readlink() if link.is_symlink() else None
    except OSError as error:
        raise disk_error(error, str(link)) from error
    if not taken:
        return
    if target is None or not target.is_relative_to(store.root / "live"):
        raise DiskError(
            "something else is in the way of the link",
            where=str(link),
            hint="move it away, or choose another link",
        )
    if target != store.engine_path(spec.deployment, artifact.name) and _stays(store, spec, target):
        raise DiskError(
            f"it is the link of {target.relative_to(store.root)}",
            where=str(link),
            hint="choose another link, or remove that one",
        )


def place_link(store: NodeStore, spec: Spec, artifact: Artifact) -> None:
    """Make the link of `artifact` lead to its engine path; folders above it are made.

    Raises:
        DiskError: something else is there, or the disk refused.
    """
    check_link(store, spec, artifact)
    link, target = Path(artifact.link or ""), store.engine_path(spec.deployment, artifact.name)
    try:
        if link.is_symlink() and link.readlink() == target:
            return
        link.parent.mkdir(parents=True, exist_ok=True)
        write_link(link, str(target))
    except OSError as error:
        raise disk_error(error, str(link)) from error


def _stays(store: NodeStore, spec: Spec, target: Path) -> bool:
    """Whether this engine path is there after the switch to `spec`, even while the files behind it are mended."""
    replaced = target.parent == store.live(spec.deployment) and target.name not in {
        artifact.name for artifact in spec.artifacts
    }
    return not replaced and os.path.lexists(target)
