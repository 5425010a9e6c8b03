"""What Ray has downloaded becomes a committed version, so that the next replica on this node is a hit.

Only what is proven: each byte is compared with the manifest at the origin or, where it has none, with the digests that
the origin states of its objects. A file that Ray replaces when it downloads again is shared by a hard link, which costs
no time and no space; any other is copied, because a committed file is never written to.

Runs in the staging's process, which has the libraries of origins.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from blake3 import blake3

from llm_prefetch import ledger, settings
from llm_prefetch.errors import DigestError, FallbackError, disk_error
from llm_prefetch.journal import Journal
from llm_prefetch.manifest import CHUNK_BYTES, FileEntry, ListedFile, Manifest
from llm_prefetch.origins import ObjectInfo
from llm_prefetch.origins.asking import ask
from llm_prefetch.origins.stated import Stated, check, find_stated, new_hasher
from llm_prefetch.paths import open_folder_beneath
from llm_prefetch.plan import find_committed
from llm_prefetch.resolve import Source, resolve
from llm_prefetch.salvage import prepare_partial
from llm_prefetch.spec import Spec
from llm_prefetch.stage import StageReport, stage
from llm_prefetch.stop import Stop
from llm_prefetch.store import NodeStore, locked

_PIECE_BYTES = 2**20
_COPY_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Brought:
    """A folder that Ray has downloaded a model to."""

    folder: Path
    replaced: bool
    """Whether Ray gives a file that it downloads again a new inode, as it does from S3; else it writes into the old one."""


@dataclass
class Taken:
    """Bytes of that folder which are in the store now, by how they came there."""

    linked: int = 0
    copied: int = 0
    why_copied: str = ""


def adopt(
    spec: Spec, store: NodeStore, brought: Brought, stop: threading.Event | None = None
) -> tuple[Taken, StageReport]:
    """Take the models of `spec` from what Ray has brought, and stage whatever else it names.

    Raises:
        FallbackError: none of them is what Ray has brought, or it cannot be proven. Nothing is fetched then.
        PrefetchError: as `stage`.
    """
    until, taken = Stop(stop, seconds=spec.policy.deadline_seconds), Taken()
    models = [resolve(artifact, stop=until) for artifact in spec.artifacts if artifact.kind == "model"]
    others = {source.artifact.name: _differs(source, brought.folder) for source in models}
    if all(others.values()):
        said = "; ".join(f"{name}: {other}" for name, other in others.items()) or "the spec has no model"
        raise FallbackError(said, where=str(brought.folder), hint="stage it for the next replica")
    try:
        for source in models:
            if not others[source.artifact.name]:
                _take(source, store, brought, taken, until)
    except OSError as error:
        raise disk_error(error, str(store.root)) from error
    report = stage(spec, store, stop=stop)
    ledger.append(
        store,
        "adopt",
        deployment=spec.deployment,
        bundle=report.bundle,
        linked=taken.linked,
        copied=taken.copied,
    )
    return taken, report


def _differs(source: Source, folder: Path) -> str:
    """What of the model is not in the folder, by names and sizes."""
    for file in source.content.files:
        try:
            size = (folder / file.path).stat().st_size
        except OSError:
            return f"Ray has not downloaded {file.path!r}"
        if size != file.size:
            return f"{file.path!r} has {size} bytes, and at the origin {file.size}"
    return ""


def _take(source: Source, store: NodeStore, brought: Brought, taken: Taken, stop: Stop) -> None:
    """Bring the files into the work in progress, from where the staging commits them."""
    name, partial_folder = source.artifact.name, store.partial(source.key)
    with locked(
        store.lock(f"stage-{source.key}"),
        seconds=settings.LOCK_SECONDS.get(),
        waiting_for=f"another staging of {name}",
        stop=stop,
    ):
        if find_committed(store, source) is not None:
            return
        stated = _stated(source, stop)
        journal = prepare_partial(store, source)
        journal.open()
        root_fd = os.open(
            partial_folder / "tree", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        )
        try:
            files: Sequence[FileEntry | ListedFile] = source.content.files
            for number, file in enumerate(files):
                arrived = partial_folder / "arrived"
                _place(brought, file, arrived, taken)
                digests = list(_digests(arrived, source, file, stated.get(file.path), stop))
                # Only what is proven gets into the tree: the journal may speak of what lies there.
                _into(root_fd, file.path, arrived)
                _enter(journal, number, digests)
        finally:
            os.close(root_fd)
            journal.close()


def _stated(source: Source, stop: Stop) -> Mapping[str, Stated]:
    """Digests of whole files, where there is no manifest.

    Raises:
        FallbackError: the origin states none of a file.
    """
    if isinstance(source.content, Manifest):
        return {}
    found = {}
    for file in source.content.files:
        item = ObjectInfo(file.path, file.size, file.etag)
        stated = ask(partial(find_stated, source.origin, item), stop) if file.size else None
        if file.size and stated is None:
            raise FallbackError(
                f"the origin has no manifest, and states no digest of {file.path!r}",
                where=source.artifact.uri,
                hint="publish it with its manifest: llm-prefetch publish --manifest-only",
            )
        if stated is not None:
            found[file.path] = stated
    return found


def _place(brought: Brought, file: FileEntry | ListedFile, target: Path, taken: Taken) -> None:
    """Give the file a second name, or copy it; some file systems share the blocks of a copy."""
    source = os.path.realpath(brought.folder / file.path)  # a Hugging Face cache may have links to its blobs
    target.unlink(missing_ok=True)
    why = "" if brought.replaced else "Ray writes into the files that it downloads again"
    if not why:
        try:
            os.link(source, target)
        except OSError as error:
            why = "it lies on another file system" if error.errno == errno.EXDEV else str(error.strerror)
        else:
            taken.linked += file.size
            return
    taken.copied, taken.why_copied = taken.copied + file.size, why
    try:
        with open(source, "rb") as old, target.open("xb") as new:  # noqa: PTH123 (realpath gives a text)
            while os.copy_file_range(old.fileno(), new.fileno(), _COPY_BYTES):
                pass
    except OSError:  # not between all file systems
        shutil.copyfile(source, target)


def _digests(
    path: Path, source: Source, file: FileEntry | ListedFile, stated: Stated | None, stop: Stop
) -> Iterator[str]:
    """The digest of each chunk.

    Raises:
        DigestError: the bytes are not those of the origin.
    """
    content = source.content
    chunk_bytes = content.chunk_bytes if isinstance(content, Manifest) else CHUNK_BYTES
    known = file.chunks if isinstance(file, FileEntry) else ()
    whole = new_hasher(stated.kind, file.size) if stated else None
    buffer = memoryview(bytearray(min(_PIECE_BYTES, chunk_bytes)))
    with path.open("rb", buffering=0) as body:
        for index, start in enumerate(range(0, file.size, chunk_bytes)):
            stop.raise_if_set()
            hasher, left = blake3(), min(chunk_bytes, file.size - start)
            while left and (count := body.readinto(buffer[:left])):
                hasher.update(buffer[:count])
                if whole is not None:
                    whole.update(buffer[:count])
                left -= count
            digest = hasher.hexdigest()
            if left or (known and digest != known[index]):
                raise DigestError(
                    f"what Ray downloaded of {file.path!r} is not what the origin's manifest says",
                    where=str(path),
                    hint="stage it for the next replica",
                )
            yield digest
    if stated is not None and whole is not None:
        check(stated, whole, file.path, source.artifact.uri)


def _into(root_fd: int, path: str, arrived: Path) -> None:
    parent, _, name = path.rpartition("/")
    folder_fd = open_folder_beneath(root_fd, parent)
    try:
        os.rename(arrived, name, dst_dir_fd=folder_fd)
    finally:
        os.close(folder_fd)


def _enter(journal: Journal, number: int, digests: list[str]) -> None:
    for index, digest in enumerate(digests):
        journal.enter(number, index, digest)
