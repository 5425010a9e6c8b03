"""From the pristine copy of a compile cache, read-only in the store, to where engines of this node read and write.

    <root>/caches/<deployment>/                         `VLLM_CACHE_ROOT` of the deployment's replicas
      torch_compile_cache/torch_aot_compile/<key>/...   what was staged, and what engines add
      .llm-prefetch/<version>.json                      what was installed, written last

Engines write here, so it is a copy and not a link, and whoever looks finds all of a folder or nothing: it is filled
beside its place, its bytes checked against the manifest on their way, and renamed. A folder that is there already is
an engine's and stays as it is. The place is a function of names alone, the same on every node: caches may hold it.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from llm_prefetch import settings
from llm_prefetch.caches.aside import captured_until, put_back
from llm_prefetch.caches.places import ELSEWHERE, INSIDE
from llm_prefetch.errors import DigestError, NotReadyError, TrustError, disk_error
from llm_prefetch.leases import running
from llm_prefetch.manifest import FOLDER, FileEntry, Manifest, canonical_json, parse_manifest
from llm_prefetch.store import NodeStore, locked, read_json, write_file

HEADERS_VARIABLE = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"
"""Whether Inductor's kernels for CPUs share precompiled headers. They lie in `/tmp`, and are made before Inductor looks
whether a kernel is there: on a node without them a start with a warm cache takes seconds longer."""
_DEPTHS = {
    "torch_compile_cache/torch_aot_compile": 3,
    "torch_compile_cache": 2,
    "flashinfer_autotune_cache": 4,
    "deep_gemm": 3,
    ".triton": 3,
    ".cache": 4,
}
"""Components of the path of what is complete by itself; else it is the file."""


@dataclass(frozen=True, slots=True)
class Installed:
    """What an installation did: what it put there, and what was there already, by path below the cache root."""

    added: tuple[str, ...]
    kept: tuple[str, ...]
    seconds: float


def cache_root(store: NodeStore, deployment: str) -> Path:
    """`VLLM_CACHE_ROOT` of the replicas of a deployment."""
    return store.root / "caches" / deployment


def install_lock(store: NodeStore, deployment: str) -> Path:
    """Whoever changes what lies in the cache root holds it; engines, which only add to it, do not."""
    return store.lock(f"install-{deployment}")


def cache_environment(root: Path, platform: str | None = None) -> dict[str, str]:
    """What makes an engine keep all it compiles below `root`; the same where it is captured and where it is used.

    Args:
        root: The cache root.
        platform: That of the engine, as its identity says.
    """
    found = {
        "VLLM_CACHE_ROOT": str(root),
        "TRITON_HOME": str(root),
        "FLASHINFER_WORKSPACE_BASE": str(root),
    }
    return {**found, HEADERS_VARIABLE: "0"} if platform == "cpu" else found


def install(
    store: NodeStore, deployment: str, name: str, version: str, *, seconds: float | None = None
) -> Installed:
    """Put a committed version where replicas of `deployment` read; nothing is done twice.

    Args:
        store: Where it lies.
        deployment: Whose replicas.
        name: Of the artifact.
        version: Of the artifact.
        seconds: How long to wait for another installation; else `LLM_PREFETCH_LOCK_SECONDS`.

    Raises:
        DigestError: the files of the version are not what its manifest says.
        TrustError: others may write to where engines would read.
        NotReadyError: what lies there is damaged or another version's, and a replica runs with it; or it is a capture's.
        ManifestError: the manifest cannot be read.
        LockTimeoutError: another installation did not end.
        DiskError: the disk refused.
    """
    began, root = time.monotonic(), cache_root(store, deployment)
    manifest = committed_manifest(store, name, version)
    added: list[str] = []
    waiting = f"another installation of {name}"
    patience = settings.LOCK_SECONDS.get() if seconds is None else seconds
    try:
        with locked(install_lock(store, deployment), seconds=patience, waiting_for=waiting):
            _end_capture(store, deployment)
            (store.root / "caches").mkdir(exist_ok=True)
            for folder in (root, root / FOLDER):
                folder.mkdir(mode=0o700, exist_ok=True)
                check_own(folder)
            for left in (root / FOLDER).glob("building-*"):  # of one that was killed
                shutil.rmtree(left, ignore_errors=True)
            units = _units(manifest)
            for stale in _stale(store, deployment, version, units):
                _discard(store, deployment, stale)
            for unit, files in units.items():
                if not os.path.lexists(root / unit):
                    _add(store.artifact(name, version), root, unit, files, manifest.chunk_bytes)
                    added.append(unit)
            _write_receipt(root, version, units)
    except OSError as error:
        raise disk_error(error, str(root)) from error
    kept = tuple(unit for unit in units if unit not in added)
    return Installed(tuple(added), kept, time.monotonic() - began)


def discard(store: NodeStore, deployment: str, version: str) -> None:
    """Take the installed copy of a version away, so that the next start gets a new one.

    Raises:
        NotReadyError: a replica of the deployment runs on this node, or it is being captured.
        DiskError: the disk refused.
    """
    waiting, patience = "an installation", settings.LOCK_SECONDS.get()
    try:
        with locked(install_lock(store, deployment), seconds=patience, waiting_for=waiting):
            _end_capture(store, deployment)
            if (cache_root(store, deployment) / FOLDER / f"{version}.json").exists():
                _discard(store, deployment, version)
    except OSError as error:
        raise disk_error(error, str(cache_root(store, deployment))) from error


def check_installed(store: NodeStore, deployment: str, version: str) -> str:
    """Why a version has to be installed (again); empty if it lies there. One `lstat` for each file.

    An engine may have written a file anew; one that is gone, or shorter than it was, nobody meant to be so.
    """
    root = cache_root(store, deployment)
    receipt = read_json(root / FOLDER / f"{version}.json")
    if not isinstance(receipt, dict):
        return "not installed"
    for path, (inode, size) in receipt.items():
        try:
            found = os.lstat(f"{root}/{path}")
        except OSError:
            return f"{path!r} is gone"
        if found.st_ino == inode and found.st_size < size:
            return f"{path!r} was cut"
    return ""


def check_own(folder: Path) -> None:
    """Check that nobody but this user can have put something into a folder that engines load code from.

    Raises:
        TrustError: somebody can.
        OSError: it cannot be looked at.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise TrustError(
            "others may write to it, or it is another user's; a compile cache is code",
            where=str(folder),
            hint="remove it, and stage as the user that replicas run as",
        )


