"""`s3://bucket/prefix`: S3 and everything that speaks its API.

obstore lists, stats, writes and signs, with the credentials that it finds in the environment, in a web
identity, in a container or in the instance's metadata; profiles and SSO come through boto3. Ranges are read
from signed URLs by the lean reader. `AWS_ENDPOINT_URL` names another endpoint, `s3://anonymous@bucket/...` a
public bucket.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from llm_prefetch import settings
from llm_prefetch.errors import UnsupportedOriginError
from llm_prefetch.origins.base import ObjectInfo
from llm_prefetch.origins.general_errors import raise_ours
from llm_prefetch.origins.object_store import Client, ObjectStoreOrigin
from llm_prefetch.origins.stated import Stated, from_s3
from llm_prefetch.redact import redact

if TYPE_CHECKING:
    from obstore.store import S3Store

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""Anything else makes obstore panic, which no `except Exception` catches."""


class S3Origin(ObjectStoreOrigin):
    """A prefix of a bucket."""

    extra = "s3"
    access_hint = "check AWS_* or the role of this node"
    network_hint = "check AWS_ENDPOINT_URL and the network"
    signs_in_parallel = True

    def __init__(self, uri: str) -> None:
        """Take `s3://[anonymous@]bucket/prefix`; nothing is asked of the origin yet."""
        self._bucket, self._prefix, self._anonymous = parse(uri)
        self._boto: Any = None
        self._boto_lock = threading.Lock()
        super().__init__(uri, partial(_open_store, self._bucket, self._prefix, anonymous=self._anonymous))

    def make_url(self, path: str) -> str:
        """A signed URL; without the signature for a public bucket."""
        url = self._sign(path)
        return urlsplit(url)._replace(query="").geturl() if self._anonymous else url

    def stated(self, item: ObjectInfo) -> Stated | None:
        """What boto3 is told: obstore shows no checksum. Nothing without boto3, or for a public bucket."""
        if self._anonymous or not item.size:
            return None
        try:
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError:
            return None
        try:
            with self._boto_lock:
                self._boto = self._boto or _boto_client()
            key = f"{self._prefix}/{item.path}".lstrip("/")
            return from_s3(self._boto.head_object(Bucket=self._bucket, Key=key, ChecksumMode="ENABLED"))
        except (BotoCoreError, ClientError) as error:
            raise_ours(error, self.uri)


def parse(uri: str) -> tuple[str, str, bool]:
    """The bucket, the prefix, and whether to ask without credentials.

    Raises:
        UnsupportedOriginError: `uri` names no bucket.
    """
    authority, _, prefix = uri.removeprefix("s3://").partition("/")
    user, _, bucket = authority.rpartition("@")
    if not _BUCKET.fullmatch(bucket) or user not in ("", "anonymous"):
        raise UnsupportedOriginError("not an S3 URI", where=redact(uri), hint="write s3://bucket/prefix")
    return bucket, prefix.strip("/"), user == "anonymous"


def endpoint() -> str:
    """The endpoint that the environment names; empty for Amazon's own."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def _boto_client() -> Any:  # noqa: ANN401 (boto3 has no types)
    import boto3
    from botocore.config import Config

    config = Config(
        s3={"addressing_style": "path"} if endpoint() else {},
        max_pool_connections=settings.CONCURRENCY.get(),
        connect_timeout=10,
        read_timeout=settings.STALL_SECONDS.get(),
    )
    region = os.environ.get("AWS_REGION") or None  # boto3 knows only AWS_DEFAULT_REGION
    return boto3.client("s3", endpoint_url=endpoint() or None, region_name=region, config=config)


def _open_store(bucket: str, prefix: str, client: Client, *, anonymous: bool) -> S3Store:
    from obstore.store import S3Store

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
    if at := endpoint():
        options["endpoint"] = at
    with _bundle_of_boto3():
        return S3Store(bucket, prefix=prefix or None, **client(at), **options)


@contextlib.contextmanager
def _bundle_of_boto3() -> Iterator[None]:
    """What obstore trusts it takes from `SSL_CERT_FILE` when a store is made; `AWS_CA_BUNDLE` is boto3's name for it."""
    bundle = os.environ.get("AWS_CA_BUNDLE")
    if not bundle or "SSL_CERT_FILE" in os.environ:
        yield
        return
    os.environ["SSL_CERT_FILE"] = bundle
    try:
        yield
    finally:
        os.environ.pop("SSL_CERT_FILE", None)


def _has_profile() -> bool:
    """Whether boto3 would read a credentials file that obstore does not know."""
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return False
    if os.environ.get("AWS_PROFILE"):
        return True
    return Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser().is_file()
