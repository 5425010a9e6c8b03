"""Any URL that fsspec knows, and the origins of our own that a SPEC asks to be read by fsspec (`transport: fsspec`).

Slower than the other way, and for what the other way does not speak or does not do. What an object is called
depends on its file system; what is the same everywhere is that listings are not kept, that an object which was
changed is noticed by whatever the file system says of it (`describe`), and that errors are ours and quote
nothing, because what a file system says may hold a signed URL or a key.

`hf://` and `https://` are listed and described by their own origins; fsspec reads their ranges.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from llm_prefetch.errors import OriginError, OriginNotFoundError
from llm_prefetch.origins.base import ObjectInfo
from llm_prefetch.origins.file_systems import find_class, open_place
from llm_prefetch.origins.general_errors import raise_ours
from llm_prefetch.origins.general_reader import FilesReader, ask
from llm_prefetch.origins.https import HttpsOrigin
from llm_prefetch.origins.hub import HubOrigin
from llm_prefetch.redact import redact

_TAGS = ("ETag", "etag", "e_tag", "generation", "md5", "md5Hash", "checksum")
_TIMES = ("mtime", "modified", "last_modified", "LastModified", "updated", "modify", "created", "ino")
_UPLOAD_BYTES = 8 * 2**20


class GeneralOrigin:
    """A folder of a file system."""

    def __init__(self, uri: str) -> None:
        """Take `scheme://...`; some file systems connect already here."""
        self.uri = redact(uri)
        self._lock = threading.RLock()
        try:
            self._place = open_place(uri)
        except Exception as error:  # noqa: BLE001 (every file system has errors of its own)
            raise_ours(error, self.uri)

    def list(self) -> Iterator[ObjectInfo]:
        """Every file below the folder; the empty objects that stand for folders are left out."""
        start = f"{self._place.root}/"
        with self._turn() as fs:
            found = fs.find(self._place.root, detail=True)
        for name, info in found.items():
            if info["type"] == "directory" or name == start:
                continue
            if not name.startswith(start):
                raise OriginNotFoundError("not a folder", where=self.uri, hint="name the folder above it")
            path = name.removeprefix(start)
            if not info["size"] and (path.endswith("/") or self.stat(path) is None):
                continue
            if info["type"] != "file":
                raise OriginError(f"{path!r} is not a regular file", where=self.uri, hint="remove it")
            yield self._info(path, info)

    def stat(self, path: str) -> ObjectInfo | None:
        """The file at `path`."""
        with self._turn() as fs:
            return self._describe(fs, path)

    def read(self, path: str, limit: int) -> bytes:
        """The whole of a small file."""
        found = self.stat(path)
        if found is None:
            raise OriginNotFoundError(f"no such file {path!r}", where=self.uri, hint="publish it again")
        if found.size > limit:
            raise OriginError(
                f"{path!r} is larger than {limit} bytes", where=self.uri, hint="publish fewer files at once"
            )
        with self._turn() as fs:
            return bytes(fs.cat_file(self._path(path)))

    def reader(self) -> FilesReader:
        """A reader for one thread; on a connection of its own where a file system has only one."""
        try:
            fs = self._place.fs if self._place.fs.async_impl else self._place.again()
        except Exception as error:  # noqa: BLE001 (as above)
            raise_ours(error, self.uri)
        return FilesReader(fs, self._path, lambda path: self._describe(fs, path), self.uri)

    def write(self, path: str, body: BinaryIO, size: int) -> str:
        """Upload; where a file shows while it is written, it goes to another name first and is then renamed.

        What etag it has then is not known: a look at it now could see another's.
        """
        target = self._path(path)
        with self._turn() as fs:
            if self._place.whole:
                _upload(fs, target, body, size)
                return ""
            folder = target.rpartition("/")[0]
            temporary = f"{folder}/.{os.getpid()}.{time.monotonic_ns()}.tmp"
            fs.makedirs(folder, exist_ok=True)
            try:
                _upload(fs, temporary, body, size)
                _rename(fs, temporary, target)
            except BaseException:
                with contextlib.suppress(Exception):
                    fs.rm_file(temporary)
                raise
        return ""

    def _path(self, path: str) -> str:
        return f"{self._place.root}/{path}"

    def _describe(self, fs: Any, path: str) -> ObjectInfo | None:  # noqa: ANN401 (fsspec has no types)
        try:
            info = ask(fs, "info", self._path(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # noqa: BLE001 (as above)
            raise_ours(error, self.uri)
        return self._info(path, info) if info["type"] == "file" else None

    def _info(self, path: str, info: Mapping[str, Any]) -> ObjectInfo:
        if not isinstance(info.get("size"), int):
            raise OriginError(f"{path!r} has no size", where=self.uri, hint="name another file system")
        return ObjectInfo(path, info["size"], _tag(info))

    @contextlib.contextmanager
    def _turn(self) -> Iterator[Any]:
        """The file system, for one thread at a time where it has only one connection."""
        alone = contextlib.nullcontext() if self._place.fs.async_impl else self._lock
        with alone:
            try:
                yield self._place.fs
            except Exception as error:  # noqa: BLE001 (as above)
                raise_ours(error, self.uri)


class FilesOfHub(HubOrigin):
    """A revision of the Hub, whose ranges `HfFileSystem` reads."""

    def reader(self) -> FilesReader:  # type: ignore[override]
        """A reader for one thread."""
        fs = find_class("hf", self.uri)(
            endpoint=self.endpoint, use_listings_cache=False, skip_instance_cache=True
        )
        return FilesReader(fs, self._place, self.stat, self.uri)

    def _place(self, path: str) -> str:
        return f"{self.repo}@{self.commit}/{path}"


class FilesOfTheWeb(HttpsOrigin):
    """A prefix on the web, whose ranges fsspec's own HTTP client reads."""

    def __init__(self, uri: str) -> None:
        """Take what `HttpsOrigin` takes."""
        super().__init__(uri)
        kind = find_class("https", self.uri)
        self._fs = kind(
            encoded=True, headers=self.headers, skip_instance_cache=True, use_listings_cache=False
        )

    def reader(self) -> FilesReader:  # type: ignore[override]
        """A reader for one thread."""
        return FilesReader(self._fs, lambda path: self._address(path)[0], self.stat, self.uri)


