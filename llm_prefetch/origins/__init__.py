"""Origins: where bytes come from. `open_origin` picks the one that speaks a URI's scheme."""

from __future__ import annotations

from llm_prefetch.errors import UnsupportedOriginError
from llm_prefetch.origins.base import ObjectInfo, Origin, RangeBody, RangeReader
from llm_prefetch.redact import redact

__all__ = ["ObjectInfo", "Origin", "RangeBody", "RangeReader", "check_scheme", "open_origin"]

SPOKEN = ("file", "s3", "gs", "abfss", "az", "azure", "hf", "https", "http")


def open_origin(uri: str) -> Origin:
    """The origin at `uri`.

    Raises:
        UnsupportedOriginError: no origin speaks this scheme.
        MissingExtraError: the extra that speaks it is not installed.
    """
    scheme = check_scheme(uri)
    if scheme == "file":
        from llm_prefetch.origins.local import LocalOrigin

        return LocalOrigin(uri)
    if scheme == "hf":
        from llm_prefetch.origins.hub import HubOrigin

        return HubOrigin(uri)
    if scheme in ("https", "http"):
        from llm_prefetch.origins.https import HttpsOrigin

        return HttpsOrigin(uri)
    if scheme == "gs":
        from llm_prefetch.origins.gcs import GCSOrigin

        return GCSOrigin(uri)
    if scheme in ("abfss", "az", "azure"):
        from llm_prefetch.origins.azure import AzureOrigin

        return AzureOrigin(uri)
    from llm_prefetch.origins.s3 import S3Origin

    return S3Origin(uri)


def check_scheme(uri: str) -> str:
    """The scheme of `uri`, if an origin speaks it.

    Raises:
        UnsupportedOriginError: none does.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or not rest:
        raise UnsupportedOriginError(
            "not a URI", where=redact(uri), hint="write file:///folder or s3://bucket/prefix"
        )
    if scheme in SPOKEN:
        return scheme
    raise UnsupportedOriginError(
        f"unknown scheme {scheme}://",
        where=redact(uri),
        hint=f"use one of {', '.join(f'{s}://' for s in SPOKEN)}",
    )
