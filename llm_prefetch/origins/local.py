"""`file://`: a folder on a disk or a mounted file system."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

from llm_prefetch.errors import (
    OriginAccessError,
    OriginChangedError,
    OriginError,
    OriginNotFoundError,
    OriginUnavailableError,
    UnsupportedOriginError,
)
from llm_prefetch.origins.base import ObjectInfo


class LocalOrigin:
    """A folder. Symbolic links in it are followed for files, as in a Hugging Face cache, and not for folders."""

    def __init__(self, uri: str) -> None:
        """Take `file:///absolute/folder`."""
        self.uri = uri
        self._folder = Path(parse(uri))

    def list(self) -> Iterator[ObjectInfo]:
        """Every regular file below the folder."""
        try:
            there = self._folder.is_dir()
        except OSError as error:
            raise self._error(error, str(self._folder)) from error
        if not there:
            raise OriginNotFoundError("no such folder", where=self.uri, hint="check the path on this node")
        for folder, _, names in os.walk(self._folder, onerror=self._refuse):
            for name in names:
                file = Path(folder, name)
                path = file.relative_to(self._folder).as_posix()
                try:
                    yield _info(path, file.stat(), self.uri)
                except FileNotFoundError as error:
                    raise OriginError(
                        f"{path!r} is a dangling link", where=self.uri, hint="mend or remove it"
                    ) from error
                except OSError as error:
                    raise self._error(error, path) from error

    def stat(self, path: str) -> ObjectInfo | None:
        """The file at `path`; a folder is none, as it is none in a bucket."""
        try:
            found = (self._folder / path).stat()
            return None if stat.S_ISDIR(found.st_mode) else _info(path, found, self.uri)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._error(error, path) from error

    def read(self, path: str, limit: int) -> bytes:
        """The whole file."""
        try:
            with (self._folder / path).open("rb") as file:
                data = file.read(limit + 1)
        except OSError as error:
            raise self._error(error, path) from error
        if len(data) > limit:
            raise OriginError(
                f"{path!r} is larger than {limit} bytes", where=self.uri, hint="publish fewer files at once"
            )
        return data

    def reader(self) -> LocalReader:
        """A reader for one thread."""
        return LocalReader(self._folder, self._error)

    def write(self, path: str, body: BinaryIO, size: int) -> str:  # noqa: ARG002 (others need it)
        """Copy to a temporary name beside the target, then rename."""
        target = self._folder / path
        temporary = target.with_name(f".{target.name[:50]}.{os.getpid()}.{time.monotonic_ns()}.tmp")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                shutil.copyfileobj(body, file, 2**20)
                file.flush()
                os.fsync(file.fileno())
            tag = _info(path, temporary.stat(), self.uri).etag
            temporary.replace(target)
        except BaseException as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if isinstance(error, OSError):
                raise self._error(error, path) from error
            raise
        return tag

    def _refuse(self, error: OSError) -> None:
        raise self._error(error, str(error.filename))

    def _error(self, error: OSError, path: str) -> OriginError:
        if isinstance(error, FileNotFoundError):
            return OriginNotFoundError(
                f"no such file {path!r}", where=self.uri, hint="publish the folder again"
            )
        if isinstance(error, PermissionError):
            return OriginAccessError(
                f"may not access {path!r}", where=self.uri, hint="check its owner and mode"
            )
        return OriginUnavailableError(
            f"cannot access {path!r}: {error.strerror}", where=self.uri, hint="check its disk, then try again"
        )


def parse(uri: str) -> str:
    """The absolute path that `uri` names.

    Raises:
        UnsupportedOriginError: it names none.
    """
    # By hand, because a path may hold '?', '#' and '[', which urlsplit would take for its own.
    path = unquote(uri.removeprefix("file://").removeprefix("localhost"))
    if not path.startswith("/") or "\0" in path:
        raise UnsupportedOriginError("not an absolute path", where=uri, hint="write file:///absolute/folder")
    return path


class LocalReader:
    """Keeps the last file open, as ranges of one file tend to follow each other."""

    def __init__(self, folder: Path, explain: Callable[[OSError, str], OriginError]) -> None:
        """Read below `folder`; `explain` turns an `OSError` into an `OriginError`."""
        self._folder = folder
        self._explain = explain
        self._path: str | None = None
        self._fd = -1

    def open_range(self, item: ObjectInfo, start: int, length: int) -> LocalBody:
        """Open a range after checking that the file is still the one listed."""
        if self._path != item.path:
            self.close()
            try:
                self._fd = os.open(self._folder / item.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise self._explain(error, item.path) from error
            self._path = item.path
        found = _info(item.path, os.fstat(self._fd), str(self._folder))
        if found.size != item.size or (item.etag and found.etag != item.etag):
            raise OriginChangedError(
                f"{item.path!r} has {found.size} bytes at the origin where {item.size} were expected"
                if found.size != item.size
                else f"{item.path!r} changed at the origin since it was listed",
                where=str(self._folder),
                hint="publish the folder again, then stage",
            )
        return LocalBody(self._fd, start, length, self._folder / item.path)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._path = -1, None


class LocalBody:
    """A range of an open file."""

    def __init__(self, fd: int, start: int, length: int, path: Path) -> None:
        """Read `length` bytes from byte `start`; `path` is where they lie."""
        self._fd, self._at, self._left, self._path = fd, start, length, path

    def readinto(self, buffer: memoryview, /) -> int:
        """Read the next bytes."""
        try:
            count = os.preadv(self._fd, [buffer[: self._left]], self._at) if self._left else 0
        except OSError as error:
            raise OriginUnavailableError(
                f"cannot read {self._path.name!r}: {error.strerror}",
                where=str(self._path),
                hint="check its disk, then stage again",
            ) from error
        self._at += count
        self._left -= count
        return count


def _info(path: str, found: os.stat_result, where: str) -> ObjectInfo:
    if not stat.S_ISREG(found.st_mode):
        raise OriginError(
            f"{path!r} is not a regular file", where=where, hint="publish only files and folders"
        )
    return ObjectInfo(path, found.st_size, f"{found.st_mtime_ns:x}-{found.st_ino:x}")
