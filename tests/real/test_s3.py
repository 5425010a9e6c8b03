"""The S3 server speaks S3 to the clients we use, and counts what it served."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from tests.real.s3 import S3Server, s3_server


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


def test_objects_come_back(s3: S3Server) -> None:
    bucket = s3.create_bucket("objects")
    s3.put(bucket, "a/one two.bin", b"0123456789")
    s3.put(bucket, "b", b"")
    assert s3.keys(bucket) == ["a/one two.bin", "b"]
    assert s3.keys(bucket, "a/") == ["a/one two.bin"]
    assert s3.get(bucket, "a/one two.bin") == b"0123456789"
    s3.delete(bucket, "b")
    assert s3.keys(bucket) == ["a/one two.bin"]


def test_reads_are_counted_by_object_and_range(s3: S3Server) -> None:
    bucket = s3.create_bucket("counted")
    s3.put(bucket, "dir/big file", bytes(100_000))
    s3.forget()
    assert s3.requests() == []
    s3.client.get_object(Bucket=bucket, Key="dir/big file", Range="bytes=10-1009")["Body"].read()
    s3.client.head_object(Bucket=bucket, Key="dir/big file")
    s3.keys(bucket)
    assert [request.kind for request in s3.requests()] == ["read", "head", "list"]
    [read] = s3.requests("read")
    assert (read.bucket, read.key, read.range, read.status, read.sent) == (
        bucket,
        "dir/big file",
        "bytes=10-1009",
        206,
        1000,
    )
    assert s3.bytes_read() == 1000


def test_obstore_reads_with_the_environment_given(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore
    from obstore.store import S3Store

    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    bucket = s3.create_bucket("obstore")
    s3.put(bucket, "x", b"0123456789")
    store = S3Store(bucket)
    assert bytes(obstore.get_range(store, "x", start=2, length=3)) == b"234"


def test_a_bucket_can_fail_for_a_while(s3: S3Server) -> None:
    broken, well = s3.create_bucket("broken"), s3.create_bucket("well")
    s3.put(broken, "x", b"0123456789")
    s3.put(well, "x", b"0123456789")
    s3.fail(broken)
    with pytest.raises(urllib.error.HTTPError) as failure:
        urllib.request.urlopen(f"{s3.endpoint}/{broken}/x", timeout=30)
    with failure.value as answer:
        assert answer.code == 503
    assert s3.get(well, "x") == b"0123456789"
    s3.mend(broken)
    assert s3.get(broken, "x") == b"0123456789"
