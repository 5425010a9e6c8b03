"""From the errors of file systems to ours.

Every file system of fsspec has errors of its own, so what is known is looked for: Python's own kinds, an HTTP status,
a name that speaks of credentials. Nothing of their texts is repeated: they may hold a signed URL or a key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from llm_prefetch.errors import (
    OriginAccessError,
    OriginError,
    OriginNotFoundError,
    OriginUnavailableError,
    PrefetchError,
    UnsupportedOriginError,
)
from llm_prefetch.origins.http_refusal import retry_after

_OVERLOADED = frozenset({408, 425, 429})
_SERVER_ERROR = 500


def raise_ours(error: Exception, where: str, path: str = "") -> NoReturn:
    """Raise one of our errors for one of a file system's, without its text; `path` is the object it is about.

    Raises:
        PrefetchError: always.
    """
    if isinstance(error, PrefetchError):
        raise error
    status, names = _status(error), {type(cause).__name__ for cause in _causes(error)}
    about = f"{path!r}: " if path else ""
    what = f"the origin answered {status}" if status else f"the origin failed: {type(error).__name__}"
    what = f"{about}{what}"
    if isinstance(error, FileNotFoundError | NotADirectoryError) or status == 404:  # noqa: PLR2004
        raise OriginNotFoundError(
            f"{about}no such object, folder or bucket", where=where, hint="check the uri"
        ) from error
    if isinstance(error, NotImplementedError):
        raise UnsupportedOriginError(
            "this file system cannot do that", where=where, hint="use another one"
        ) from error
    if isinstance(error, PermissionError) or status in (401, 403) or any(map(_is_access, names)):
        raise OriginAccessError(
            f"{about}the origin refused the credentials, or there are none",
            where=where,
            hint="check the credentials of this node: docs/reference/origins.md",
        ) from error
    if status and status not in _OVERLOADED and status < _SERVER_ERROR:
        raise OriginError(what, where=where, hint="check the uri") from error
    raise OriginUnavailableError(
        what, where=where, hint="check the network, then stage again", retry_after=_retry_after(error)
    ) from error


def _is_access(name: str) -> bool:
    return "Credential" in name or "Authentication" in name or name in ("RefreshError", "Forbidden")


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    for _ in range(5):
        if found is None:
            return
        yield found
        found = found.__cause__ or found.__context__


def _status(error: BaseException) -> int:
    """The HTTP status behind an error; clients keep it under different names."""
    for cause in _causes(error):
        if type(cause).__module__ == "aiohttp.http_exceptions":
            continue  # an answer that broke off: it has a code as if the origin had said so
        response = getattr(cause, "response", None)
        places: list[Any] = [getattr(cause, name, None) for name in ("status", "status_code", "code")]
        places.append(getattr(response, "status_code", None))
        if isinstance(response, Mapping):  # botocore's
            places.append(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
        for place in places:
            if str(place).isdecimal() and 400 <= int(str(place)) < 600:  # noqa: PLR2004 (what HTTP has for errors)
                return int(str(place))
    return 0


def _retry_after(error: BaseException) -> float | None:
    """What the answer behind an error says of when to ask again; clients that keep its headers do so in three ways."""
    for cause in _causes(error):
        response = getattr(cause, "response", None)
        places: list[Any] = [getattr(cause, "headers", None), getattr(response, "headers", None)]
        if isinstance(response, Mapping):  # botocore's
            places.append(response.get("ResponseMetadata", {}).get("HTTPHeaders"))
        for place in places:
            if hasattr(place, "items") and (seconds := retry_after(place)) is not None:
                return seconds
    return None