def committed_manifest(store: NodeStore, name: str, version: str) -> Manifest:
    """What a version was committed with.

    Raises:
        ManifestError: it is not a manifest.
        DigestError: it is another one.
        DiskError: it is not there.
    """
    path = store.manifest(name, version)
    try:
        found = parse_manifest(path.read_bytes(), str(path))
    except OSError as error:
        raise disk_error(error, str(path)) from error
    if found.version != version:
        raise DigestError(
            f"the manifest of {name} is that of {found.version}", where=str(path), hint="stage it again"
        )
    return found


def set_environment(target: MutableMapping[str, str], values: Mapping[str, str]) -> None:
    """Set what leads to the cache; what a user has set of the rest stays, as where the cache was captured."""
    for name, value in values.items():
        if name == HEADERS_VARIABLE:
            target.setdefault(name, value)
        else:
            target[name] = value


def _units(manifest: Manifest) -> dict[str, list[tuple[str, FileEntry]]]:
    """What is renamed as one, by its path, and the files in it with theirs; what no engine reads is left out."""
    units: dict[str, list[tuple[str, FileEntry]]] = {}
    for file in manifest.files:
        family, _, rest = file.path.partition("/")
        if rest and (family in INSIDE or family in ELSEWHERE):
            path = f"{ELSEWHERE.get(family, family)}/{rest}"
            units.setdefault(_unit(path), []).append((path, file))
    return units


