"""Ranged HTTP reads into a buffer that the caller reuses: the lean reader behind every signed URL.

`http.client` keeps one connection for each reader and hands bytes over by `readinto`, so a range costs no
memory of its own and no copy beyond the kernel's.
"""

from __future__ import annotations

import http.client
import re
import ssl
from collections.abc import Callable, Mapping
from functools import lru_cache
from http import HTTPStatus
from urllib.parse import SplitResult, urljoin, urlsplit

from llm_prefetch.errors import (
    OriginAccessError,
    OriginChangedError,
    OriginError,
    OriginNotFoundError,
    OriginUnavailableError,
)
from llm_prefetch.origins.base import ObjectInfo

_CONTENT_RANGE = re.compile(r"^bytes (\d+)-(\d+)/(\d+)$")
_MOVED = frozenset({301, 302, 303, 307, 308})
Signed = tuple[str, Mapping[str, str]]
"""A URL and the headers that must go with it."""
_OVERLOADED = frozenset({408, 425, 429, 500, 502, 503, 504})


class HttpReader:
    """Reads ranges of objects for which `sign` gives a URL, or a URL and the headers that go with it."""

    def __init__(
        self,
        sign: Callable[[str], str | Signed],
        where: str,
        stall_seconds: float,
        *,
        redirects: int = 0,
        whole: bool = False,
    ) -> None:
        """Take what to ask for and how patient to be.

        Args:
            sign: Gives the URL of a path.
            where: What errors name; never the URL, because a signed URL is a secret.
            stall_seconds: A read that gets no byte for so long fails.
            redirects: How many may be followed; the headers of `sign` are not shown to another host.
            whole: Take the whole object for an answer where the whole was asked for, from a server without ranges.
        """
        self._sign = sign
        self._where = where
        self._stall_seconds = stall_seconds
        self._redirects = redirects
        self._whole = whole
        self.answered: tuple[Signed, http.client.HTTPMessage] | None = None
        """Where the last answer came from, after all redirects, and its headers."""
        self._connection: http.client.HTTPConnection | None = None
        self._response: http.client.HTTPResponse | None = None
        self._host: tuple[str, str] | None = None

    def open_range(self, item: ObjectInfo, start: int, length: int) -> HttpBody:
        """Ask for the range and check that the answer is that range of that object."""
        headers = {"Range": f"bytes={start}-{start + length - 1}"}
        if item.etag:
            headers["If-Match"] = item.etag
        response = self.ask(item.path, headers)
        if self._whole and response.status == HTTPStatus.OK and length == item.size == response.length:
            return HttpBody(self, response, length, item.path)
        if response.status != HTTPStatus.PARTIAL_CONTENT:
            raise self._refused(response, item, start, length)
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if match is None or (int(match[1]), int(match[2])) != (start, start + length - 1):
            self.close()
            if match is not None and int(match[3]) != item.size:
                raise self._changed(item, int(match[3]))
            raise OriginUnavailableError(
                f"{item.path!r}: the answer is not the range asked for",
                where=self._where,
                hint="a proxy on the way may be at fault; stage again",
            )
        if int(match[3]) != item.size:
            self.close()
            raise self._changed(item, int(match[3]))
        return HttpBody(self, response, length, item.path)

    def ask(self, path: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        """Ask for `path`, following redirects; the caller judges the answer and reads or closes it."""
        signed = self._sign(path)
        at: Signed = (signed, {}) if isinstance(signed, str) else signed
        try:
            for _ in range(self._redirects):
                response = self._request(urlsplit(at[0]), {**headers, **at[1]})
                location = response.headers.get("Location")
                if response.status not in _MOVED or location is None:
                    break
                at = self._moved(at, location, path)
            else:
                response = self._request(urlsplit(at[0]), {**headers, **at[1]})
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error, path) from error
        self.answered = (at, response.headers)
        return response

    def close(self) -> None:
        """Drop the connection."""
        if self._response is not None:
            self._response.close()  # it holds the socket open when the server said that it would close it
        if self._connection is not None:
            self._connection.close()
        self._connection = self._response = None

    def _moved(self, at: Signed, location: str, path: str) -> Signed:
        """Where a redirect leads, with the headers that may go there."""
        self.close()
        try:
            old, new = urlsplit(at[0]), urlsplit(urljoin(at[0], location))
            here, there = ((url.scheme, url.hostname, url.port) for url in (old, new))
        except ValueError:  # a port that is no number
            new, here, there = urlsplit(""), ("", None, None), ("", None, None)
        if (
            not new.hostname
            or new.scheme not in ("http", "https")
            or (old.scheme, new.scheme) == ("https", "http")
        ):
            raise OriginError(
                f"{path!r}: the origin redirects to where it must not",
                where=self._where,
                hint="name the address that holds the file",
            )
        host = new.netloc.rpartition("@")[2]
        return new._replace(netloc=host, fragment="").geturl(), at[1] if here == there else {}

    def _request(self, url: SplitResult, headers: dict[str, str]) -> http.client.HTTPResponse:
        """Send on the open connection; once more on a new one when the server had closed it meanwhile."""
        target = f"{url.path}?{url.query}" if url.query else url.path
        given_up = self._response is not None and not self._response.isclosed()
        if given_up or self._host != (url.scheme, url.netloc):
            self.close()  # the rest of an answer that nobody read would stand before the next one
        for attempt in range(2):
            fresh = self._connection is None
            connection = self._connection or self._connect(url)
            try:
                connection.request("GET", target, headers=headers)
                response = connection.getresponse()
            except (
                http.client.RemoteDisconnected,
                ConnectionResetError,
                BrokenPipeError,
                http.client.CannotSendRequest,
            ):
                self.close()
                if fresh or attempt:
                    raise
            else:
                self._response = response
                return response
        raise AssertionError("unreachable")

    def _connect(self, url: SplitResult) -> http.client.HTTPConnection:
        host = url.hostname or ""
        if url.scheme == "https":
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, url.port, timeout=self._stall_seconds, context=_tls()
            )
        else:
            connection = http.client.HTTPConnection(host, url.port, timeout=self._stall_seconds)
        self._connection, self._host = connection, (url.scheme, url.netloc)
        return connection

    def _refused(
        self, response: http.client.HTTPResponse, item: ObjectInfo, start: int, length: int
    ) -> OriginError:
        status = response.status
        self.close()
        what = f"{item.path!r}: the origin answered {status} {response.reason}"
        if status == HTTPStatus.NOT_FOUND:
            return OriginNotFoundError(
                f"{item.path!r} is not there", where=self._where, hint="publish the folder again"
            )
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return OriginAccessError(
                what, where=self._where, hint="check the credentials of this node and the bucket policy"
            )
        if status in (HTTPStatus.PRECONDITION_FAILED, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE):
            return OriginChangedError(
                f"{item.path!r} changed at the origin: bytes {start}-{start + length - 1} of {item.size} are gone",
                where=self._where,
                hint="publish the folder again, then stage",
            )
        if status == HTTPStatus.OK and response.length not in (None, item.size):
            return self._changed(item, response.length or 0)
        if status in _OVERLOADED:
            return OriginUnavailableError(what, where=self._where, hint="it may pass; stage again")
        return OriginError(what, where=self._where, hint="the origin must serve ranges of this object")

    def _changed(self, item: ObjectInfo, found: int) -> OriginChangedError:
        return OriginChangedError(
            f"{item.path!r} has {found} bytes at the origin where {item.size} were expected",
            where=self._where,
            hint="publish the folder again, then stage",
        )

    def _lost(self, error: Exception, path: str) -> OriginUnavailableError:
        """A connection that failed half-way cannot be used again."""
        self.close()
        if isinstance(error, TimeoutError):
            reason = f"no byte for {self._stall_seconds:g} s"
        else:
            reason = " ".join(str(error).split()) or type(error).__name__
        return OriginUnavailableError(
            f"{path!r}: the connection failed: {reason}",
            where=self._where,
            hint="check the endpoint, then stage again",
        )


class HttpBody:
    """The body of one range."""

    def __init__(
        self, reader: HttpReader, response: http.client.HTTPResponse, length: int, path: str
    ) -> None:
        """Read `length` bytes from `response`."""
        self._reader, self._response, self._left, self._path = reader, response, length, path

    def readinto(self, buffer: memoryview, /) -> int:
        """Read the next bytes; an answer that ends early is an error, not an end."""
        if not self._left:
            return 0
        try:
            count = self._response.readinto(buffer[: self._left])
        except (OSError, http.client.HTTPException) as error:
            raise self._reader._lost(error, self._path) from error  # noqa: SLF001 (the two are one unit)
        if count == 0:
            cut = http.client.IncompleteRead(b"", self._left)
            raise self._reader._lost(cut, self._path)  # noqa: SLF001
        self._left -= count
        if not self._left:
            self._finish()
        return count

    def _finish(self) -> None:
        """Read the end of the message, so that the connection is free for the next range."""
        try:
            more = self._response.read(1)
        except (OSError, http.client.HTTPException):
            more = b"?"
        if more:
            self._reader.close()


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
