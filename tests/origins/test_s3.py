"""`s3://`, against a real S3 API in a process of its own."""

from __future__ import annotations

import pytest

from llm_prefetch.errors import UnsupportedOriginError
from llm_prefetch.origins import open_origin
from llm_prefetch.publish import publish
from llm_prefetch.stage import stage
from tests.samples import FILES, TOTAL, make_folder, make_spec, raises


@pytest.mark.parametrize(
    "uri", ["s3:///prefix", "s3://b ucket/x", "s3://[x/y", "s3://@/x", "s3://ü/x", "s3://a:b/x"]
)
def test_what_is_no_bucket_is_refused_before_anything_is_asked(uri):
    with raises(UnsupportedOriginError, 2, "not an S3 URI"):
        open_origin(uri)


@pytest.mark.cloud
def test_staging_again_reads_the_manifest_and_no_data(s3, store, tmp_path):
    uri = f"s3://{s3.create_bucket('again')}/p"
    publish(make_folder(tmp_path / "source"), uri)
    s3.forget()
    assert stage(make_spec(uri), store).fetched_bytes == TOTAL
    read = {request.key for request in s3.requests("read")}
    assert read == {f"p/{path}" for path, data in FILES.items() if data} | {"p/.llm-prefetch/manifest.json"}
    s3.forget()
    assert stage(make_spec(uri), store).fetched_bytes == 0
    assert {request.key for request in s3.requests("read")} == {"p/.llm-prefetch/manifest.json"}


@pytest.mark.cloud
def test_a_public_bucket_is_read_without_signing(s3, monkeypatch):
    bucket = s3.create_bucket("public")
    s3.client.put_bucket_acl(Bucket=bucket, ACL="public-read")
    s3.client.put_object(Bucket=bucket, Key="p/x y", Body=b"1234", ACL="public-read")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    origin = open_origin(f"s3://anonymous@{bucket}/p")
    s3.forget()
    [info] = origin.list()
    reader = origin.reader()
    buffer = memoryview(bytearray(10))
    assert reader.open_range(info, 1, 2).readinto(buffer) == 2
    reader.close()
    assert bytes(buffer[:2]) == b"23"
    assert not [request for request in s3.requests() if "Signature" in request.query]
