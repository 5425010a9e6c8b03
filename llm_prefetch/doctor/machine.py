"""What one machine says of itself: its node store, its disk, its clock and its packages. Leaves nothing behind."""

from __future__ import annotations

import contextlib
import platform
import shutil
import socket
import tempfile
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from llm_prefetch.errors import PrefetchError
from llm_prefetch.store import NodeStore, open_store

PACKAGES = ("llm-prefetch", "ray", "vllm", "torch", "prefect", "pydantic", "obstore", "huggingface_hub")
_PARTS = ("artifacts", "partial", "bundles", "live")


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """One machine, as it is now."""

    host: str
    clock: float
    """Seconds since the epoch."""
    root: str
    """Absolute path of the node store."""
    store: bool
    """Whether there is a store."""
    trouble: str = ""
    """What keeps this user from staging there; empty when nothing does."""
    mend: str = ""
    file_system: str = ""
    """Type of the root's file system, as in /proc/mounts."""
    split: tuple[str, ...] = ()
    """Folders of the store that lie on another file system than its root."""
    free_bytes: int = 0
    total_bytes: int = 0
    python: str = field(default_factory=platform.python_version)
    packages: dict[str, str] = field(default_factory=dict)
    """Version by package, of those that are installed."""


def look(root: str | None) -> MachineFacts:
    """Look at the node store at `root` (or `LLM_PREFETCH_ROOT`) as the user of this process."""
    trouble = mend = ""
    try:
        store = open_store(Path(root) if root else None, missing_ok=True)
    except PrefetchError as error:
        where = error.where or root or ""
        store, trouble, mend = NodeStore(Path(where)), error.message, error.hint
    folder = _nearest(store.root)
    if not trouble:
        trouble, mend = _cannot_write(folder)
    disk = shutil.disk_usage(folder)
    return MachineFacts(
        host=socket.gethostname(),
        clock=time.time(),
        root=str(store.root),
        store=(store.root / "LAYOUT").exists(),
        trouble=trouble,
        mend=mend,
        file_system=_file_system(folder),
        split=_split(store.root),
        free_bytes=disk.free,
        total_bytes=disk.total,
        packages=_packages(),
    )


def _nearest(path: Path) -> Path:
    """The folder itself, or the one where it would be made."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _cannot_write(folder: Path) -> tuple[str, str]:
    """Whether a file can be made, renamed and linked there, by doing it."""
    try:
        with tempfile.TemporaryDirectory(prefix=".llm-prefetch-doctor-", dir=folder) as inside:
            first, second = Path(inside, "a"), Path(inside, "b")
            first.write_bytes(b"x")
            first.rename(second)
            first.hardlink_to(second)
            Path(inside, "link").symlink_to("b")
    except OSError as error:
        what = error.strerror or str(error)
        return f"cannot write there: {what}", "give the user of Ray write access to the root, on a local disk"
    return "", ""


def _file_system(folder: Path) -> str:
    """The type of the mount that holds `folder`."""
    best, kind = "", ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text("utf-8", errors="replace").splitlines():
            _, mount, found, *_ = line.split(" ")
            mount = mount.encode().decode("unicode_escape")
            inside = str(folder) == mount or str(folder).startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, found
    return kind


def _split(root: Path) -> tuple[str, ...]:
    """Commits are renames, so all folders must lie on one file system."""
    try:
        device = root.stat().st_dev
    except OSError:
        return ()
    found = []
    for part in _PARTS:
        with contextlib.suppress(OSError):
            if (root / part).stat().st_dev != device:
                found.append(part)
    return tuple(found)


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
