"""Reuse: bring what committed versions hold into a new one, instead of fetching it.

A file of which every chunk is held is linked, which costs nothing and no space: committed files are never
written to, so two versions may share one. Of any other file the held chunks are copied, and hashed on the
way, because a copy costs a read anyway. What does not work out is fetched.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from llm_prefetch.digest import copy_range
from llm_prefetch.journal import Journal
from llm_prefetch.manifest import FileEntry, Manifest
from llm_prefetch.paths import open_folder_beneath, open_own_beneath, unlink_beneath
from llm_prefetch.plan import Chunk, Plan
from llm_prefetch.stop import Stop


def reuse(plan: Plan, tree: Path, journal: Journal, stop: Stop) -> Plan:
    """Bring the held chunks of `plan` into `tree` and enter them into `journal`, which must be open.

    Returns:
        The plan of what is left: chunks that turned out wrong are among those to fetch.

    Raises:
        UnsafePathError: something in `tree` is in the way.
        OriginUnavailableError: `stop` was set.
        OSError: the disk refused.
    """
    content = plan.source.content
    if not isinstance(content, Manifest) or not plan.local:
        return plan
    missed: list[Chunk] = []
    root_fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for number, group in groupby(plan.local, key=lambda chunk: chunk.file):
            stop.raise_if_set()
            chunks, entry = list(group), content.files[number]
            held = plan.held.file(entry)
            if held is None or len(chunks) != len(entry.chunks) or not _link(held, root_fd, entry):
                missed += _copy(plan, chunks, root_fd, entry, journal, stop)
                continue
            for chunk in chunks:
                journal.enter(chunk.file, chunk.index, chunk.digest)
    finally:
        os.close(root_fd)
    lost = sum(chunk.length for chunk in missed)
    return replace(plan, chunks=(*missed, *plan.chunks), local=(), reuse_bytes=plan.reuse_bytes - lost)


def _link(held: Path, root_fd: int, entry: FileEntry) -> bool:
    """Give the held file a second name; some file systems cannot, and a version may have gone meanwhile."""
    unlink_beneath(root_fd, entry.path)
    folder, _, name = entry.path.rpartition("/")
    folder_fd = open_folder_beneath(root_fd, folder)
    try:
        os.link(held, name, dst_dir_fd=folder_fd, follow_symlinks=False)
    except OSError:
        return False
    finally:
        os.close(folder_fd)
    return True


def _copy(
    plan: Plan, chunks: Iterable[Chunk], root_fd: int, entry: FileEntry, journal: Journal, stop: Stop
) -> list[Chunk]:
    """Copy held chunks to their places; returns those that are not what the manifest says."""
    missed = []
    fd = open_own_beneath(root_fd, entry.path)
    try:
        os.ftruncate(fd, entry.size)
        for chunk in chunks:
            stop.raise_if_set()
            path, start = plan.held.chunks[chunk.digest]
            try:
                digest = copy_range(path, start, chunk.length, fd, chunk.start)
            except FileNotFoundError:
                digest = ""
            if digest == chunk.digest:
                journal.enter(chunk.file, chunk.index, digest)
            else:
                missed.append(chunk)
    finally:
        os.close(fd)
    return missed
