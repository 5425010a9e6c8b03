"""`abfss://container@account.dfs.core.windows.net/prefix`, `az://container/prefix`: Azure Blob Storage.

| credentials | how ranges are read |
|---|---|
| the account's key: `AZURE_STORAGE_ACCOUNT_KEY`, a connection string, the emulator's | from URLs with a token that it signs |
| `AZURE_STORAGE_SAS_TOKEN`, or one in a connection string | from URLs that end with it |
| `AZURE_SKIP_SIGNATURE`: a public container | from plain URLs |
| any other: workload or managed identity, a service principal, `az login`, `AZURE_STORAGE_TOKEN` | by obstore |

For the last row azure-identity is asked when it is installed, because it knows more kinds than obstore.
`AZURE_STORAGE_ENDPOINT`, a connection string or `AZURE_STORAGE_USE_EMULATOR` names another endpoint. The account is
the URI's, or else `AZURE_STORAGE_ACCOUNT_NAME`.
"""

from __future__ import annotations

import base64
import hmac
import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from llm_prefetch.errors import UnsupportedOriginError
from llm_prefetch.origins.object_store import (
    SIGNED_FOR,
    WHOLE_BYTES,
    Client,
    ObjectStoreOrigin,
    is_set,
    plain_url,
)
from llm_prefetch.origins.stated import Stated, from_base64
from llm_prefetch.redact import redact

if TYPE_CHECKING:
    from http.client import HTTPMessage

    from obstore.store import AzureCredentialProvider, AzureStore

_CONTAINER = re.compile(r"[A-Za-z0-9$][A-Za-z0-9-]{0,62}")
_HOST = re.compile(r"([a-z0-9-]{1,63})\.(?:dfs|blob)\.([a-z0-9-]+(?:\.[a-z0-9-]+)+)")
_EMULATOR = "devstoreaccount1"
# Not a secret: every emulator has it, and Microsoft's documentation prints it.
_EMULATOR_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class AzureOrigin(ObjectStoreOrigin):
    """A prefix of a container."""

    extra = "azure"
    noun = "container"
    absent = "ContainerNotFound"
    access_hint = "check AZURE_STORAGE_* or the identity of this node"
    network_hint = "check the account's name, AZURE_STORAGE_ENDPOINT and the network"

    def __init__(self, uri: str) -> None:
        """Take `scheme://container[@host]/prefix`; nothing is asked of the origin yet."""
        container, prefix, self._account = find_account(uri)
        self._parts = (container, prefix)
        self.by_url = bool(self._account.key or self._account.sas or self._account.plain)
        super().__init__(uri, partial(_open_store, self._parts, self._account))

    def make_url(self, path: str) -> str:
        """A URL that the account's key signs, or that ends with the token that is all we have."""
        url = plain_url(self._account.endpoint, *self._parts, path)
        if self._account.plain:
            return url
        return f"{url}?{self._account.sas or _sign(self._account, self._parts[0])}"

    def will_state(self, size: int) -> str:
        """An MD5 of what goes up in one piece."""
        return "md5" if self.by_url and 0 < size <= WHOLE_BYTES else ""

    def read_stated(self, headers: HTTPMessage) -> Stated | None:
        """`x-ms-blob-content-md5`, of the whole blob where a range was asked for."""
        return from_base64("md5", headers.get("x-ms-blob-content-md5", ""))


@dataclass(frozen=True, slots=True)
class Account:
    """Where an account is, and what opens it: its key, a token, nothing (`plain`), or else an identity."""

    name: str
    endpoint: str
    key: str
    sas: str
    plain: bool


def find_account(uri: str) -> tuple[str, str, Account]:
    """The container, the prefix and the account that the URI and the environment name together.

    Raises:
        UnsupportedOriginError: `uri` names no container, or nothing names the account.
    """
    authority, _, prefix = uri.partition("://")[2].partition("/")
    container, _, host = authority.partition("@")
    match = _HOST.fullmatch(host)
    if not _CONTAINER.fullmatch(container) or (host and match is None):
        raise UnsupportedOriginError(
            "not an Azure URI",
            where=redact(uri),
            hint="write abfss://container@account.dfs.core.windows.net/prefix or az://container/prefix",
        )
    return container, prefix.strip("/"), _account(uri, *(match.groups() if match else ("", "")))