def _unit(path: str) -> str:
    parts = path.split("/")
    depth = next((depth for top, depth in _DEPTHS.items() if path.startswith(f"{top}/")), len(parts))
    return "/".join(parts[:depth])


def _add(source: Path, root: Path, unit: str, files: list[tuple[str, FileEntry]], chunk_bytes: int) -> None:
    """Fill the unit beside its place, then rename it; one that an engine has made meanwhile wins."""
    building = root / FOLDER / f"building-{os.getpid()}-{time.monotonic_ns()}"
    try:
        for path, file in files:
            target = building / path
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _copy(source / file.path, target, file, chunk_bytes)
        (root / unit).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            (building / unit).rename(root / unit)
        except OSError:
            if not os.path.lexists(root / unit):
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _copy(source: Path, target: Path, file: FileEntry, chunk_bytes: int) -> None:
    """Copy a file of the store, if it is the one that the manifest speaks of."""
    digests = []
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    with (
        open(os.open(source, flags), "rb") as reading,  # noqa: PTH123 (of a descriptor)
        open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as writing,  # noqa: PTH123
    ):
        while chunk := reading.read(chunk_bytes):
            digests.append(blake3(chunk).hexdigest())
            writing.write(chunk)
    if tuple(digests) != file.chunks:
        raise DigestError(
            f"{file.path!r} is not what the manifest says",
            where=str(source),
            hint="`llm-prefetch verify --full --repair` mends it",
        )


def _stale(store: NodeStore, deployment: str, version: str, units: Collection[str]) -> Iterator[str]:
    """Versions whose installed copy has to go: a damaged one of this, and what others put where this one belongs."""
    root = cache_root(store, deployment)
    for path in sorted((root / FOLDER).glob("b3-*.json")):
        other = path.stem
        if other == version:
            if check_installed(store, deployment, version):
                yield version
        elif not _installed_units(root, other).isdisjoint(units):
            yield other


def _discard(store: NodeStore, deployment: str, version: str) -> None:
    root = cache_root(store, deployment)
    if _others_run(store, deployment):
        raise NotReadyError(
            f"another replica runs with an installed copy that has to go ({version[:15]})",
            where=str(root),
            hint="it is installed anew when no replica of the deployment runs on this node",
        )
    for unit in _installed_units(root, version):
        if os.path.lexists(root / unit):
            (root / unit).rename(store.root / "quarantine" / f"cache-{time.time_ns()}")
    (root / FOLDER / f"{version}.json").unlink(missing_ok=True)


def _end_capture(store: NodeStore, deployment: str) -> None:
    """Put back what a capture has set aside that was killed; one that is under way has the cache root for itself."""
    root = cache_root(store, deployment)
    until = captured_until(root)
    if until is not None and (until > time.time() or _others_run(store, deployment)):
        raise NotReadyError(
            "a compile cache is being captured here",
            where=str(root),
            hint="what is staged is installed when that has ended, by the next staging or start",
        )
    put_back(root)


def _others_run(store: NodeStore, deployment: str) -> bool:
    """Whether a replica runs here that is not this process."""
    pids = [lease.pid for lease in running(store, deployment)]
    return len(pids) > (os.getpid() in pids)


def _installed_units(root: Path, version: str) -> set[str]:
    receipt = read_json(root / FOLDER / f"{version}.json")
    return {_unit(path) for path in receipt} if isinstance(receipt, dict) else set()


def _write_receipt(root: Path, version: str, units: Mapping[str, list[tuple[str, FileEntry]]]) -> None:
    """Inode and size of each file as it lies; of those that an engine's own folder does not have, nothing."""
    receipt = {}
    for files in units.values():
        for path, _ in files:
            try:
                found = os.lstat(root / path)
            except FileNotFoundError:
                continue
            receipt[path] = (found.st_ino, found.st_size)
    write_file(root / FOLDER / f"{version}.json", canonical_json(receipt))
