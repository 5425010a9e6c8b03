"""The commit: verified work in progress becomes a version that counts.

    1. the files are made read-only and their folder is renamed into its final place
    2. the files there are the very ones that were written (inode and size), whoever else was at work
    3. the manifest is written beside them
    4. the commit record is written: from here on the version counts
    5. later, `seal` syncs the bytes and drops the boot from the record

A kill between any two of these leaves work that the next staging finishes without fetching a byte.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llm_prefetch.errors import DiskError
from llm_prefetch.ledger import mark
from llm_prefetch.manifest import Manifest
from llm_prefetch.record import CommitRecord, make_record, read_record, write_record
from llm_prefetch.store import NodeStore, boot_id, sync_folder, write_file

if TYPE_CHECKING:
    from llm_prefetch.spec import Transport


def commit(
    store: NodeStore,
    name: str,
    key: str,
    manifest: Manifest,
    inodes: Mapping[str, int],
    *,
    uri: str,
    listing: str,
    transport: Transport = "auto",
) -> CommitRecord:
    """Publish `partial/<key>/tree` as `artifacts/<name>/<version>`.

    Raises:
        DiskError: another process exchanged the files meanwhile.
        OSError: the disk refused.
    """
    partial, final = store.partial(key), store.artifact(name, manifest.version)
    final.parent.mkdir(parents=True, exist_ok=True)
    mark("commit-rename")
    for file in manifest.files:
        os.chmod(f"{partial}/tree/{file.path}", 0o444)  # noqa: PTH101 (thousands of paths: pathlib takes its time)
    (partial / "tree").rename(final)
    mark("commit-check")
    for file in manifest.files:
        found = os.lstat(f"{final}/{file.path}")
        if not stat.S_ISREG(found.st_mode) or (found.st_ino, found.st_size) != (inodes[file.path], file.size):
            (partial / "journal").unlink(missing_ok=True)  # it does not speak of these files
            raise DiskError(
                f"{file.path!r} is not the file that was staged",
                where=str(final),
                hint="another process interfered; stage again",
            )
    write_file(store.manifest(name, manifest.version), manifest.to_json())
    record = make_record(store, name, manifest, uri=uri, listing=listing, boot=boot_id(), transport=transport)
    mark("commit-record")
    write_record(store, record)
    mark("commit-clean")
    shutil.rmtree(partial, ignore_errors=True)
    return record


def seal(store: NodeStore, record: CommitRecord) -> CommitRecord:
    """Sync the files and folders to the disk and note it, so that the version outlives a power loss.

    Raises:
        OSError: the disk refused.
    """
    if not record.boot:
        return record
    base = store.artifact(record.name, record.version)
    for path, _, _ in record.files:
        _sync(base / path)
    for inside, _ in record.folders:
        sync_folder(base / inside)
    for folder in (base.parent, base.parent.parent):
        sync_folder(folder)
    mark("seal")
    if read_record(store, record.name, record.version) != record:
        return record  # set aside or committed anew meanwhile: what was synced is not what it speaks of
    sealed = replace(record, boot="")
    write_record(store, sealed)
    return sealed


def set_aside(store: NodeStore, name: str, version: str) -> Path | None:
    """Take a version out of use: first the record, then the folder, which goes to `quarantine/`.

    Running replicas keep the files they have open. Returns the new place, or `None` when there was no folder.
    """
    store.record(name, version).unlink(missing_ok=True)
    store.manifest(name, version).unlink(missing_ok=True)
    target = store.root / "quarantine" / f"{name}-{version}-{time.time_ns()}"
    try:
        store.artifact(name, version).rename(target)
    except FileNotFoundError:
        return None
    return target


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
