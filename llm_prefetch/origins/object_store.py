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
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar
from urllib.parse import quote

from llm_prefetch import settings
from llm_prefetch.errors import (
    OriginAccessError,
    OriginError,
    OriginNotFoundError,
    OriginUnavailableError,
)
from llm_prefetch.origins.base import ObjectInfo, RangeReader
from llm_prefetch.origins.ranged_http import HttpReader
from llm_prefetch.origins.ranged_store import StoreReader

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, RetryConfig, S3Store

SIGNED_FOR = timedelta(hours=6)
_SIGN_AGAIN_SECONDS = 1800.0


class ObjectStoreOrigin(ABC):
    """A prefix of a bucket or container."""

    noun: ClassVar[str] = "bucket"
    absent: ClassVar[str] = "NoSuchBucket"
    """What the origin's answer says when the bucket itself is missing."""
    access_hint: ClassVar[str]
    network_hint: ClassVar[str]
    by_url: bool = True
    """Whether a URL alone opens an object."""

    def __init__(self, uri: str, store: S3Store | GCSStore | AzureStore) -> None:
        """Take a store whose paths begin at the prefix."""
        self.uri = uri
        self._store = store
        self._signed: dict[str, tuple[float, str]] = {}
        self._sign_lock = threading.Lock()

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
            return HttpReader(self._url, self.uri, settings.STALL_SECONDS.get())
        return StoreReader(self._store, self.uri, self._error)

    def write(self, path: str, body: BinaryIO, size: int) -> None:
        """Upload; large bodies go up in parallel parts, and the object shows only when it is complete."""
        import obstore

        try:
            obstore.put(
                self._store, path, body, use_multipart=size > 2**24, chunk_size=2**23, max_concurrency=8
            )
        except Exception as error:
            raise self._error(error) from error

    def _sign(self, path: str) -> str:
        """What obstore signs with the store's credentials."""
        import obstore

        return obstore.sign(self._store, "GET", path, SIGNED_FOR)

    def _url(self, path: str) -> str:
        """A URL that reads `path`, made anew before it can expire."""
        now = time.monotonic()
        with self._sign_lock:
            made, url = self._signed.get(path, (-_SIGN_AGAIN_SECONDS, ""))
            if now - made >= _SIGN_AGAIN_SECONDS:
                try:
                    url = self.make_url(path)
                except Exception as error:
                    raise self._error(error) from error
                self._signed[path] = (now, url)
            return url

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


def client_options(endpoint: str) -> dict[str, Any]:
    """How obstore connects; plain HTTP only to an endpoint that was named with it."""
    options: dict[str, Any] = {"timeout": "300s", "connect_timeout": "10s"}
    if endpoint.startswith("http://"):
        options["allow_http"] = True
    return options


def retry_config() -> RetryConfig:
    """How often obstore tries again by itself."""
    return {"max_retries": 4, "retry_timeout": timedelta(seconds=60)}


def plain_url(root: str, *parts: str) -> str:
    """The URL of an object below `root`, with what a name may hold escaped."""
    return "/".join([root.rstrip("/"), *(quote(part, safe="/~") for part in parts if part)])


def first_line(text: str) -> str:
    """What obstore says, without the internals that it prints below; URLs in it may be signed."""
    return text.partition("\n")[0].partition("?")[0][:200]


def is_set(name: str) -> bool:
    """Whether a variable of a client says yes, in the words that obstore takes for it."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on", "y")


def _quoted(etag: str | None) -> str:
    """`etag` as `If-Match` wants it: Azure lists it without the quotes that it sends with an object."""
    if not etag or etag.endswith('"'):
        return etag or ""
    return f'"{etag}"'
