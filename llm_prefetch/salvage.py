"""Getting a partial folder into shape before a transfer: what an earlier staging left is taken up or put away.

What may be found, and what becomes of it:

* nothing: an empty partial folder is made
* a partial folder of this boot: its journal is believed, after a look that each file is there at its size
* a partial folder of another boot, or with files missing: what the journal claims is hashed again
* a final folder without a record, from a kill between rename and record: renamed back, nothing is lost
* a final folder that fails its check: put away; what of it still matches the manifest is kept
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Set as AbstractSet
from pathlib import Path

from llm_prefetch.commit import set_aside
from llm_prefetch.digest import copy_range, hash_range
from llm_prefetch.errors import UnsafePathError
from llm_prefetch.journal import Journal, read_journal, renew
from llm_prefetch.manifest import CHUNK_BYTES, Listing, Manifest, chunk_count
from llm_prefetch.paths import parents
from llm_prefetch.record import read_record
from llm_prefetch.resolve import Source
from llm_prefetch.store import NodeStore, boot_id


def prepare_partial(store: NodeStore, source: Source) -> Journal:
    """Make `partial/<key>/tree` ready for a transfer and return its journal, not yet open.

    Raises:
        OSError: the disk refused.
    """
    partial = store.partial(source.key)
    tree = partial / "tree"
    partial.mkdir(exist_ok=True)
    if partial.is_symlink() or tree.is_symlink():
        raise UnsafePathError(
            "a symbolic link is in the way of the staging", where=str(tree), hint="remove it and stage again"
        )
    journal = read_journal(partial / "journal")
    aside = _take_back(store, source, journal, tree)
    if not tree.is_dir():
        journal.path.unlink(missing_ok=True)
        journal = Journal(journal.path)
        tree.mkdir()
    _drop_strangers(tree, {file.path for file in source.content.files})
    if journal.done and (journal.boot != boot_id() or not _files_in_place(source, journal, tree)):
        journal = renew(
            journal, tree, [file.path for file in source.content.files], _chunk_bytes(source.content)
        )
    if aside is not None:
        if isinstance(source.content, Manifest):
            _keep_good_files(source.content, aside, tree, journal)
        shutil.rmtree(aside, ignore_errors=True)
    return journal


def seal_listing(listing: Listing, journal: Journal) -> Manifest:
    """The manifest of a listing whose chunks are all in the journal.

    Raises:
        KeyError: a chunk is missing.
    """
    return listing.seal(
        [
            [journal.done[number, index] for index in range(chunk_count(file.size))]
            for number, file in enumerate(listing.files)
        ]
    )


def _take_back(store: NodeStore, source: Source, journal: Journal, tree: Path) -> Path | None:
    """Deal with a final folder that does not count; returns where it was put if it may hold good files."""
    name = source.artifact.name
    try:
        content = source.content
        version = content.version if isinstance(content, Manifest) else seal_listing(content, journal).version
    except KeyError:
        return None  # a listing that was never complete has no final folder
    final = store.artifact(name, version)
    if not final.is_dir() or (isinstance(source.content, Listing) and read_record(store, name, version)):
        return None
    if read_record(store, name, version) is None and journal.done and not tree.exists():
        final.rename(tree)
        return None
    if not tree.exists():
        # It speaks of the folder that is put away; after a kill half-way it must not vouch for that one.
        journal.path.unlink(missing_ok=True)
    return set_aside(store, name, version)


def _drop_strangers(tree: Path, wanted: AbstractSet[str]) -> None:
    """Remove what does not belong to the artifact, or it would be committed with it."""
    folders = {folder for path in wanted for folder in parents(path)}
    for folder, below, names in os.walk(tree):
        for name in [*names, *below]:
            path = Path(folder, name)
            inside = path.relative_to(tree).as_posix()
            if inside in wanted or inside in folders:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _files_in_place(source: Source, journal: Journal, tree: Path) -> bool:
    """Whether every file that the journal speaks of is there at its full size."""
    for number in {file for file, _ in journal.done}:
        if number >= len(source.content.files):
            return False
        entry = source.content.files[number]
        path = tree / entry.path
        if path.is_symlink() or not path.is_file() or path.stat().st_size != entry.size:
            return False
    return True


def _keep_good_files(manifest: Manifest, aside: Path, tree: Path, journal: Journal) -> None:
    """Move files of which every chunk is right into the new tree, and copy the right chunks of the others.

    A damaged file is not mended where it lies: a replica may have it mapped.
    """
    journal.open()
    try:
        for number, file in enumerate(manifest.files):
            old, new = aside / file.path, tree / file.path
            if _leads_out(aside, old) or not old.is_file() or old.stat().st_size != file.size:
                continue
            if _leads_out(tree, new) or new.exists():
                continue
            starts = range(0, file.size, manifest.chunk_bytes)
            good = [
                (index, start, digest)
                for index, (start, digest) in enumerate(zip(starts, file.chunks, strict=True))
                if _is_right(old, start, manifest.chunk_bytes, digest)
            ]
            new.parent.mkdir(parents=True, exist_ok=True)
            if len(good) == len(file.chunks):
                old.rename(new)
            else:
                good = _copy_chunks(old, new, file.size, manifest.chunk_bytes, good)
            for index, _, digest in good:
                journal.enter(number, index, digest)
    finally:
        journal.close()


def _is_right(path: Path, start: int, size: int, digest: str) -> bool:
    """What the disk cannot read is wrong too."""
    try:
        return hash_range(path, start, size) == digest
    except OSError:
        return False


def _copy_chunks(
    old: Path, new: Path, size: int, chunk_bytes: int, chunks: list[tuple[int, int, str]]
) -> list[tuple[int, int, str]]:
    """Copy chunks into a new file of `size` bytes; returns those that arrived as they should."""
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.ftruncate(fd, size)
        return [chunk for chunk in chunks if copy_range(old, chunk[1], chunk_bytes, fd, chunk[1]) == chunk[2]]
    finally:
        os.close(fd)


def _leads_out(root: Path, path: Path) -> bool:
    """Whether a symbolic link takes part in the way from `root` to `path`."""
    return Path(os.path.realpath(path)) != Path(os.path.realpath(root)) / path.relative_to(root)


def _chunk_bytes(content: Manifest | Listing) -> int:
    return content.chunk_bytes if isinstance(content, Manifest) else CHUNK_BYTES
