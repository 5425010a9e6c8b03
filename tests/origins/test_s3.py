"""`s3://`, against a real S3 API in a process of its own."""

from __future__ import annotations

import pytest

from llm_prefetch.errors import OriginNotFoundError, OriginUnavailableError, UnsupportedOriginError
from llm_prefetch.origins import ObjectInfo, open_origin
from llm_prefetch.publish import publish
from llm_prefetch.stage import stage
from tests.samples import FILES, TOTAL, make_folder, make_spec, raises


@pytest.mark.parametrize(
    "uri", ["s3:///prefix", "s3://b ucket/x", "s3://[x/y", "s3://@/x", "s3://ü/x", "s3://a:b/x"]
)
def test_what_is_no_bucket_is_refused_before_anything_is_asked(uri):
    with raises(UnsupportedOriginError, 2, "not an S3 URI"):
        open_origin(uri)


def test_credentials_in_a_uri_are_refused_and_not_repeated():
    with raises(UnsupportedOriginError, 2, "s3://bucket/x") as caught:
        open_origin("s3://key:s3cret@bucket/x")
    assert "s3cret" not in str(caught.value)


@pytest.mark.cloud
def test_objects_that_stand_for_folders_are_left_out(s3):
    bucket = s3.create_bucket("folders")
    s3.put(bucket, "p/sub/", b"")
    s3.put(bucket, "p/sub/x", b"1")
    s3.put(bucket, "p/empty", b"")
    assert {info.path for info in open_origin(f"s3://{bucket}/p").list()} == {"sub/x", "empty"}


@pytest.mark.cloud
def test_a_whole_bucket_can_be_an_origin(s3):
    bucket = s3.create_bucket("whole")
    s3.put(bucket, "x", b"1")
    for uri in (f"s3://{bucket}", f"s3://{bucket}/"):
        assert [info.path for info in open_origin(uri).list()] == ["x"]


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


@pytest.mark.cloud
def test_a_large_object_goes_up_in_parts(s3, tmp_path):
    bucket = s3.create_bucket("parts")
    source = make_folder(tmp_path / "source", {"big": bytes(2**24 + 3)})
    publish(source, f"s3://{bucket}/p")
    assert s3.get(bucket, "p/big") == bytes(2**24 + 3)


@pytest.mark.cloud
def test_a_missing_bucket_is_named_also_when_publishing(s3, tmp_path):
    with raises(OriginNotFoundError, 3, "no such bucket", "s3://not-there/p"):
        publish(make_folder(tmp_path / "source"), "s3://not-there/p")


@pytest.mark.cloud
def test_an_object_that_is_gone_after_the_listing_is_not_found(s3):
    bucket = s3.create_bucket("gone")
    s3.put(bucket, "p/x", b"1")
    origin = open_origin(f"s3://{bucket}/p")
    [info] = origin.list()
    s3.delete(bucket, "p/x")
    reader = origin.reader()
    with raises(OriginNotFoundError, 3, "'x'"):
        reader.open_range(ObjectInfo(info.path, info.size, ""), 0, 1)
    reader.close()


@pytest.mark.cloud
def test_an_endpoint_that_does_not_answer_is_unavailable(monkeypatch):
    for name, value in {
        "ENDPOINT_URL": "http://127.0.0.1:9",
        "ACCESS_KEY_ID": "x",
        "SECRET_ACCESS_KEY": "x",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with raises(OriginUnavailableError, 3, "AWS_ENDPOINT_URL", "s3://bucket/x"):
        list(open_origin("s3://bucket/x").list())
