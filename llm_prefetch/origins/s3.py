"""`s3://bucket/prefix`: S3 and everything that speaks its API.

obstore lists, stats, writes and signs, with the credentials that it finds in the environment, in a web
identity, in a container or in the instance's metadata; profiles and SSO come through boto3. Ranges are read
from signed URLs by the lean reader. `AWS_ENDPOINT_URL` names another endpoint, `s3://anonymous@bucket/...` a
public bucket.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from llm_prefetch.errors import MissingExtraError, UnsupportedOriginError
from llm_prefetch.origins.object_store import ObjectStoreOrigin, client_options, retry_config
from llm_prefetch.redact import redact

if TYPE_CHECKING:
    from obstore.store import S3Store

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""Anything else makes obstore panic, which no `except Exception` catches."""


class S3Origin(ObjectStoreOrigin):
    """A prefix of a bucket."""

    access_hint = "check AWS_* or the role of this node"
    network_hint = "check AWS_ENDPOINT_URL and the network"

    def __init__(self, uri: str) -> None:
        """Take `s3://[anonymous@]bucket/prefix`; nothing is asked of the origin yet."""
        authority, _, prefix = uri.removeprefix("s3://").partition("/")
        user, _, bucket = authority.rpartition("@")
        if not _BUCKET.fullmatch(bucket) or user not in ("", "anonymous"):
            raise UnsupportedOriginError("not an S3 URI", where=redact(uri), hint="write s3://bucket/prefix")
        self._anonymous = user == "anonymous"
        super().__init__(uri, _open_store(bucket, prefix.strip("/"), anonymous=self._anonymous))

    def make_url(self, path: str) -> str:
        """A signed URL; without the signature for a public bucket."""
        url = self._sign(path)
        return urlsplit(url)._replace(query="").geturl() if self._anonymous else url


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
    if endpoint:
        options["endpoint"] = endpoint
    options["client_options"] = client_options(endpoint)
    return S3Store(bucket, prefix=prefix or None, retry_config=retry_config(), **options)


def _has_profile() -> bool:
    """Whether boto3 would read a credentials file that obstore does not know."""
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return False
    if os.environ.get("AWS_PROFILE"):
        return True
    return Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser().is_file()
