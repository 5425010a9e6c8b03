"""`https://`: a prefix that holds a manifest, the address of a manifest, or a single file.

The web has no listing, so what is there is what a manifest says, or the one file that the address names. A
query (a signed address, a SAS token) goes with every request below the prefix, and with no redirect. Plain
`http://` is spoken with this machine only, unless `LLM_PREFETCH_ALLOW_HTTP=1`: without a published manifest
nothing would notice bytes that somebody on the way changed.
"""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import quote, unquote, urlsplit

from llm_prefetch import settings
from llm_prefetch.errors import (
    OriginAccessError,
    OriginError,
    OriginNotFoundError,
    OriginUnavailableError,
    UnsupportedOriginError,
)
from llm_prefetch.origins.base import ObjectInfo
from llm_prefetch.origins.http_refusal import retry_after, shown_reason
from llm_prefetch.origins.located import LocatedReader, Locations, check_plain, open_reader, read_whole
from llm_prefetch.redact import redact

if TYPE_CHECKING:
    from http.client import HTTPMessage, HTTPResponse

    from llm_prefetch.origins.ranged_http import HttpReader, Signed

_MANIFEST_FOLDER = ".llm-prefetch"
_MANIFEST = f"{_MANIFEST_FOLDER}/manifest.json"
_ABSENT = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.GONE})
_REFUSED = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
_HINT = "publish the folder with its manifest, or name a single file"


class HttpsOrigin:
    """A prefix on the web with a manifest, or one file."""

    def __init__(self, uri: str) -> None:
        """Take `https://[user:password@]host/path[?query]`; nothing is asked of the origin yet."""
        self.uri = redact(uri)
        self._base, self._query, self.headers = _parse(uri, self.uri)
        self._manifest = ""
        folder, _, name = self._base.rpartition("/")
        self._file = unquote(name)
        if name == "manifest.json":
            self._manifest, self._file = self._base, ""
            self._base = folder.removesuffix(f"/{_MANIFEST_FOLDER}")
        self._published: bool | None = None
        self._locations = Locations(self._address, self._address)

    def list(self) -> Iterator[ObjectInfo]:
        """The single file that the address names."""
        if not self._file:
            raise self._no_listing()
        found = self._ask(self._file)
        if found is None:
            raise OriginNotFoundError("nothing there, and no manifest below it", where=self.uri, hint=_HINT)
        yield found

    def stat(self, path: str) -> ObjectInfo | None:
        """The object at `path`; a refused manifest is none, for many servers refuse what is not there."""
        if path != _MANIFEST or self._manifest:
            return self._ask(path)
        try:
            found = self._ask(path)
        except (OriginAccessError, OriginNotFoundError):
            found = None
        self._published = found is not None
        return found

    def read(self, path: str, limit: int) -> bytes:
        """The whole of a small object."""
        found = self._ask(path)
        if found is None:
            raise OriginNotFoundError(f"no such file {path!r}", where=self.uri, hint=_HINT)
        return read_whole(self.reader(), found, limit, self.uri)

    def reader(self) -> LocatedReader:
        """A reader for one thread."""
        return LocatedReader(self._locations, self.uri, _same)

    def write(self, path: str, body: BinaryIO, size: int) -> str:  # noqa: ARG002 (others need it)
        """Refuse: the web has no one way to upload."""
        raise UnsupportedOriginError(
            "https:// can only be read",
            where=self.uri,
            hint="publish to the bucket or the folder behind it",
        )

    def _address(self, path: str) -> Signed:
        if path == _MANIFEST and self._manifest:
            url = self._manifest
        elif self._is_the_file(path):
            url = self._base
        else:
            url = f"{self._base.rstrip('/')}/{quote(path, safe='/~')}"
        return f"{url}?{self._query}" if self._query else url, self.headers

    def _is_the_file(self, path: str) -> bool:
        """Whether the address itself is the file; a folder may hold a file of its own name."""
        if path != self._file or self._manifest:
            return False
        if self._published is None:
            self.stat(_MANIFEST)
        return not self._published

    def _ask(self, path: str) -> ObjectInfo | None:
        """Describe one object by its first byte: signed addresses allow a GET, and often not a HEAD."""
        reader = open_reader(self._address, self.uri)
        try:
            response = reader.ask(path, {"Range": "bytes=0-0"})
            if response.status in _ABSENT:
                return None
            size = self._size(response, path)
            if (
                response.status != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
            ):  # it comes with a page that says so
                check_plain(response.headers, path, self.uri)
                self._refuse_page(reader, path)
            return ObjectInfo(path, size, _tag(response.headers))
        finally:
            reader.close()

    def _size(self, response: HTTPResponse, path: str) -> int:
        status, stated = response.status, response.headers.get("Content-Range", "").rpartition("/")[2]
        if status == HTTPStatus.OK and response.length is not None:
            return response.length
        if status == HTTPStatus.PARTIAL_CONTENT and stated.isascii() and stated.isdecimal():
            return int(stated)
        if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return 0  # an empty file has no first byte
        what = f"{path!r}: the origin answered {status} {shown_reason(response)}"
        if status in _REFUSED:
            raise OriginAccessError(
                what, where=self.uri, hint="check the user, the password or the signed address"
            )
        if status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS) or status >= 500:  # noqa: PLR2004
            raise OriginUnavailableError(
                what,
                where=self.uri,
                hint="it may pass; stage again",
                retry_after=retry_after(response.headers),
            )
        if status in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
            what = f"{path!r}: the origin does not say how large it is"
        raise OriginError(what, where=self.uri, hint="the origin must serve plain files")

    def _refuse_page(self, reader: HttpReader, path: str) -> None:
        """Servers answer for a folder, or for anything, with a page; it must not be staged as the model."""
        if reader.answered is None:
            return
        (url, _), headers = reader.answered
        page = headers.get("Content-Type", "").startswith("text/html") and not path.endswith(
            (".html", ".htm")
        )
        if urlsplit(url).path.endswith("/") or page:
            raise self._no_listing()

    def _no_listing(self) -> OriginError:
        return OriginNotFoundError(
            "a web folder cannot be listed, and no manifest is in it", where=self.uri, hint=_HINT
        )


