"""`abfss://`, `az://` and `azure://`, against Azurite."""

from __future__ import annotations

import base64
import re

import pytest

from llm_prefetch.errors import (
    OriginAccessError,
    UnsupportedOriginError,
)
from llm_prefetch.origins import ObjectInfo, open_origin
from tests.real.azure import ACCOUNT
from tests.samples import raises

ABFSS = "abfss://{}@" + ACCOUNT + ".dfs.core.windows.net/p"


def _read(origin, path, size):
    reader = origin.reader()
    buffer = memoryview(bytearray(size))
    try:
        count = reader.open_range(ObjectInfo(path, size, ""), 0, size).readinto(buffer)
    finally:
        reader.close()
    return bytes(buffer[:count])


@pytest.mark.parametrize(
    "uri",
    [
        "az:///prefix",
        "az://b ucket/x",
        "azure://ü/x",
        "abfss://@account.dfs.core.windows.net/x",
        "abfss://container@account/x",
        "abfss://container@account.dfs.core.windows.net:1/x",
        "abfss://container@example.com/x",
    ],
)
def test_what_is_no_container_is_refused_before_anything_is_asked(uri):
    with raises(UnsupportedOriginError, 2, "not an Azure URI"):
        open_origin(uri)


@pytest.mark.parametrize("uri", ["az://container/x", "azure://container/x", "abfss://container/x"])
def test_without_an_account_it_is_asked_for(uri):
    with raises(UnsupportedOriginError, 2, "AZURE_STORAGE_ACCOUNT_NAME", uri):
        open_origin(uri)


def test_the_address_follows_from_the_uri(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "other")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"key").decode())
    for uri, address in {
        "abfss://c@mine.dfs.core.windows.net/p": "https://mine.blob.core.windows.net/c/p/x%20y?",
        "abfss://c@mine.dfs.core.usgovcloudapi.net/p": "https://mine.blob.core.usgovcloudapi.net/c/p/x%20y?",
        "abfss://c/p": "https://other.blob.core.windows.net/c/p/x%20y?",
        "az://c": "https://other.blob.core.windows.net/c/x%20y?",
    }.items():
        assert open_origin(uri).make_url("x y").startswith(address)


def test_a_connection_string_of_another_account_is_left_alone(monkeypatch):
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING", "AccountName=other;BlobEndpoint=http://127.0.0.1:9/other"
    )
    monkeypatch.setenv("AZURE_SKIP_SIGNATURE", "1")
    assert open_origin("az://c@mine.blob.core.windows.net/p").make_url("x") == (
        "https://mine.blob.core.windows.net/c/p/x"
    )


@pytest.mark.cloud
@pytest.mark.parametrize("uri", ["az://{}/p", "azure://{}/p", "abfss://{}/p", ABFSS])
@pytest.mark.parametrize("how", ["variables", "connection string", "emulator", "token in a string"])
def test_every_way_to_name_a_container_leads_there(azure, monkeypatch, uri, how):
    bucket = azure.create_bucket(f"ways-{abs(hash((uri, how)))}")
    azure.put(bucket, "p/x y", b"123")
    if how != "variables":
        for name in azure.env:
            monkeypatch.delenv(name)
    if how == "connection string":
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azure.connection_string)
    elif how == "token in a string":
        text = f"BlobEndpoint={azure.endpoint};AccountName={ACCOUNT};SharedAccessSignature=?{azure.token()}"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    elif how == "emulator":
        monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
        monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", azure.endpoint.removesuffix(f"/{ACCOUNT}"))
    origin = open_origin(uri.format(bucket))
    assert [info.path for info in origin.list()] == ["x y"]
    assert _read(origin, "x y", 3) == b"123"


@pytest.mark.cloud
@pytest.mark.parametrize("key", ["AAAA", "no base64!"])
def test_a_wrong_key_is_refused_and_not_repeated(azure, monkeypatch, key):
    bucket = azure.create_bucket(f"refused-{len(key)}")
    azure.put(bucket, "p/x", b"1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", key)
    for act in (lambda origin: list(origin.list()), lambda origin: _read(origin, "x", 1)):
        with raises(OriginAccessError, 3, f"az://{bucket}/p", "credentials") as caught:
            act(open_origin(f"az://{bucket}/p"))
        assert key not in str(caught.value)


@pytest.mark.cloud
def test_a_wrong_token_is_refused_and_not_repeated(azure, monkeypatch):
    bucket = azure.create_bucket("refused-token")
    azure.put(bucket, "p/x", b"1")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", re.sub("sig=[^&]*", f"sig={'A' * 43}%3D", azure.token()))
    origin = open_origin(f"az://{bucket}/p")
    for act in (lambda: list(origin.list()), lambda: _read(origin, "x", 1)):
        with raises(OriginAccessError, 3, f"az://{bucket}/p", "credentials") as caught:
            act()
        assert "sig=" not in str(caught.value)
