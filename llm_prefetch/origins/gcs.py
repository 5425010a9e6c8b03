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
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from llm_prefetch.errors import (
    MissingExtraError,
    OriginAccessError,
    OriginError,
    OriginUnavailableError,
    UnsupportedOriginError,
)
from llm_prefetch.origins.object_store import (
    ObjectStoreOrigin,
    client_options,
    first_line,
    is_set,
    plain_url,
    retry_config,
)
from llm_prefetch.redact import redact

if TYPE_CHECKING:
    from obstore.store import GCSCredentialProvider, GCSStore

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_ENDPOINT = "https://storage.googleapis.com"
_KEY_FILES = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_APPLICATION_CREDENTIALS")
_HINT = "check GOOGLE_APPLICATION_CREDENTIALS or the service account of this node"


class GCSOrigin(ObjectStoreOrigin):
    """A prefix of a bucket."""

    access_hint = _HINT
    network_hint = "check the network, and STORAGE_EMULATOR_HOST if it is set"

    def __init__(self, uri: str) -> None:
        """Take `gs://[anonymous@]bucket/prefix`; nothing is asked of the bucket yet."""
        authority, _, prefix = uri.removeprefix("gs://").partition("/")
        user, _, bucket = authority.rpartition("@")
        if not _BUCKET.fullmatch(bucket) or user not in ("", "anonymous"):
            raise UnsupportedOriginError("not a GCS URI", where=redact(uri), hint="write gs://bucket/prefix")
        key = _service_account(uri)
        plain = user == "anonymous" or bool(key.get("disable_oauth")) or is_set("GOOGLE_SKIP_SIGNATURE")
        self._root = str(key.get("gcs_base_url") or os.environ.get("GOOGLE_BASE_URL") or _ENDPOINT)
        self._parts = (bucket, prefix.strip("/"))
        self._plain = plain
        self.by_url = plain or ("private_key" in key and not set(prefix) & set("%?#"))  # see make_url
        super().__init__(uri, _open_store(uri, self._parts, key, self._root, plain=plain))

    def make_url(self, path: str) -> str:
        """A URL that the service account's key signs; without a signature for what is public."""
        url = plain_url(self._root, *self._parts, path)
        if self._plain:
            return url
        # obstore 0.12.1 signs a name as if it were escaped already, so for some names it has to be.
        for name in (path, quote(path, safe="/~")):
            signed = self._sign(name)
            if unquote(urlsplit(signed).path) == unquote(urlsplit(url).path):
                return signed
        raise OriginError(
            f"{path!r} cannot be signed", where=self.uri, hint="copy the objects to plain names"
        )


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


def _open_store(uri: str, parts: tuple[str, str], key: dict[str, Any], root: str, *, plain: bool) -> GCSStore:
    try:
        from obstore.store import GCSStore
    except ImportError as error:
        raise MissingExtraError(
            "gs:// needs obstore", where=redact(uri), hint="pip install 'llm-prefetch[gcs]'"
        ) from error
    bucket, prefix = parts
    options: dict[str, Any] = {"client_options": client_options(root), "retry_config": retry_config()}
    if key:
        options["service_account_key"] = json.dumps(key)
    if plain:
        options["skip_signature"] = True
    try:
        if not (key or plain or os.environ.get("GOOGLE_BEARER_TOKEN")) and (provider := _google_auth()):
            options["credential_provider"] = provider
        return GCSStore(bucket, prefix=prefix or None, **options)
    except Exception as error:
        if type(error).__name__ == "TransportError":  # google-auth's
            raise OriginUnavailableError(
                "nobody answers who gives out tokens",
                where=redact(uri),
                hint="check the network; stage again",
            ) from error
        raise OriginAccessError(
            f"cannot use the credentials: {first_line(str(error))}", where=redact(uri), hint=_HINT
        ) from error


def _google_auth() -> GCSCredentialProvider | None:
    """What google-auth finds; `None` without it, and obstore looks by itself."""
    try:
        from google.auth import default
        from obstore.auth.google import GoogleCredentialProvider
    except ImportError:
        return None
    # obstore's own default names no scope, and a service account's token without one opens nothing.
    credentials, _ = default(scopes=["https://www.googleapis.com/auth/devstorage.read_write"])
    return GoogleCredentialProvider(credentials)
