"""Taking secrets out of URIs before they reach a log, the ledger or a page."""

from __future__ import annotations

from urllib.parse import urlsplit


def redact(uri: str) -> str:
    """`uri` without user info, query and fragment; `anonymous@` stays, it is no secret."""
    if uri.startswith("file:"):
        return uri
    try:
        parts = urlsplit(uri)
    except ValueError:  # a bracket where an IPv6 address might begin
        return uri.partition("://")[0] + "://..."
    user, _, host = parts.netloc.rpartition("@")
    netloc = f"anonymous@{host}" if user == "anonymous" else host
    return parts._replace(netloc=netloc, query="", fragment="").geturl()
