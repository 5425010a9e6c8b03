"""Ranges by fsspec, in pieces of a megabyte, so that memory is that much for each range.

A piece may come from an object that was replaced a moment ago, and most file systems cannot ask for "this range of
that version". So the object is described before the last piece of every range is given out: if its tag is then
still the listed one, all pieces were of that version. Where no tag is known (a manifest gives none), the size is
checked before the first range, and the digests of the manifest decide. A file system that states neither a tag nor
a time, or a time in whole seconds, can hide a change; a published manifest protects there too.

A piece, or a look at an object, that does not come within `LLM_PREFETCH_STALL_SECONDS` is given up, where the file
system works by asyncio; others have time-outs of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from llm_prefetch import settings
from llm_prefetch.errors import OriginChangedError, OriginNotFoundError, OriginUnavailableError
from llm_prefetch.origins.base import ObjectInfo
from llm_prefetch.origins.general_errors import raise_ours

PIECE_BYTES = 2**20


class FilesReader:
    """Reads ranges of files of a file system."""

    def __init__(
        self,
        fs: Any,  # noqa: ANN401 (fsspec has no types)
        locate: Callable[[str], str],
        describe: Callable[[str], ObjectInfo | None],
        where: str,
    ) -> None:
        """Take a file system, what says where in it a path is, and what describes it.

        Args:
            fs: Used by this reader's thread alone, unless it works by asyncio.
            locate: From a path of the origin to one of `fs`.
            describe: What is at a path now.
            where: What errors name.
        """
        self._fs = fs
        self._locate = locate
        self._describe = describe
        self._where = where
        self._known: set[ObjectInfo] = set()
        self._file: Any = None
        self._path = ""

    def open_range(self, item: ObjectInfo, start: int, length: int) -> FilesBody:
        """Open a range; nothing is asked for yet but, for the first one of an item without a tag, its size."""
        if not item.etag and item not in self._known:
            self.check(item)
            self._known.add(item)
        return FilesBody(self, item, start, length)

    def close(self) -> None:
        """Close the file, and look again at everything from now on."""
        self._known.clear()
        self._close_file()

    def check(self, item: ObjectInfo) -> None:
        """Look whether `item` is what is there.

        Raises:
            OriginChangedError: it is not.
            OriginNotFoundError: nothing is there.
        """
        found = self._describe(item.path)
        if found is None:
            raise OriginNotFoundError(
                f"{item.path!r} is not there", where=self._where, hint="publish the folder again"
            )
        if found.size != item.size or (item.etag and found.etag != item.etag):
            raise OriginChangedError(
                f"{item.path!r} has {found.size} bytes at the origin where {item.size} were expected"
                if found.size != item.size
                else f"{item.path!r} changed at the origin since it was listed",
                where=self._where,
                hint="publish the folder again, then stage",
            )

    def fetch(self, item: ObjectInfo, start: int, length: int) -> bytes:
        """The bytes of one piece.

        Raises:
            OriginChangedError: they did not come because `item` is not there any more.
            OriginError: they did not come.
        """
        try:
            data = self._ask(self._locate(item.path), start, start + length)
        except Exception as error:  # noqa: BLE001 (every file system has errors of its own)
            self.check(item)
            raise_ours(error, self._where, item.path)
        if len(data) != length:
            self.check(item)
            raise OriginUnavailableError(
                f"{item.path!r}: the answer is not the range asked for",
                where=self._where,
                hint="the origin must serve ranges; stage again",
            )
        return data

    def _ask(self, path: str, start: int, end: int) -> bytes:
        if self._fs.async_impl:
            return bytes(ask(self._fs, "cat_file", path, start=start, end=end))
        if self._path != path:
            self._close_file()
            self._file = self._fs.open(path, "rb", block_size=PIECE_BYTES, cache_type="none")
            self._path = path
        self._file.seek(start)
        return bytes(self._file.read(end - start))

    def _close_file(self) -> None:
        file, self._file, self._path = self._file, None, ""
        if file is not None:
            with contextlib.suppress(Exception):  # it was only read
                file.close()


def ask(fs: Any, method: str, *args: Any, **options: Any) -> Any:  # noqa: ANN401 (fsspec has no types)
    """Call a method of a file system, for a limited time if it works by asyncio."""
    if not fs.async_impl:
        return getattr(fs, method)(*args, **options)
    from fsspec.asyn import sync

    # The public method knows no time-out.
    return sync(fs.loop, getattr(fs, f"_{method}"), *args, timeout=settings.STALL_SECONDS.get(), **options)


class FilesBody:
    """The bytes of one range."""

    def __init__(self, reader: FilesReader, item: ObjectInfo, start: int, length: int) -> None:
        """Read `length` bytes of `item` from byte `start`."""
        self._reader, self._item = reader, item
        self._at, self._end = start, start + length
        self._piece = memoryview(b"")

    def readinto(self, buffer: memoryview, /) -> int:
        """Copy the next bytes."""
        if not self._piece:
            if self._at == self._end:
                return 0
            length = min(PIECE_BYTES, self._end - self._at)
            piece = self._reader.fetch(self._item, self._at, length)
            self._at += length
            if self._at == self._end and self._item.etag:
                self._reader.check(self._item)
            self._piece = memoryview(piece)
        count = min(len(buffer), len(self._piece))
        buffer[:count] = self._piece[:count]
        self._piece = self._piece[count:]
        return count
