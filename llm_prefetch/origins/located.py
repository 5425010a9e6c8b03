"""Objects behind redirects: where each one is found is asked once and kept for a while.

A range then costs one request to the host that has the bytes. Where that host refuses, because a signed
address expired, the way is asked for again before anybody hears of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.client import HTTPMessage

from llm_prefetch import settings
from llm_prefetch.errors import (
    OriginAccessError,
    OriginChangedError,
    OriginError,
    OriginNotFoundError,
)
from llm_prefetch.origins.base import ObjectInfo
from llm_prefetch.origins.ranged_http import HttpBody, HttpReader, Signed

REDIRECTS = 5
_ASK_AGAIN_SECONDS = 600.0
"""Signed addresses of CDNs live an hour or so."""


class Locations:
    """Where objects are; may be asked from any thread."""

    def __init__(self, locate: Callable[[str], Signed], locate_again: Callable[[str], Signed]) -> None:
        """Take the first address of a path, and the one to try when an address from before was refused."""
        self._locate = locate
        self._locate_again = locate_again
        self._lock = threading.Lock()
        self._asking: dict[str, threading.Lock] = {}
        self._found: dict[str, tuple[float, Signed]] = {}

    def find(self, path: str) -> Signed:
        """Where `path` is; threads that want the same one wait for one question."""
        with self._lock:
            asking = self._asking.setdefault(path, threading.Lock())
        with asking:
            asked, found = self._found.get(path, (-_ASK_AGAIN_SECONDS, None))
            if found is None or time.monotonic() - asked >= _ASK_AGAIN_SECONDS:
                found = self._locate(path)
                self._found[path] = (time.monotonic(), found)
            return found

    def learn(self, path: str, found: Signed) -> None:
        """A redirect led here."""
        if self._found.get(path, (0.0, None))[1] != found:
            self._found[path] = (time.monotonic(), found)

    def again(self, path: str) -> None:
        """The address was refused: look for another.

        Raises:
            OriginError: it says better than the refusal why there is none.
        """
        self._found[path] = (time.monotonic(), self._locate_again(path))


class LocatedReader:
    """Reads ranges of what `locations` finds; `same` says whether an answer is still the object listed."""

    def __init__(
        self, locations: Locations, where: str, same: Callable[[ObjectInfo, HTTPMessage], bool]
    ) -> None:
        """Errors name `where`; `same` is asked with the headers of each answer."""
        self._locations = locations
        self._where = where
        self._same = same
        self._reader = open_reader(locations.find, where)

    def open_range(self, item: ObjectInfo, start: int, length: int) -> HttpBody:
        """Open a range; a refusal counts only from an address that was just found."""
        # `If-Match` takes a strong tag of this very server only; `same` judges what came instead.
        wanted = ObjectInfo(item.path, item.size, item.etag if item.etag.startswith('"') else "")
        try:
            body = self._reader.open_range(wanted, start, length)
        except (OriginAccessError, OriginNotFoundError):
            self._locations.again(item.path)
            body = self._reader.open_range(wanted, start, length)
        if self._reader.answered is not None:
            at, headers = self._reader.answered
            check_plain(headers, item.path, self._where)
            if not self._same(item, headers):
                self._reader.close()
                raise OriginChangedError(
                    f"{item.path!r} changed at the origin since it was listed",
                    where=self._where,
                    hint="publish the folder again, then stage",
                )
            self._locations.learn(item.path, at)
        return body

    def abort(self, reason: str = "") -> None:
        """End at once, from any thread, what this reader does now or begins next."""
        self._reader.abort(reason)

    def close(self) -> None:
        """Release the connection."""
        self._reader.close()


def open_reader(find: Callable[[str], Signed], where: str) -> HttpReader:
    """A reader that follows redirects and does without ranges where it may."""
    return HttpReader(find, where, settings.STALL_SECONDS.get(), redirects=REDIRECTS, whole=True)


def check_plain(headers: HTTPMessage, path: str, where: str) -> None:
    """Bytes that were compressed on the way, though nobody asked for it, are not the file's.

    Raises:
        OriginError: they were.
    """
    if headers.get("Content-Encoding", "identity").lower() != "identity":
        raise OriginError(
            f"{path!r}: the origin compresses what it sends",
            where=where,
            hint="it must serve files as they are",
        )


def read_whole(reader: HttpReader | LocatedReader, item: ObjectInfo, limit: int, where: str) -> bytes:
    """All of a small object.

    Raises:
        OriginError: it is larger than `limit`, or cannot be read.
    """
    if item.size > limit:
        raise OriginError(
            f"{item.path!r} is larger than {limit} bytes", where=where, hint="publish fewer files at once"
        )
    data = bytearray(item.size)
    at = 0
    try:
        if item.size:
            body = reader.open_range(item, 0, item.size)
            while at < item.size:
                at += body.readinto(memoryview(data)[at:])
    finally:
        reader.close()
    return bytes(data)
