"""Taking secrets out of URIs before they reach a log, the ledger or a page."""

from __future__ import annotations

import re

_CONTAINER_FIRST = ("abfs", "abfss", "az", "azure")
_CONTAINER = re.compile(r"[a-z0-9$][a-z0-9-]{0,62}")


def redact(uri: str) -> str:
    """`uri` without user info, query and fragment; `anonymous@` and the container of an Azure URI stay."""
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme == "file":
        return uri
    # By hand: urlsplit refuses some that a user may have written, and puts others together differently.
    authority, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    user, _, host = authority.rpartition("@")
    # Azure writes its container there.
    shown = user == "anonymous" or (scheme in _CONTAINER_FIRST and _CONTAINER.fullmatch(user))
    return f"{scheme}://{f'{user}@' if shown else ''}{host}{slash}{path}"
