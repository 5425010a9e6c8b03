"""Ranged HTTP reads into a buffer that the caller reuses: the lean reader behind every signed URL.

`http.client` keeps one connection for each reader and hands bytes over by `readinto`, so a range costs no
memory of its own and no copy beyond the kernel's.
"""

from __future__ import annotations

import http.client
import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from urllib.parse import SplitResult, urljoin, urlsplit

from llm_prefetch.errors import OriginAccessError, OriginError, OriginUnavailableError
from llm_prefetch.origins.base import ObjectInfo
from llm_prefetch.origins.http_line import Cutter, Line, open_line
from llm_prefetch.origins.http_refusal import changed, explain, read_refusal
from llm_prefetch.redact import redact_text

_CONTENT_RANGE = re.compile(r"^bytes (\d+)-(\d+)/(\d+)$")
_MOVED = frozenset({301, 302, 303, 307, 308})
_REASON_CHARACTERS = 200
_TUNNEL_REFUSED = re.compile(r"Tunnel connection failed: (40[137]) ")
Signed = tuple[str, Mapping[str, str]]
"""A URL and the headers that must go with it."""


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
        renew: Callable[[str], None] | None = None,
    ) -> None:
        """Take what to ask for and how patient to be.

        Args:
            sign: Gives the URL of a path.
            where: What errors name; never the URL, because a signed URL is a secret.
            stall_seconds: A read that gets no byte for so long fails.
            redirects: How many may be followed; the headers of `sign` are not shown to another host.
            whole: Take the whole object for an answer where the whole was asked for, from a server without ranges.
            renew: Called with a path whose URL expired; `sign` then gives another, which is tried once.
        """
        self._sign = sign
        self._where = where
        self._stall_seconds = stall_seconds
        self._redirects = redirects
        self._whole = whole
        self._renew = renew
        self.answered: tuple[Signed, http.client.HTTPMessage] | None = None
        """Where the last answer came from, after all redirects, and its headers."""
        self._line: Line | None = None
        self._response: http.client.HTTPResponse | None = None
        self._host: tuple[str, str] | None = None
        self._cutter = Cutter()

    def open_range(self, item: ObjectInfo, start: int, length: int) -> HttpBody:
        """Ask for the range and check that the answer is that range of that object."""
        headers = {"Range": f"bytes={start}-{start + length - 1}"}
        if item.etag:
            headers["If-Match"] = item.etag
        response = self._ask_for_range(item, start, length, headers)
        if response.status == HTTPStatus.OK:
            return HttpBody(self, response, length, item.path)
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if match is None or (int(match[1]), int(match[2])) != (start, start + length - 1):
            self._drop()
            if match is not None and int(match[3]) != item.size:
                raise changed(item, int(match[3]), self._where)
            raise OriginUnavailableError(
                f"{item.path!r}: the answer is not the range asked for",
                where=self._where,
                hint="a proxy on the way may be at fault; stage again",
            )
        if int(match[3]) != item.size:
            self._drop()
            raise changed(item, int(match[3]), self._where)
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

    def abort(self, reason: str = "") -> None:
        """End at once, from any thread, what this reader does now or begins next: it becomes a lost connection.

        Args:
            reason: What the error says; by default, that too little came.
        """
        self._cutter.cut(reason)

    def close(self) -> None:
        """Drop the connection; after an `abort`, the reader can be used again."""
        self._drop()
        self._cutter.mend()

    def _ask_for_range(
        self, item: ObjectInfo, start: int, length: int, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        """The answer, if it is a range, or the whole where that is taken; once more when the URL had expired."""
        for renew in (self._renew, None):
            response = self.ask(item.path, headers)
            whole = self._whole and response.status == HTTPStatus.OK
            if response.status == HTTPStatus.PARTIAL_CONTENT or (
                whole and length == item.size == response.length
            ):
                return response
            refusal = read_refusal(response)
            self._drop()
            if renew is None or not refusal.expired:
                raise explain(refusal, item, start, length, self._where)
            renew(item.path)
        raise AssertionError("unreachable")

    def _drop(self) -> None:
        if self._response is not None:
            self._response.close()  # it holds the socket open when the server said that it would close it
        if self._line is not None:
            self._line.connection.close()
        self._cutter.release()
        self._line = self._response = None

    def _moved(self, at: Signed, location: str, path: str) -> Signed:
        """Where a redirect leads, with the headers that may go there."""
        self._drop()
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
            self._drop()  # the rest of an answer that nobody read would stand before the next one
        for attempt in range(2):
            fresh = self._line is None
            line = self._line or self._connect(url)
            try:
                line.connection.request(
                    "GET", line.prefix + target, headers={**headers, **(line.headers or {})}
                )
                response = line.connection.getresponse()
            except (
                http.client.RemoteDisconnected,
                ConnectionResetError,
                BrokenPipeError,
                http.client.CannotSendRequest,
            ):
                if fresh or attempt:
                    raise
                self._drop()
            else:
                self._response = response
                return response
        raise AssertionError("unreachable")

    def _connect(self, url: SplitResult) -> Line:
        self._line = open_line(url, self._stall_seconds, self._cutter)
        self._host = (url.scheme, url.netloc)
        return self._line

    def _lost(self, error: Exception, path: str) -> OriginError:
        """A connection that failed half-way cannot be used again."""
        through = f" through {self._line.through}" if self._line and self._line.through else ""
        aborted = self._cutter.reason
        self.close()
        refused = _TUNNEL_REFUSED.match(str(error))
        if refused:
            return OriginAccessError(
                f"{path!r}: the answer{through} was {refused[1]}",
                where=self._where,
                hint="check the user and the password of HTTPS_PROXY, and what the proxy allows",
            )
        if aborted is not None:
            reason = aborted or f"too little came within {self._stall_seconds:g} s"
        elif isinstance(error, TimeoutError):
            reason = f"no byte for {self._stall_seconds:g} s"
        else:
            reason = redact_text(" ".join(str(error).split()))[:_REASON_CHARACTERS] or type(error).__name__
        return OriginUnavailableError(
            f"{path!r}: the connection{through} failed: {reason}",
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
            self._reader._drop()  # noqa: SLF001
