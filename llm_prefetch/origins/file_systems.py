"""fsspec's file systems, opened with the same environment that obstore's side reads.

| scheme | file system | credentials |
|---|---|---|
| `s3://` | s3fs | what botocore finds; `AWS_ENDPOINT_URL`; `s3://anonymous@bucket` |
| `gs://` | gcsfs | as in `origins.gcs`: a key, a bearer token, what google-auth finds, or none |
| `abfss://`, `az://`, `azure://` | adlfs | as in `origins.azure`, but for `AZURE_STORAGE_TOKEN`, which adlfs cannot take |
| any other | the one that fsspec knows for it | what the URL says, and what that file system finds by itself |

No file system is shared with the rest of the process, and none keeps listings: a staging must see what is there.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from llm_prefetch import settings
from llm_prefetch.errors import MissingExtraError, UnsupportedOriginError
from llm_prefetch.origins import azure, gcs, local, s3
from llm_prefetch.redact import redact

_CONNECT_SECONDS = 10
_FRESH = {"use_listings_cache": False, "skip_instance_cache": True}


@dataclass(frozen=True, slots=True)
class Place:
    """A file system, and the path in it where a prefix begins."""

    fs: Any
    root: str
    again: Callable[[], Any]
    """Makes another of the same, for a thread that must have its own."""
    whole: bool
    """Whether an object shows only when all of it was written."""


def open_place(uri: str) -> Place:
    """The file system that `uri` leads to.

    Raises:
        UnsupportedOriginError: fsspec does not know the scheme, or the URI is not one of it.
        MissingExtraError: what speaks it is not installed.
    """
    scheme = uri.partition("://")[0]
    if "::" in uri:
        raise UnsupportedOriginError(
            "a chain of file systems", where=f"{scheme}://...", hint="name one folder of one file system"
        )
    kind = find_class(scheme, redact(uri))
    options = {"s3": _s3, "gs": _gcs, "az": _azure, "azure": _azure, "abfss": _azure}.get(scheme)
    if options is not None:
        root, given = options(uri)
        make = partial(kind, **given, **_FRESH)
    elif scheme == "file":
        root, make = local.parse(uri), partial(kind, **_FRESH)
    else:
        root, given = kind._strip_protocol(uri), kind._get_kwargs_from_urls(uri)  # noqa: SLF001 (fsspec's own way to open a URL)
        make = partial(kind, **{**_FRESH, **given})
    return Place(make(), root.rstrip("/"), make, options is not None)


def has_fsspec() -> bool:
    """Whether fsspec is installed."""
    return importlib.util.find_spec("fsspec") is not None


def find_class(scheme: str, where: str) -> Any:  # noqa: ANN401 (fsspec has no types)
    """The class that speaks `scheme`.

    Raises:
        UnsupportedOriginError: fsspec does not know it.
        MissingExtraError: it is not installed.
    """
    # Without this, gcsfs asks an endpoint that is not Google's by gRPC, and waits a minute for no answer.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        from fsspec.registry import get_filesystem_class, known_implementations
    except ImportError as error:
        raise MissingExtraError(
            f"{scheme}:// this way needs fsspec", where=where, hint="pip install 'llm-prefetch[fsspec]'"
        ) from error
    try:
        return get_filesystem_class("az" if scheme == "azure" else scheme)
    except ValueError as error:
        raise UnsupportedOriginError(
            f"unknown scheme {scheme}://",
            where=where,
            hint="write file://, s3://, gs://, abfss://, az://, hf://, https:// or what fsspec knows",
        ) from error
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        said = known_implementations.get(scheme, {}).get("err", "install what fsspec needs for it")
        raise MissingExtraError(
            f"{scheme}:// needs a package that is not installed",
            where=where,
            hint=f"pip install 'llm-prefetch[{extra}]'" if extra else said,
        ) from error


_EXTRAS = {"s3": "fsspec", "gs": "gcs", "az": "azure", "azure": "azure", "abfss": "azure", "hf": "hf"}


def _s3(uri: str) -> tuple[str, dict[str, Any]]:
    bucket, prefix, anonymous = s3.parse(uri)
    endpoint = s3.endpoint()
    config: dict[str, Any] = {
        "connect_timeout": _CONNECT_SECONDS,
        "read_timeout": settings.STALL_SECONDS.get(),
        "max_pool_connections": settings.CONCURRENCY.get(),
    }
    options: dict[str, Any] = {"anon": anonymous, "config_kwargs": config}
    if endpoint:
        options["endpoint_url"] = endpoint
        config["s3"] = {"addressing_style": "path"}
    # botocore knows only the second of the two.
    if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        options["client_kwargs"] = {"region_name": region}
    return f"{bucket}/{prefix}", options


def _gcs(uri: str) -> tuple[str, dict[str, Any]]:
    access = gcs.find_access(uri)
    token: Any = "google_default"  # noqa: S105 (the name of a way to find one)
    if access.plain:
        token = "anon"  # noqa: S105 (as above)
    elif access.key:
        from google.oauth2.service_account import Credentials

        token = Credentials.from_service_account_info(  # type: ignore[no-untyped-call]
            access.key, scopes=[gcs.SCOPE]
        )
    elif bearer := os.environ.get("GOOGLE_BEARER_TOKEN"):
        from google.oauth2.credentials import Credentials as Bearer

        token = Bearer(bearer)  # type: ignore[no-untyped-call]
    return f"{access.bucket}/{access.prefix}", {"token": token, "endpoint_url": access.root}


def _azure(uri: str) -> tuple[str, dict[str, Any]]:
    container, prefix, account = azure.find_account(uri)
    options: dict[str, Any] = {
        "account_name": account.name,
        "connection_timeout": _CONNECT_SECONDS,
        "read_timeout": settings.STALL_SECONDS.get(),
    }
    if account.key or account.sas or account.plain:
        # A string, because by itself adlfs speaks https:// only, and to no other path than "/".
        parts = [f"AccountName={account.name}", f"BlobEndpoint={account.endpoint}"]
        if account.key:
            parts.append(f"AccountKey={account.key}")
        elif account.sas:
            parts.append(f"SharedAccessSignature={account.sas}")
        options["connection_string"] = ";".join(parts)
    else:
        options |= {"anon": False, "account_host": account.endpoint.partition("://")[2]}
    return f"{container}/{prefix}", options
