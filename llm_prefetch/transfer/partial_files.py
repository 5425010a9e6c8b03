"""The files that a transfer fills: made at full size at first, then written to at any offset by many threads."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from llm_prefetch.origins import ObjectInfo
from llm_prefetch.paths import open_beneath, open_own_beneath
from llm_prefetch.plan import Plan


class PartialFiles:
    """The partial files: made at full size at first, then held open only while chunks of them are on their way."""

    def __init__(self, plan: Plan) -> None:
        content = plan.source.content
        etags = {file.path: getattr(file, "etag", "") for file in content.files}
        self.items = [ObjectInfo(file.path, file.size, etags[file.path]) for file in content.files]
        self._incomplete = {self.items[chunk.file].path for chunk in plan.chunks}
        self._lock = threading.Lock()
        self._open: dict[int, tuple[int, int]] = {}

    def prepare(self, tree: Path) -> dict[str, int]:
        """Make every file that is to be written to at its size, and empty ones; returns the inodes."""
        self._path = tree
        inodes = {}
        root_fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for item in self.items:
                inodes[item.path] = _prepare_file(root_fd, item, write=item.path in self._incomplete)
        finally:
            os.close(root_fd)
        return inodes

    def acquire(self, file: int) -> int:
        """A descriptor of the file, shared by the workers that write to it."""
        with self._lock:
            fd, users = self._open.get(file, (-1, 0))
            if fd < 0:
                root_fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fd = open_beneath(root_fd, self.items[file].path, os.O_WRONLY)
                finally:
                    os.close(root_fd)
            self._open[file] = (fd, users + 1)
            return fd

    def release(self, file: int) -> None:
        """Close the descriptor when nobody writes to the file any more."""
        with self._lock:
            fd, users = self._open.pop(file)
            if users > 1:
                self._open[file] = (fd, users - 1)
            else:
                os.close(fd)


def _prepare_file(root_fd: int, item: ObjectInfo, *, write: bool) -> int:
    """Make one file at its size, our own if it will be written to; its inode."""
    fd = (
        open_own_beneath(root_fd, item.path)
        if write
        else open_beneath(root_fd, item.path, os.O_RDONLY | os.O_CREAT)
    )
    try:
        if write:
            os.ftruncate(fd, item.size)
        return os.fstat(fd).st_ino
    finally:
        os.close(fd)