def _account(uri: str, name: str, domain: str) -> Account:
    """Where the account is and what opens it: the URI goes before the environment, a variable before a string."""
    plain = is_set("AZURE_SKIP_SIGNATURE")
    if is_set("AZURE_STORAGE_USE_EMULATOR"):
        root = os.environ.get("AZURITE_BLOB_STORAGE_URL") or "http://127.0.0.1:10000"
        return Account(_EMULATOR, f"{root.rstrip('/')}/{_EMULATOR}", _EMULATOR_KEY, "", plain)
    given = _connection_string()
    name = name or _env("AZURE_STORAGE_ACCOUNT_NAME") or given.get("accountname", "")
    if not name:
        raise UnsupportedOriginError(
            "the URI names no account",
            where=redact(uri),
            hint="set AZURE_STORAGE_ACCOUNT_NAME or write abfss://container@account.dfs.core.windows.net/prefix",
        )
    domain = domain or given.get("endpointsuffix", "core.windows.net")
    if given.get("accountname", name) != name:
        given = {}  # it speaks of another account
    endpoint = (
        _env("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
        or given.get("blobendpoint")
        or f"https://{name}.blob.{domain}"
    )
    key = _env("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY")
    sas = _env("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY")
    if not (key or sas):
        key, sas = given.get("accountkey", ""), given.get("sharedaccesssignature", "")
    return Account(name, endpoint.rstrip("/"), key, "" if key else sas.lstrip("?"), plain)


def _sign(account: Account, container: str) -> str:
    """A token that reads every object of the container.

    Not obstore's: it signs one object's escaped path where the service signs the plain one, so that 0.12.1 gives URLs
    that are refused for any name with a blank, a percent sign or an umlaut.
    """
    fields = {
        "sp": "r",
        "se": (datetime.now(UTC) + SIGNED_FOR).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "spr": "https" if account.endpoint.startswith("https:") else "https,http",
        "sv": "2020-12-06",
        "sr": "c",
    }
    # Microsoft's order: permissions, start, expiry, resource, identifier, IP range, protocol, version, kind; then
    # snapshot, encryption scope and five response headers, which we leave empty.
    text = [fields["sp"], "", fields["se"], f"/blob/{account.name}/{container}", "", "", fields["spr"]]
    text += [fields["sv"], fields["sr"], *[""] * 7]
    digest = hmac.digest(base64.b64decode(account.key), "\n".join(text).encode(), "sha256")
    return urlencode({**fields, "sig": base64.b64encode(digest).decode()})


def _connection_string() -> dict[str, str]:
    pairs = (part.partition("=") for part in _env("AZURE_STORAGE_CONNECTION_STRING").split(";"))
    return {name.strip().lower(): value.strip() for name, _, value in pairs if value}


def _open_store(parts: tuple[str, str], account: Account, client: Client) -> AzureStore:
    from obstore.store import AzureStore

    container, prefix = parts
    # The emulator is an endpoint like any other here; what obstore makes of the variable would differ from our URLs.
    options: dict[str, Any] = {
        "account_name": account.name,
        "endpoint": account.endpoint,
        "use_emulator": False,
        **client(account.endpoint),
    }
    if account.plain:
        options["skip_signature"] = True
    elif account.key:
        options["account_key"] = account.key
    elif account.sas:
        options["sas_key"] = account.sas
    elif not _env("AZURE_STORAGE_TOKEN", "AZURE_STORAGE_CLIENT_ID") and (provider := _azure_identity()):
        options["credential_provider"] = provider
    return AzureStore(container, prefix=prefix or None, **options)


def _azure_identity() -> AzureCredentialProvider | None:
    """What azure-identity finds; `None` without it, and obstore looks by itself."""
    try:
        from obstore.auth.azure import AzureCredentialProvider
    except ImportError:
        return None
    return AzureCredentialProvider()


def _env(*names: str) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")
