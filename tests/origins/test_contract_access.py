"""What every origin must do, part three: what it says without credentials, packages or anybody who answers."""

from __future__ import annotations

import sys

import fsspec.registry  # noqa: F401 (see REMEMBERED)
import pytest

from llm_prefetch.errors import MissingExtraError, OriginUnavailableError, UnsupportedOriginError
from llm_prefetch.origins import open_origin
from tests.origins.places import read_range
from tests.samples import raises

REMEMBERED = sys.modules["fsspec.registry"]._registry
NOBODY = "http://127.0.0.1:9"


@pytest.mark.cloud
@pytest.mark.parametrize("transport", ["auto", "fsspec"])
@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_public_bucket_is_read_without_credentials(request, monkeypatch, scheme, transport):
    server = request.getfixturevalue({"s3": "s3", "gs": "gcs", "az": "azure"}[scheme])
    bucket = server.create_bucket(f"public-{transport}", **({"public": True} if scheme == "az" else {}))
    if scheme == "s3":
        server.client.put_bucket_acl(Bucket=bucket, ACL="public-read")
        server.client.put_object(Bucket=bucket, Key="p/x y", Body=b"1234", ACL="public-read")
    else:
        server.put(bucket, "p/x y", b"1234")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.delenv(name, raising=False)
    if scheme == "az":
        monkeypatch.setenv("AZURE_SKIP_SIGNATURE", "true")
    origin = open_origin(f"{scheme}://{'' if scheme == 'az' else 'anonymous@'}{bucket}/p", transport)
    [info] = origin.list()
    assert info.path == "x y"
    assert read_range(origin, info, 1, 2) == b"23"


@pytest.mark.parametrize("transport", ["auto", "fsspec"])
@pytest.mark.parametrize(
    ("uri", "env"),
    [
        (
            "s3://bucket/x",
            {"AWS_ENDPOINT_URL": NOBODY, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"},
        ),
        ("gs://bucket/x", {"STORAGE_EMULATOR_HOST": NOBODY}),
        ("az://container/x", {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": NOBODY}),
        ("hf://org/model", {"HF_ENDPOINT": NOBODY}),
        (f"{NOBODY}/x", {}),
    ],
    ids=["s3", "gs", "az", "hf", "https"],
)
def test_an_endpoint_that_does_not_answer_is_unavailable(monkeypatch, uri, env, transport):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LLM_PREFETCH_STALL_SECONDS", "1")  # some clients try for minutes
    origin = open_origin(uri, transport)
    with raises(OriginUnavailableError, 3, uri) as caught:
        origin.stat("x")
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("uri", "module", "transport", "extra"),
    [
        ("s3://bucket/x", "obstore.store", "auto", "s3"),
        ("gs://bucket/x", "obstore.store", "auto", "gcs"),
        ("az://container/x", "obstore.store", "auto", "azure"),
        ("hf://org/model", "huggingface_hub", "auto", "hf"),
        ("s3://bucket/x", "s3fs", "fsspec", "fsspec"),
        ("gs://bucket/x", "gcsfs", "fsspec", "gcs"),
        ("az://container/x", "adlfs", "fsspec", "azure"),
        ("s3://bucket/x", "fsspec.registry", "fsspec", "fsspec"),
    ],
)
def test_the_missing_extra_is_named(monkeypatch, uri, module, transport, extra):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:9")
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    monkeypatch.setitem(sys.modules, module, None)  # an import of it now fails
    for name in ("s3", "gs", "az"):  # what was imported before is remembered there
        monkeypatch.delitem(REMEMBERED, name, raising=False)
    with raises(MissingExtraError, 2, f"llm-prefetch[{extra}]", uri):
        open_origin(uri, transport)


@pytest.mark.parametrize("transport", ["auto", "fsspec"])
@pytest.mark.parametrize(
    "uri",
    ["s3://key:s3cret@bucket/x", "gs://key:s3cret@bucket/x", "az://key:s3cret@x.dfs.core.windows.net/x"],
)
def test_credentials_in_a_uri_are_refused_and_not_repeated(uri, transport):
    with raises(UnsupportedOriginError, 2, uri.partition("://")[0]) as caught:
        open_origin(uri, transport)
    assert "s3cret" not in str(caught.value)
