"""Taking secrets out of URIs before they reach a log, the ledger or a page."""

from __future__ import annotations

from urllib.parse import urlsplit


def redact(uri: str) -> str:
    """`uri` without user info, query and fragment; `anonymous@` stays, it is no secret."""
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return uri
    user, _, host = parts.netloc.rpartition("@")
    netloc = f"anonymous@{host}" if user == "anonymous" else host
    return parts._replace(netloc=netloc, query="", fragment="").geturl()
