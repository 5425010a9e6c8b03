"""URLs that only fsspec knows, and what its file systems say when they fail."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from llm_prefetch.errors import (
    MissingExtraError,
    OriginAccessError,
    OriginError,
    OriginNotFoundError,
    OriginUnavailableError,
    SpecError,
    UnsupportedOriginError,
)
from llm_prefetch.origins import ObjectInfo, file_systems, open_origin
from llm_prefetch.origins.general_errors import raise_ours
from llm_prefetch.origins.general_reader import PIECE_BYTES
from llm_prefetch.spec import parse_spec
from tests.origins.places import read_range
from tests.real.web import web_server
from tests.samples import make_folder, raises


def test_what_nobody_knows_is_refused_with_what_there_is():
    with raises(UnsupportedOriginError, 2, "unknown scheme nobody://", "s3://", "fsspec"):
        open_origin("nobody://host/x")


def test_what_fsspec_knows_and_cannot_speak_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "paramiko", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    with raises(MissingExtraError, 2, "sftp://host/x", "paramiko") as caught:
        open_origin("sftp://me:s3cret@host/x")
    assert "s3cret" not in str(caught.value)


def test_without_fsspec_it_is_named(monkeypatch):
    monkeypatch.setattr(file_systems.importlib.util, "find_spec", lambda name: None)
    with raises(UnsupportedOriginError, 2, "unknown scheme sftp://", "llm-prefetch[fsspec]"):
        open_origin("sftp://host/x")


@pytest.mark.parametrize("uri", ["zip://a::https://me:s3cret@host/x", "memory://a::x"])
def test_a_chain_of_file_systems_is_refused_and_not_repeated(uri):
    with raises(UnsupportedOriginError, 2, "chain") as caught:
        open_origin(uri)
    assert "s3cret" not in str(caught.value)


def test_a_transport_that_there_is_not_is_refused():
    spec = {"deployment": "x", "artifacts": [{"name": "w", "uri": "s3://b/x", "transport": "pigeon"}]}
    with pytest.raises(SpecError, match=r"artifacts\[0\].transport"):
        parse_spec(spec, "here")


class _Answered(Exception):  # noqa: N818 (stands for others')
    def __init__(self, **more):
        super().__init__("https://host/x?sig=s3cret AccountKey=s3cret")
        self.__dict__.update(more)


class NoCredentialsError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("s3cret"), OriginNotFoundError),
        (PermissionError("s3cret"), OriginAccessError),
        (OSError(errno.EIO, "s3cret"), OriginUnavailableError),
        (TimeoutError("s3cret"), OriginUnavailableError),
        (ValueError("s3cret"), OriginUnavailableError),
        (NotImplementedError("s3cret"), UnsupportedOriginError),
        (NoCredentialsError("s3cret"), OriginAccessError),
        (_Answered(status=404), OriginNotFoundError),
        (_Answered(status_code=403), OriginAccessError),
        (_Answered(code=400), OriginError),
        (_Answered(code=429), OriginUnavailableError),
        (_Answered(response={"ResponseMetadata": {"HTTPStatusCode": 503}}), OriginUnavailableError),
        (_Answered(response={"ResponseMetadata": {"HTTPStatusCode": 401}}), OriginAccessError),
    ],
)
def test_errors_of_file_systems_are_ours_and_hold_no_secret(error, kind):
    with raises(kind, 2 if kind is UnsupportedOriginError else 3, "memory://x") as caught:
        raise_ours(error, "memory://x")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        _Answered(status=503, headers={"Retry-After": "7"}),
        _Answered(
            response={"ResponseMetadata": {"HTTPStatusCode": 429, "HTTPHeaders": {"retry-after": "7"}}}
        ),
    ],
)
def test_when_to_ask_again_is_kept(error):
    with raises(OriginUnavailableError, 3, "memory://x") as caught:
        raise_ours(error, "memory://x")
    assert caught.value.retry_after == 7


def test_an_answer_that_broke_off_is_no_status_of_the_origin():
    from aiohttp.http_exceptions import ContentLengthError

    outer = OSError("broken off")
    outer.__cause__ = ContentLengthError("Not enough data")
    with raises(OriginUnavailableError, 3, "'a/b'", "memory://x"):
        raise_ours(outer, "memory://x", "a/b")


def test_the_cause_behind_an_error_is_found():
    outer = OSError("wrapped")
    outer.__cause__ = _Answered(status=403)
    with raises(OriginAccessError, 3, "memory://x"):
        raise_ours(outer, "memory://x")


def test_a_range_is_read_by_pieces_so_that_memory_is_bounded(tmp_path):
    make_folder(tmp_path, {"big": bytes(3 * PIECE_BYTES + 5)})
    origin = open_origin(f"file://{tmp_path}", "fsspec")
    reader = origin.reader()
    item = origin.stat("big")
    body, buffer = reader.open_range(item, 0, item.size), memoryview(bytearray(item.size))
    sizes = []
    while count := body.readinto(buffer):
        sizes.append(count)
    reader.close()
    assert sizes == [PIECE_BYTES, PIECE_BYTES, PIECE_BYTES, 5]


def test_gcsfs_is_kept_from_asking_by_grpc():
    """It would wait a minute for an endpoint that is not Google's."""
    code = (
        "import os; from llm_prefetch.origins import open_origin;"
        "fs = open_origin('gs://anonymous@bucket/x', 'fsspec')._place.fs;"
        "print(type(fs).__module__, os.environ['GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT'])"
    )
    for given, said in ((None, "gcsfs.core false"), ("true", "gcsfs.extended_gcsfs true")):
        env = {name: value for name, value in os.environ.items() if not name.startswith("GCSFS_")}
        env |= {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": given} if given else {}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == said


def test_no_login_goes_with_a_redirect_to_another_host(web):
    with web_server() as cdn:
        cdn.files["/x"], web.files["/y"], web.moved["/x"] = b"1234", b"5678", f"{cdn.url}PATH"
        for path, data in (("x", b"1234"), ("y", b"5678")):
            origin = open_origin(f"{web.url.replace('//', '//me:s3cret@')}/{path}", "fsspec")
            assert read_range(origin, ObjectInfo(path, 4, ""), 0, 4) == data
        assert all("authorization" in asked.headers for asked in web.requests)
        assert len(cdn.requests) > 1
        assert not [asked for asked in cdn.requests if "authorization" in asked.headers]