def _tag(info: Mapping[str, Any]) -> str:
    """What changes with the bytes, as far as the file system says."""
    for name in _TAGS:
        if info.get(name):
            return str(info[name]).strip('"')
    # A list and a look at one object may state the same time in two ways.
    times = {
        name: getattr(info[name], "timestamp", lambda name=name: info[name])()
        for name in _TIMES
        if info.get(name)
    }
    return " ".join(f"{name} {moment}" for name, moment in times.items())


def _rename(fs: Any, old: str, new: str) -> None:  # noqa: ANN401 (fsspec has no types)
    from fsspec import AbstractFileSystem

    if type(fs).mv is not AbstractFileSystem.mv:
        fs.mv(old, new)
        return
    fs.cp_file(old, new)  # what the general `mv` does, but for taking "?" and "*" in a name for a pattern
    fs.rm_file(old)


def _upload(fs: Any, path: str, body: BinaryIO, size: int) -> None:  # noqa: ANN401 (fsspec has no types)
    if size <= _UPLOAD_BYTES:
        fs.pipe_file(path, body.read(size + 1))
        return
    file = fs.open(path, "wb", block_size=_UPLOAD_BYTES)
    try:
        while piece := body.read(2**20):
            file.write(piece)
        file.close()
    except BaseException:
        file.closed = True  # or the end of the object, on its way out of memory, would finish the upload
        with contextlib.suppress(Exception):
            file.discard()
        raise
