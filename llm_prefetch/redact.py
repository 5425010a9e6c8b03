"""Taking secrets out of URIs before they reach a log, the ledger or a page."""

from __future__ import annotations

import re


def redact(uri: str) -> str:
    """`uri` without user info, query and fragment; `anonymous@` stays, it is no secret."""
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme == "file":
        return uri
    # By hand: urlsplit refuses some that a user may have written, and puts others together differently.
    authority, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    user, _, host = authority.rpartition("@")
    return f"{scheme}://{'anonymous@' if user == 'anonymous' else ''}{host}{slash}{path}"
