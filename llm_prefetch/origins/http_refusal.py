"""What an origin says when it does not give a range, and the error of ours that it becomes.

Of the body only the code that object stores put there is looked at: the rest may repeat what was asked, signature
and all.
"""

from __future__ import annotations

import contextlib
import http.client
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from llm_prefetch.errors import (
    OriginAccessError,
    OriginChangedError,
    OriginError,
    OriginNotFoundError,
    OriginUnavailableError,
)
from llm_prefetch.origins.base import ObjectInfo
from llm_prefetch.redact import redact_text

_OVERLOADED = frozenset({408, 425, 429, 500, 502, 503, 504})
_REFUSED = frozenset({401, 403, 407})
_BODY_BYTES = 4096
_REASON_CHARACTERS = 60
_LONGEST_WAIT_SECONDS = 3600.0
_CODE = re.compile(rb"<Code>([A-Za-z0-9]{1,64})</Code>")
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,9})?")
_EXPIRED = frozenset({"ExpiredToken", "RequestExpired", "TokenRefreshRequired"})
_SKEWED = "RequestTimeTooSkewed"
_TIMED_OUT = frozenset({"RequestTimeout", "SlowDown"})
_EXPIRED_TEXT = (b"Request has expired", b"Signature not valid in the specified time frame")
"""Amazon and Azure give a signed address that expired the code of any other refusal."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that is not the range."""

    status: int
    reason: str
    length: int | None
    code: str = ""
    """What the store calls it."""
    expired: bool = False
    """It was signed too long ago: signing again may help."""
    retry_after: float | None = None


def read_refusal(response: http.client.HTTPResponse) -> Refusal:
    """Take from an answer what tells why; it is read no further than that."""
    length, body = response.length, b""
    if response.status >= HTTPStatus.BAD_REQUEST:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            body = response.read(_BODY_BYTES)
    found = _CODE.search(body)
    code = found[1].decode() if found else response.headers.get("x-ms-error-code", "")
    expired = response.status in (400, 401, 403) and (
        code in _EXPIRED or code == _SKEWED or any(text in body for text in _EXPIRED_TEXT)
    )
    return Refusal(
        response.status, shown_reason(response), length, code, expired, retry_after(response.headers)
    )


def shown_reason(response: http.client.HTTPResponse) -> str:
    """What stands beside the status: any text that the server likes, even the address that it was asked."""
    return redact_text(response.reason.strip())[:_REASON_CHARACTERS]


def retry_after(headers: http.client.HTTPMessage | Mapping[str, str]) -> float | None:
    """For how many seconds the origin wants to be left alone, if it says so."""
    given = {name.lower(): value for name, value in headers.items()}
    text = given.get("retry-after", "").strip()
    if _SECONDS.fullmatch(text):
        seconds = float(text)
    else:
        until = _date(text)
        if until is None:
            return None
        # By the origin's own clock, for ours may be wrong.
        seconds = (until - (_date(given.get("date", "")) or datetime.now(UTC))).total_seconds()
    return min(max(seconds, 0.0), _LONGEST_WAIT_SECONDS)


def explain(refusal: Refusal, item: ObjectInfo, start: int, length: int, where: str) -> OriginError:
    """The error that names the mend."""
    status = refusal.status
    code = f" ({refusal.code})" if refusal.code else ""
    what = f"{item.path!r}: the origin answered {status} {refusal.reason}{code}"
    if status == HTTPStatus.NOT_FOUND:
        return OriginNotFoundError(
            f"{item.path!r} is not there", where=where, hint="publish the folder again"
        )
    if status in _REFUSED or refusal.expired:
        return OriginAccessError(what, where=where, hint=_access_hint(refusal))
    if status in (HTTPStatus.PRECONDITION_FAILED, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE):
        return OriginChangedError(
            f"{item.path!r} changed at the origin: bytes {start}-{start + length - 1} of {item.size} are gone",
            where=where,
            hint="publish the folder again, then stage",
        )
    if status == HTTPStatus.OK and refusal.length not in (None, item.size):
        return changed(item, refusal.length or 0, where)
    if status in _OVERLOADED or refusal.code in _TIMED_OUT:
        return OriginUnavailableError(
            what, where=where, hint="it may pass; stage again", retry_after=refusal.retry_after
        )
    return OriginError(what, where=where, hint="the origin must serve ranges of this object")


def changed(item: ObjectInfo, found: int, where: str) -> OriginChangedError:
    """The object has another size than the listing said."""
    return OriginChangedError(
        f"{item.path!r} has {found} bytes at the origin where {item.size} were expected",
        where=where,
        hint="publish the folder again, then stage",
    )


def _access_hint(refusal: Refusal) -> str:
    if refusal.status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
        return "check the user and the password of HTTP_PROXY"
    if refusal.code == _SKEWED:
        return "set the clock of this node"
    if refusal.expired:
        return "the credentials or the signed address expired; renew them, then stage again"
    return "check the credentials of this node and the bucket policy"


def _date(text: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)
