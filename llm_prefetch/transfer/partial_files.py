"""The files that a transfer fills: made at their full size, written to at any offset by many threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from llm_prefetch.origins import ObjectInfo
from llm_prefetch.paths import open_beneath, open_own_beneath
from llm_prefetch.plan import Plan


class PartialFiles:
    """The files of one transfer; each is made when its first chunk comes, and open only while chunks are on their way.

    Nothing slow is done under a lock that all workers need: with thousands of small files that would be the limit.
    """

    def __init__(self, plan: Plan, tree: Path) -> None:
        """The files of `plan`, below the folder `tree`."""
        content = plan.source.content
        etags = {file.path: getattr(file, "etag", "") for file in content.files}
        self.items = [ObjectInfo(file.path, file.size, etags[file.path]) for file in content.files]
        self.inodes: dict[str, int] = {}
        """The inode of each file by its path, as far as it was made."""
        self._tree = tree
        self._incomplete = {chunk.file for chunk in plan.chunks}
        self._lock = threading.Lock()
        self._open: dict[int, _Shared] = {}

    def prepare(self) -> None:
        """Make the files of which nothing is to be fetched: empty ones, if they are not there.

        Raises:
            UnsafePathError: something is in the way.
            OSError: the disk refused.
        """
        for number, item in enumerate(self.items):
            if number not in self._incomplete:
                os.close(self._make(item, os.O_RDONLY | os.O_CREAT))

    def acquire(self, file: int) -> int:
        """A descriptor of the file, shared by the workers that write to it.

        Raises:
            UnsafePathError: something is in the way.
            OSError: the disk refused.
        """
        with self._lock:
            shared = self._open.setdefault(file, _Shared())
            shared.users += 1
        try:
            with shared.lock:
                if shared.fd < 0:
                    shared.fd = self._make(self.items[file], os.O_WRONLY)
                return shared.fd
        except BaseException:
            self.release(file)
            raise

    def release(self, file: int) -> None:
        """Close the descriptor when nobody writes to the file any more."""
        with self._lock:
            shared = self._open[file]
            shared.users -= 1
            if shared.users:
                return
            del self._open[file]
        if shared.fd >= 0:
            os.close(shared.fd)

    def _make(self, item: ObjectInfo, flags: int) -> int:
        """Open a file; one that is written to for the first time is made our own, at its full size."""
        root_fd = os.open(self._tree, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if flags != os.O_WRONLY or item.path in self.inodes:
                fd = open_beneath(root_fd, item.path, flags)
            else:
                fd = open_own_beneath(root_fd, item.path)
        finally:
            os.close(root_fd)
        if item.path not in self.inodes:
            with _closed_on_error(fd):
                found = os.fstat(fd)
                if flags == os.O_WRONLY and found.st_size != item.size:
                    os.ftruncate(fd, item.size)
            self.inodes[item.path] = found.st_ino
        return fd


@contextmanager
def _closed_on_error(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


@dataclass
class _Shared:
    """One open file."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    fd: int = -1
    users: int = 0