def _parse(uri: str, shown: str) -> tuple[str, str, dict[str, str]]:
    """The address without user info, query and fragment; the query; the headers that log in."""
    authority, slash, rest = uri.partition("://")[2].partition("/")
    user, _, _ = authority.rpartition("@")
    try:
        parts = urlsplit(uri)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port, parts = "", None, urlsplit("")
    if not host or not slash or any(ord(letter) <= ord(" ") for letter in rest) or not rest.isascii():
        raise UnsupportedOriginError(
            "not a web address", where=shown, hint="write https://host/prefix, odd letters escaped as %20"
        )
    if parts.scheme == "http" and not _is_loopback(host) and not settings.ALLOW_HTTP.get():
        raise UnsupportedOriginError(
            "http:// to another host is not protected",
            where=shown,
            hint="write https://, or set LLM_PREFETCH_ALLOW_HTTP=1",
        )
    headers = {}
    if user:
        name, _, password = user.partition(":")
        login = f"{unquote(name)}:{unquote(password)}".encode()
        headers["Authorization"] = f"Basic {base64.b64encode(login).decode()}"
    inside = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{inside}{f':{port}' if port else ''}{parts.path}", parts.query, headers


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _tag(headers: HTTPMessage) -> str:
    """What changes with the bytes, as far as the server says."""
    modified = headers.get("Last-Modified")
    return headers.get("ETag") or (f"modified {modified}" if modified else "")


def _same(item: ObjectInfo, headers: HTTPMessage) -> bool:
    found = _tag(headers)
    return not item.etag or not found or item.etag == found
