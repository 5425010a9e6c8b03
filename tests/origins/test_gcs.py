"""`gs://`, against what stands for Google in `tests.real.gcs`."""

from __future__ import annotations

import json

import pytest

from llm_prefetch.errors import (
    OriginAccessError,
    OriginUnavailableError,
    UnsupportedOriginError,
)
from llm_prefetch.origins import ObjectInfo, open_origin
from tests.samples import raises


def _read(origin, path, size):
    reader = origin.reader()
    buffer = memoryview(bytearray(size))
    try:
        count = reader.open_range(ObjectInfo(path, size, ""), 0, size).readinto(buffer)
    finally:
        reader.close()
    return bytes(buffer[:count])


@pytest.mark.parametrize(
    "uri", ["gs:///prefix", "gs://b ucket/x", "gs://[x/y", "gs://@/x", "gs://ü/x", "gs://a:b/x"]
)
def test_what_is_no_bucket_is_refused_before_anything_is_asked(uri):
    with raises(UnsupportedOriginError, 2, "not a GCS URI"):
        open_origin(uri)


@pytest.mark.parametrize("text", ["{", "no json"])
def test_a_key_that_cannot_be_read_is_refused_and_not_repeated(monkeypatch, text):
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", text)
    with raises(OriginAccessError, 3, "GOOGLE_APPLICATION_CREDENTIALS", "gs://bucket/x"):
        open_origin("gs://bucket/x")


def test_a_key_file_that_is_not_there_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with raises(OriginAccessError, 3, "GOOGLE_APPLICATION_CREDENTIALS", "gs://bucket/x"):
        open_origin("gs://bucket/x")


@pytest.mark.cloud
def test_a_key_of_somebody_else_is_refused(gcs, monkeypatch):
    bucket = gcs.create_bucket("refused")
    gcs.put(bucket, "p/x", b"1")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", gcs.service_account(private_key=gcs.other_key()))
    origin = open_origin(f"gs://{bucket}/p")
    with raises(OriginAccessError, 3, "refused the credentials", f"gs://{bucket}/p"):
        list(origin.list())
    with raises(OriginAccessError, 3, "403", f"gs://{bucket}/p"):
        _read(origin, "x", 1)


@pytest.mark.cloud
def test_a_token_that_is_none_is_refused(gcs, monkeypatch):
    bucket = gcs.create_bucket("no-token")
    gcs.put(bucket, "p/x", b"1")
    monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT_KEY")
    monkeypatch.setenv("GOOGLE_BASE_URL", gcs.endpoint)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "s3cret")
    origin = open_origin(f"gs://{bucket}/p")
    for read in (lambda: list(origin.list()), lambda: _read(origin, "x", 1)):
        with raises(OriginAccessError, 3, "refused the credentials") as caught:
            read()
        assert "s3cret" not in str(caught.value)


def test_without_credentials_it_is_said(monkeypatch):
    # What NO_GCE_CHECK=true sets, which google-auth reads once, on import.
    monkeypatch.setattr("google.auth.compute_engine._metadata._NO_GCE_CHECK", True)
    with raises(OriginAccessError, 3, "default credentials", "gs://bucket/x"):
        open_origin("gs://bucket/x")


def test_a_token_service_that_does_not_answer_is_unavailable(monkeypatch, tmp_path):
    key = {
        "type": "external_account",
        "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/x",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": "https://127.0.0.1:9/v1/token",
        "credential_source": {"file": str(tmp_path / "key.json")},
    }
    (tmp_path / "key.json").write_text(json.dumps(key))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    with raises(OriginUnavailableError, 3, "gs://bucket/x"):
        open_origin("gs://bucket/x")


@pytest.mark.cloud
def test_a_given_token_reads(gcs, monkeypatch):
    bucket = gcs.create_bucket("token")
    gcs.put(bucket, "p/x", b"123")
    monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT_KEY")
    monkeypatch.setenv("GOOGLE_BASE_URL", gcs.endpoint)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", gcs.bearer_token())
    assert _read(open_origin(f"gs://{bucket}/p"), "x", 3) == b"123"


@pytest.mark.cloud
def test_a_key_in_a_file_is_found(gcs, monkeypatch, tmp_path):
    bucket = gcs.create_bucket("key-file")
    gcs.put(bucket, "p/x", b"123")
    (tmp_path / "key.json").write_text(gcs.service_account())
    monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT_KEY")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    origin = open_origin(f"gs://{bucket}/p")
    assert [info.path for info in origin.list()] == ["x"]
    assert _read(origin, "x", 3) == b"123"


@pytest.mark.cloud
@pytest.mark.parametrize("how", ["anonymous", "variable", "emulator"])
def test_a_public_bucket_is_read_without_credentials(gcs, monkeypatch, how):
    bucket = gcs.create_bucket(f"public-{how}")
    gcs.put(bucket, "p/x y", b"1234")
    if how == "emulator":
        monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT_KEY")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.endpoint)
    elif how == "variable":
        monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    origin = open_origin(f"gs://{'anonymous@' if how == 'anonymous' else ''}{bucket}/p")
    gcs.forget()
    assert [info.path for info in origin.list()] == ["x y"]
    assert _read(origin, "x y", 4) == b"1234"
    assert not [request for request in gcs.requests() if "Signature" in request.query]
