"""What the object stores share: S3, Google Cloud Storage and Azure Blob Storage, all through obstore.

obstore lists, stats and writes. Ranges are read by the lean reader wherever a URL alone opens an object: signed,
or of a public bucket. Where nothing at hand can sign, which only bearer tokens leave us with, obstore reads the
ranges too and renews the token itself (`StoreReader`).
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar
from urllib.parse import quote

from llm_prefetch import settings
from llm_prefetch.errors import (
    MissingExtraError,
    OriginAccessError,
    OriginError,
    OriginNotFoundError,
    OriginUnavailableError,
    PrefetchError,
)
from llm_prefetch.origins.base import ObjectInfo, RangeReader
from llm_prefetch.origins.ranged_http import HttpReader
from llm_prefetch.origins.ranged_store import StoreReader
from llm_prefetch.origins.stated import Stated
from llm_prefetch.redact import redact, redact_text

if TYPE_CHECKING:
    from http.client import HTTPMessage

    from obstore.store import AzureStore, GCSStore, S3Store

    Store = S3Store | GCSStore | AzureStore

Client = Callable[[str], dict[str, Any]]
"""Gives the options of a store that say how it connects, for the endpoint."""
WHOLE_BYTES = 2**24
"""Uploads up to this size go up in one piece."""
_PART_BYTES = 2**23
_PARTS_AT_ONCE = 6
_LARGE_AT_ONCE = 2
"""Uploads in parts: with the parts under way of more than two, memory would grow beyond what a staging takes."""
_MOST_PARTS = 9000
"""S3 takes 10,000."""
SIGNED_FOR = timedelta(hours=6)
_SIGN_AGAIN_SECONDS = 1800.0


class ObjectStoreOrigin(ABC):
    """A prefix of a bucket or container."""

    extra: ClassVar[str]
    """What to install for it."""
    noun: ClassVar[str] = "bucket"
    absent: ClassVar[str] = "NoSuchBucket"
    """What the origin's answer says when the bucket itself is missing."""
    access_hint: ClassVar[str]
    network_hint: ClassVar[str]
    by_url: bool = True
    """Whether a URL alone opens an object."""
    signs_in_parallel: ClassVar[bool] = False
    """Whether several threads may sign at once."""

    def __init__(self, uri: str, make_store: Callable[[Client], Store]) -> None:
        """Take what makes a store whose paths begin at the prefix."""
        self.uri = uri
        self._make_store = make_store
        self._store = self._open_store(_careful)
        self._read_store: Store | None = None
        self._write_store: Store | None = None
        self._signed: dict[str, tuple[float, str]] = {}
        self._sign_lock = threading.Lock()
        self._uploads = threading.BoundedSemaphore(_LARGE_AT_ONCE)

    @abstractmethod
    def make_url(self, path: str) -> str:
        """A URL that reads `path` for some hours, with no header beside."""

    def list(self) -> Iterator[ObjectInfo]:
        """Every object below the prefix; the empty objects that stand for folders are left out."""
        import obstore

        try:
            for page in obstore.list(self._store):
                for meta in page:
                    if meta["size"] or self.stat(meta["path"]) is not None:
                        yield ObjectInfo(meta["path"], meta["size"], _quoted(meta["e_tag"]))
        except Exception as error:
            raise self._error(error) from error

    def stat(self, path: str) -> ObjectInfo | None:
        """The object at `path`."""
        import obstore

        try:
            meta = obstore.head(self._store, path)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._error(error) from error
        return ObjectInfo(path, meta["size"], _quoted(meta["e_tag"]))

    def read(self, path: str, limit: int) -> bytes:
        """The whole of a small object."""
        import obstore

        try:
            answer = obstore.get(self._store, path)
            if answer.meta["size"] > limit:
                raise OriginError(
                    f"{path!r} is larger than {limit} bytes",
                    where=self.uri,
                    hint="publish fewer files at once",
                )
            return bytes(answer.bytes())
        except Exception as error:
            raise self._error(error) from error

    def reader(self) -> RangeReader:
        """A reader for one thread."""
        if self.by_url:
            return HttpReader(self._url, self.uri, settings.STALL_SECONDS.get(), renew=self._forget_url)
        with self._sign_lock:
            self._read_store = self._read_store or self._open_store(_alert)
        return StoreReader(self._read_store, self.uri, self._error)

    def write(self, path: str, body: BinaryIO, size: int) -> str:
        """Upload; large bodies go up in parallel parts, and the object shows only when it is complete."""
        import obstore

        with self._sign_lock:
            store = self._write_store = self._write_store or self._open_store(_patient)
        large = size > WHOLE_BYTES
        part = max(_PART_BYTES, -(-size // _MOST_PARTS))
        try:
            with self._uploads if large else nullcontext():
                done = obstore.put(
                    store,
                    path,
                    body,
                    use_multipart=large,
                    chunk_size=part,
                    max_concurrency=max(1, _PARTS_AT_ONCE * _PART_BYTES // part),
                )
        except Exception as error:
            raise self._error(error) from error
        return _quoted(done["e_tag"])

    def stated(self, item: ObjectInfo) -> Stated | None:
        """What the origin states about the bytes of `item`, where a URL alone asks for it."""
        if not self.by_url or not item.size:
            return None
        reader = HttpReader(self._url, self.uri, settings.STALL_SECONDS.get())
        try:
            reader.open_range(item, 0, 1)
            return self.read_stated(reader.answered[1]) if reader.answered is not None else None
        finally:
            reader.close()

    def read_stated(self, headers: HTTPMessage) -> Stated | None:  # noqa: ARG002 (others need it)
        """What the headers of an answer state."""
        return None

    def _open_store(self, client: Client) -> Store:
        try:
            return self._make_store(client)
        except PrefetchError:
            raise
        except ImportError as error:
            raise MissingExtraError(
                f"{self.uri.partition('://')[0]}:// needs obstore",
                where=redact(self.uri),
                hint=f"pip install 'llm-prefetch[{self.extra}]'",
            ) from error
        except Exception as error:
            if type(error).__name__ == "TransportError":  # google-auth's
                raise OriginUnavailableError(
                    "nobody answers who gives out tokens",
                    where=redact(self.uri),
                    hint="check the network; stage again",
                ) from error
            raise OriginAccessError(
                f"cannot use the credentials: {first_line(str(error))}",
                where=redact(self.uri),
                hint=self.access_hint,
            ) from error

    def _sign(self, path: str) -> str:
        """What obstore signs with the store's credentials."""
        import obstore

        return obstore.sign(self._store, "GET", path, SIGNED_FOR)

    def _url(self, path: str) -> str:
        """A URL that reads `path`, made anew before it can expire."""
        now = time.monotonic()
        # The first signature may have to find credentials: once, not from every thread.
        with nullcontext() if self.signs_in_parallel and self._signed else self._sign_lock:
            made, url = self._signed.get(path, (-_SIGN_AGAIN_SECONDS, ""))
            if now - made >= _SIGN_AGAIN_SECONDS:
                try:
                    url = self.make_url(path)
                except Exception as error:
                    raise self._error(error) from error
                self._signed[path] = (now, url)
            return url

    def _forget_url(self, path: str) -> None:
        """It was refused as expired: the next one is signed anew."""
        with self._sign_lock:
            self._signed.pop(path, None)

    def _error(self, error: Exception) -> Exception:
        """Error classes of obstore are few, so its text has to tell a missing bucket from a refused key."""
        text = str(error)
        kind = type(error).__name__
        if isinstance(error, OriginError):
            return error
        if isinstance(error, FileNotFoundError) or self.absent in text or "404 Not Found" in text:
            what = f"no such {self.noun}" if self.absent in text else "no such object"
            return OriginNotFoundError(what, where=self.uri, hint=f"check {self.noun} and prefix")
        if kind in ("PermissionDeniedError", "UnauthenticatedError") or " 403 " in text or " 401 " in text:
            return OriginAccessError(
                "the origin refused the credentials", where=self.uri, hint=self.access_hint
            )
        if kind == "InvalidPathError":
            return OriginError(
                f"an object's name cannot be a path: {first_line(text)}",
                where=self.uri,
                hint="copy the objects to plain names",
            )
        return OriginUnavailableError(
            f"the origin failed: {first_line(text)}", where=self.uri, hint=self.network_hint
        )


def _careful(endpoint: str) -> dict[str, Any]:
    """For lists and heads: one that stalls is asked for again."""
    times = {"timeout": "300s", "read_timeout": timedelta(seconds=settings.STALL_SECONDS.get())}
    return {"client_options": _client_options(endpoint, times), "retry_config": _retries()}


def _patient(endpoint: str) -> dict[str, Any]:
    """For uploads: they get no answer for long, so the time is for the whole of a request."""
    return {"client_options": _client_options(endpoint, {"timeout": "300s"}), "retry_config": _retries()}


def _retries() -> dict[str, Any]:
    return {"max_retries": 4, "retry_timeout": timedelta(seconds=60)}


def _alert(endpoint: str) -> dict[str, Any]:
    """For ranges: as long as bytes come, a range may take any time; who reads it tries again."""
    stall = timedelta(seconds=settings.STALL_SECONDS.get())
    times = {"timeout": "1day", "read_timeout": stall}
    return {"client_options": _client_options(endpoint, times), "retry_config": {"max_retries": 0}}


def _client_options(endpoint: str, times: dict[str, Any]) -> dict[str, Any]:
    """Plain HTTP only to an endpoint that was named with it."""
    plain = {"allow_http": True} if endpoint.startswith("http://") else {}
    return {**times, **plain, "connect_timeout": "10s"}


def plain_url(root: str, *parts: str) -> str:
    """The URL of an object below `root`, with what a name may hold escaped."""
    return "/".join([root.rstrip("/"), *(quote(part, safe="/~") for part in parts if part)])


def first_line(text: str) -> str:
    """What obstore says, without the internals that it prints below; URLs in it may be signed."""
    return redact_text(text.partition("\n")[0])[:200]


def is_set(name: str) -> bool:
    """Whether a variable of a client says yes, in the words that obstore takes for it."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on", "y")


def _quoted(etag: str | None) -> str:
    """`etag` as `If-Match` wants it: Azure lists it without the quotes that it sends with an object."""
    if not etag or etag.endswith('"'):
        return etag or ""
    return f'"{etag}"'
