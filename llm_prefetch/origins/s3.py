"""`s3://bucket/prefix`: S3 and everything that speaks its API.

obstore lists, stats, writes and signs, with the credentials that it finds in the environment, in a web
identity, in a container or in the instance's metadata; profiles and SSO come through boto3. Ranges are read
from signed URLs by the lean reader. `AWS_ENDPOINT_URL` names another endpoint, `s3://anonymous@bucket/...` a
public bucket.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit

from llm_prefetch import settings
from llm_prefetch.errors import (
    MissingExtraError,
    OriginAccessError,
    OriginError,
    OriginNotFoundError,
    OriginUnavailableError,
    UnsupportedOriginError,
)
from llm_prefetch.origins.base import ObjectInfo
from llm_prefetch.origins.ranged_http import HttpReader
from llm_prefetch.redact import redact

if TYPE_CHECKING:
    from obstore.store import S3Store

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""Anything else makes obstore panic, which no `except Exception` catches."""
_SIGNED_FOR = timedelta(hours=6)
_SIGN_AGAIN_SECONDS = 1800.0


class S3Origin:
    """A prefix of a bucket."""

    def __init__(self, uri: str) -> None:
        """Take `s3://[anonymous@]bucket/prefix`; nothing is asked of the origin yet."""
        authority, _, prefix = uri.removeprefix("s3://").partition("/")
        user, _, bucket = authority.rpartition("@")
        if not _BUCKET.fullmatch(bucket) or user not in ("", "anonymous"):
            raise UnsupportedOriginError("not an S3 URI", where=redact(uri), hint="write s3://bucket/prefix")
        self.uri = uri
        self._anonymous = user == "anonymous"
        self._store = _open_store(bucket, prefix.strip("/"), anonymous=self._anonymous)
        self._signed: dict[str, tuple[float, str]] = {}
        self._sign_lock = threading.Lock()

    def list(self) -> Iterator[ObjectInfo]:
        """Every object below the prefix; the empty objects that stand for folders are left out."""
        import obstore

        try:
            for page in obstore.list(self._store):
                for meta in page:
                    if meta["size"] or self.stat(meta["path"]) is not None:
                        yield ObjectInfo(meta["path"], meta["size"], meta["e_tag"] or "")
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
        return ObjectInfo(path, meta["size"], meta["e_tag"] or "")

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

    def reader(self) -> HttpReader:
        """A reader for one thread."""
        return HttpReader(self._sign, self.uri, settings.STALL_SECONDS.get())

    def write(self, path: str, body: BinaryIO, size: int) -> None:
        """Upload; large bodies go up in parallel parts, and S3 shows the object only when it is complete."""
        import obstore

        try:
            obstore.put(
                self._store, path, body, use_multipart=size > 2**24, chunk_size=2**23, max_concurrency=8
            )
        except Exception as error:
            raise self._error(error) from error

    def _sign(self, path: str) -> str:
        """A URL that reads `path`, signed anew before it can expire."""
        import obstore

        now = time.monotonic()
        with self._sign_lock:
            made, url = self._signed.get(path, (-_SIGN_AGAIN_SECONDS, ""))
            if now - made >= _SIGN_AGAIN_SECONDS:
                try:
                    url = obstore.sign(self._store, "GET", path, _SIGNED_FOR)
                except Exception as error:
                    raise self._error(error) from error
                if self._anonymous:
                    url = urlsplit(url)._replace(query="").geturl()
                self._signed[path] = (now, url)
            return url

    def _error(self, error: Exception) -> Exception:
        """Error classes of obstore are few, so its text has to tell a missing bucket from a refused key."""
        text = str(error)
        kind = type(error).__name__
        if isinstance(error, OriginError):
            return error
        if isinstance(error, FileNotFoundError) or "NoSuchBucket" in text or "404 Not Found" in text:
            what = "no such bucket" if "NoSuchBucket" in text else "no such object"
            return OriginNotFoundError(what, where=self.uri, hint="check bucket and prefix")
        if kind in ("PermissionDeniedError", "UnauthenticatedError") or " 403 " in text or " 401 " in text:
            return OriginAccessError(
                "the origin refused the credentials",
                where=self.uri,
                hint="check AWS_* or the role of this node",
            )
        if kind == "InvalidPathError":
            return OriginError(
                f"an object's name cannot be a path: {_first_line(text)}",
                where=self.uri,
                hint="copy the objects to plain names",
            )
        return OriginUnavailableError(
            f"the origin failed: {_first_line(text)}",
            where=self.uri,
            hint="check AWS_ENDPOINT_URL and the network",
        )


def _open_store(bucket: str, prefix: str, *, anonymous: bool) -> S3Store:
    try:
        from obstore.store import S3Store
    except ImportError as error:
        raise MissingExtraError(
            "s3:// needs obstore", where=f"s3://{bucket}", hint="pip install 'llm-prefetch[s3]'"
        ) from error
    options: dict[str, Any] = {}
    if anonymous:
        # Signing needs some key, or obstore asks the instance's metadata for one; the signature is cut off.
        options["config"] = {
            "skip_signature": True,
            "access_key_id": "anonymous",
            "secret_access_key": "anonymous",
        }
    elif _has_profile():
        from obstore.auth.boto3 import Boto3CredentialProvider

        options["credential_provider"] = Boto3CredentialProvider()
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    client: dict[str, Any] = {"timeout": "300s", "connect_timeout": "10s"}
    if endpoint.startswith("http://"):
        client["allow_http"] = True
    if endpoint:
        options["endpoint"] = endpoint
    retry: dict[str, Any] = {"max_retries": 4, "retry_timeout": timedelta(seconds=60)}
    return S3Store(bucket, prefix=prefix or None, client_options=client, retry_config=retry, **options)  # type: ignore[arg-type]


def _has_profile() -> bool:
    """Whether boto3 would read a credentials file that obstore does not know."""
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return False
    if os.environ.get("AWS_PROFILE"):
        return True
    return Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser().is_file()


def _first_line(text: str) -> str:
    """What obstore says, without the internals that it prints below; URLs in it may be signed."""
    return text.partition("\n")[0].partition("?")[0][:200]
