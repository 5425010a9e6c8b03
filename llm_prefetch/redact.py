"""Taking secrets out of URIs before they reach a log, the ledger or a page."""

from __future__ import annotations

import re

_CONTAINER_FIRST = ("abfs", "abfss", "az", "azure")
_CONTAINER = re.compile(r"[a-z0-9$][a-z0-9-]{0,62}")


def redact(uri: str) -> str:
    """`uri` without user info, query and fragment; `anonymous@` and the container of an Azure URI stay."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return _LOGIN.sub("", uri, count=1)  # somebody forgot the scheme
    if scheme == "file":
        return uri
    # By hand: urlsplit refuses some that a user may have written, and puts others together differently.
    authority, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    user, _, host = authority.rpartition("@")
    # Azure writes its container there.
    shown = user == "anonymous" or (scheme in _CONTAINER_FIRST and _CONTAINER.fullmatch(user))
    return f"{scheme}://{f'{user}@' if shown else ''}{host}{slash}{path}"


def redact_text(text: str) -> str:
    """`text` of another program, such as an error of a client or of a server, without the secrets it may repeat.

    Addresses lose what `redact` takes from them; targets of requests, their queries; and what is named like a secret,
    its value. Meant for a line or two: what is longer is cut.
    """
    if len(text) > _LONGEST_CHARACTERS:
        text = f"{text[:_LONGEST_CHARACTERS].rpartition(' ')[0]} ..."  # half a secret looks like none
    text = _ADDRESS.sub(lambda found: redact(found[0]), text)
    text = _QUERY.sub("", text)
    text = _NAMED.sub(rf"\1{HIDDEN}", text)
    return _LOGIN.sub("", text)


HIDDEN = "[hidden]"
_LONGEST_CHARACTERS = 2000
_ADDRESS = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>]+", re.IGNORECASE)
_LOGIN = re.compile(r"(?<![^\s'\"(])[\w.~%+-]+:[^\s/@'\"<>]+@(?=[\w\[])")
_QUERY = re.compile(r"(?:\?|%3F)[^\s'\"<>?]*(?:=|%3D)[^\s'\"<>]*", re.IGNORECASE)
_NAMED = re.compile(
    # A name, however it is glued to its value, and a value that may have a scheme (`Bearer`) in front.
    r"""(\b[\w-]*(?:authorization|password|passwd|secret|signature|credential|token|api[_-]?key|access[_-]?key(?:[_-]?id)?
    |account[_-]?key|cookie|\bsig)\b["']?\s*(?:[=:]|%3D)\s*["']?(?:(?:bearer|basic|negotiate|aws4-hmac-sha256)\s+)?
    |\b(?:bearer|basic)\s+(?=[\w.~+/=-]{12}))[^\s'"<>&;,]+""",
    re.IGNORECASE | re.VERBOSE,
)
