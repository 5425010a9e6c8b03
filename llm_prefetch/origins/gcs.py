"""`gs://bucket/prefix`: Google Cloud Storage.

| credentials | how ranges are read |
|---|---|
| a service account's key | from URLs that it signs |
| `gs://anonymous@bucket`, `GOOGLE_SKIP_SIGNATURE`, `STORAGE_EMULATOR_HOST`, a key that says `disable_oauth` | from plain URLs |
| any other: workload identity, metadata server, `gcloud auth application-default login`, `GOOGLE_BEARER_TOKEN` | by obstore |

A key is found where obstore looks for it: `GOOGLE_SERVICE_ACCOUNT_KEY`, `GOOGLE_SERVICE_ACCOUNT`,
`GOOGLE_SERVICE_ACCOUNT_PATH`, `GOOGLE_APPLICATION_CREDENTIALS`. For the last row google-auth is asked when it is
installed, because it knows more kinds than obstore. `gcs_base_url` in a key names another endpoint.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from llm_prefetch.errors import (
    OriginAccessError,
    OriginError,
    UnsupportedOriginError,
)
from llm_prefetch.origins.object_store import Client, ObjectStoreOrigin, is_set, plain_url
from llm_prefetch.origins.stated import Stated, from_base64
from llm_prefetch.redact import redact

if TYPE_CHECKING:
    from http.client import HTTPMessage

    from obstore.store import GCSCredentialProvider, GCSStore

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_ENDPOINT = "https://storage.googleapis.com"
SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_KEY_FILES = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_APPLICATION_CREDENTIALS")
_HINT = "check GOOGLE_APPLICATION_CREDENTIALS or the service account of this node"


class GCSOrigin(ObjectStoreOrigin):
    """A prefix of a bucket."""

    extra = "gcs"
    access_hint = _HINT
    network_hint = "check the network, and STORAGE_EMULATOR_HOST if it is set"

    def __init__(self, uri: str) -> None:
        """Take `gs://[anonymous@]bucket/prefix`; nothing is asked of the bucket yet."""
        access = self._access = find_access(uri)
        odd = set(access.prefix) & set("%?#")  # see make_url
        self.by_url = access.plain or ("private_key" in access.key and not odd)
        super().__init__(uri, partial(_open_store, access))

    def make_url(self, path: str) -> str:
        """A URL that the service account's key signs; without a signature for what is public."""
        url = plain_url(self._access.root, self._access.bucket, self._access.prefix, path)
        if self._access.plain:
            return url
        # obstore 0.12.1 signs a name as if it were escaped already, so for some names it has to be.
        for name in (path, quote(path, safe="/~")):
            signed = self._sign(name)
            if unquote(urlsplit(signed).path) == unquote(urlsplit(url).path):
                return signed
        raise OriginError(
            f"{path!r} cannot be signed", where=self.uri, hint="copy the objects to plain names"
        )

    def will_state(self, size: int) -> str:
        """A CRC32C of whatever it is."""
        return "crc32c" if self.by_url and size else ""

    def read_stated(self, headers: HTTPMessage) -> Stated | None:
        """`x-goog-hash: crc32c=...`, of the whole object also where a range was asked for."""
        given = (part.strip() for line in headers.get_all("x-goog-hash", []) for part in line.split(","))
        return next((from_base64("crc32c", part[7:]) for part in given if part.startswith("crc32c=")), None)


@dataclass(frozen=True, slots=True)
class Access:
    """Where a prefix is, and what opens it."""

    bucket: str
    prefix: str
    root: str
    key: dict[str, Any]
    """Of a service account; empty without one."""
    plain: bool
    """No credentials are to be shown."""


def find_access(uri: str) -> Access:
    """What the URI and the environment say together.

    Raises:
        UnsupportedOriginError: `uri` names no bucket.
        OriginAccessError: a key is named and cannot be read.
    """
    authority, _, prefix = uri.removeprefix("gs://").partition("/")
    user, _, bucket = authority.rpartition("@")
    if not _BUCKET.fullmatch(bucket) or user not in ("", "anonymous"):
        raise UnsupportedOriginError("not a GCS URI", where=redact(uri), hint="write gs://bucket/prefix")
    key = _service_account(uri)
    plain = user == "anonymous" or bool(key.get("disable_oauth")) or is_set("GOOGLE_SKIP_SIGNATURE")
    root = str(key.get("gcs_base_url") or os.environ.get("GOOGLE_BASE_URL") or _ENDPOINT)
    return Access(bucket, prefix.strip("/"), root, key, plain)


def _service_account(uri: str) -> dict[str, Any]:
    """The key of a service account, if one is at hand; for an emulator, one that obstore takes for its address."""
    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
        root = emulator if "://" in emulator else f"http://{emulator}"
        names = ("private_key", "private_key_id", "client_email")
        return {**dict.fromkeys(names, ""), "gcs_base_url": root, "disable_oauth": True}
    text = os.environ.get("GOOGLE_SERVICE_ACCOUNT_KEY", "")
    path = next((os.environ[name] for name in _KEY_FILES if os.environ.get(name)), "")
    try:
        found = json.loads(text or (Path(path).read_text() if path else "{}"))
    except (OSError, ValueError) as error:
        raise OriginAccessError(
            f"cannot read the credentials: {type(error).__name__}", where=redact(uri), hint=_HINT
        ) from error
    return found if isinstance(found, dict) and "private_key" in found else {}


def _open_store(access: Access, client: Client) -> GCSStore:
    from obstore.store import GCSStore

    options = client(access.root)
    if access.key:
        options["service_account_key"] = json.dumps(access.key)
    if access.plain:
        options["skip_signature"] = True
    elif not (access.key or os.environ.get("GOOGLE_BEARER_TOKEN")) and (provider := _google_auth()):
        options["credential_provider"] = provider
    return GCSStore(access.bucket, prefix=access.prefix or None, **options)


def _google_auth() -> GCSCredentialProvider | None:
    """What google-auth finds; `None` without it, and obstore looks by itself."""
    try:
        from google.auth import default
        from obstore.auth.google import GoogleCredentialProvider
    except ImportError:
        return None
    # obstore's own default names no scope, and a service account's token without one opens nothing.
    credentials, _ = default(scopes=[SCOPE])
    return GoogleCredentialProvider(credentials)
