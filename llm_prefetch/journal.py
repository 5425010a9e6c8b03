"""The journal of a staging in progress: which chunks already lie on the disk, with their digests.

A chunk is entered after its bytes were hashed, found right and written. One entry is one append of 40 bytes,
so a kill leaves at most a torn last entry, which is ignored. What was written stays in the kernel's hands
when the process dies, but not when the machine does: entries of another boot are hashed again first.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from dataclasses import dataclass, field
from pathlib import Path

from llm_prefetch.digest import hash_range
from llm_prefetch.store import boot_id

_ENTRY = struct.Struct("<II32s")


@dataclass
class Journal:
    """Chunks that are done: (index of the file, index of the chunk) to digest."""

    path: Path
    boot: str = field(default_factory=boot_id)
    done: dict[tuple[int, int], str] = field(default_factory=dict)
    whole_bytes: int = 0
    """Length of the file up to its last whole entry; 0 when it has no header yet."""
    _fd: int = -1
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def open(self) -> None:
        """Begin to append after the last whole entry; writes the header of a new journal."""
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._fd, self.whole_bytes)
        if not self.whole_bytes:
            self._append(self.boot.encode() + b"\n")

    def enter(self, file: int, chunk: int, digest: str) -> None:
        """Note that a chunk is on the disk; may be called from several threads."""
        with self._lock:
            self._append(_ENTRY.pack(file, chunk, bytes.fromhex(digest)))
            self.done[file, chunk] = digest

    def close(self) -> None:
        """Stop appending."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _append(self, data: bytes) -> None:
        """All of `data` or nothing: what comes after a torn entry would be read out of step."""
        if os.write(self._fd, data) != len(data):
            os.ftruncate(self._fd, self.whole_bytes)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.whole_bytes += len(data)


def read_journal(path: Path) -> Journal:
    """The journal at `path`; an empty one when there is none."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Journal(path)
    header, newline, body = data.partition(b"\n")
    if not newline:
        return Journal(path)
    journal = Journal(path, boot=header.decode("ascii", errors="replace"))
    whole = len(body) - len(body) % _ENTRY.size
    journal.whole_bytes = len(header) + 1 + whole
    for file, chunk, digest in _ENTRY.iter_unpack(body[:whole]):
        journal.done[file, chunk] = digest.hex()
    return journal


def renew(journal: Journal, tree: Path, paths: list[str], chunk_bytes: int) -> Journal:
    """A journal of this boot with only the entries whose bytes are on the disk as they say."""
    fresh = Journal(journal.path.with_name("journal.new"))
    fresh.path.unlink(missing_ok=True)
    fresh.open()
    for (file, chunk), digest in sorted(journal.done.items()):
        if file < len(paths) and _on_disk(tree / paths[file], chunk * chunk_bytes, chunk_bytes) == digest:
            fresh.enter(file, chunk, digest)
    fresh.close()
    fresh.path.replace(journal.path)
    fresh.path = journal.path
    return fresh


def _on_disk(path: Path, start: int, length: int) -> str:
    """Digest of a range, or an empty text when it cannot be read."""
    try:
        return hash_range(path, start, length)
    except OSError:
        return ""
