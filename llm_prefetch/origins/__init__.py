"""Origins: where bytes come from. `open_origin` picks the one that speaks a URI's scheme."""

from __future__ import annotations

from llm_prefetch.errors import UnsupportedOriginError
from llm_prefetch.origins.base import ObjectInfo, Origin, RangeBody, RangeReader
from llm_prefetch.redact import redact

__all__ = ["ObjectInfo", "Origin", "RangeBody", "RangeReader", "check_scheme", "open_origin"]

SPOKEN = ("file", "s3", "gs", "abfss", "az", "azure", "hf", "https", "http")
"""What has an origin of its own; any other is read by fsspec, if that knows it."""


def open_origin(uri: str, transport: str = "auto") -> Origin:
    """The origin at `uri`; `transport` is "auto", or "fsspec" to read by fsspec whatever has an origin of its own.

    Raises:
        UnsupportedOriginError: no origin speaks this scheme.
        MissingExtraError: the extra that speaks it is not installed.
    """
    scheme = check_scheme(uri)
    if transport == "fsspec" or scheme not in SPOKEN:
        return _open_general(uri, scheme)
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
    """The scheme of `uri`, if an origin, or fsspec, speaks it.

    Raises:
        UnsupportedOriginError: none does.
        MissingExtraError: fsspec knows it, and lacks a package for it.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or not rest:
        raise UnsupportedOriginError(
            "not a URI", where=redact(uri), hint="write file:///folder or s3://bucket/prefix"
        )
    if scheme not in SPOKEN:
        _check_general(scheme, redact(uri))
    return scheme


def _check_general(scheme: str, where: str) -> None:
    from llm_prefetch.origins.file_systems import find_class, has_fsspec

    if has_fsspec():
        find_class(scheme, where)
        return
    raise UnsupportedOriginError(
        f"unknown scheme {scheme}://",
        where=where,
        hint=f"use one of {', '.join(f'{s}://' for s in SPOKEN)}; "
        "for any other that fsspec knows, pip install 'llm-prefetch[fsspec]'",
    )


def _open_general(uri: str, scheme: str) -> Origin:
    from llm_prefetch.origins import general

    if scheme == "hf":
        return general.FilesOfHub(uri)
    if scheme in ("https", "http"):
        return general.FilesOfTheWeb(uri)
    return general.GeneralOrigin(uri)
