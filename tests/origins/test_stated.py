"""What an origin states about its objects is compared with their bytes, when they are published and when sealed."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import time
import zlib

import pytest

from llm_prefetch.errors import DigestError, OriginChangedError
from llm_prefetch.manifest import CHUNK_BYTES
from llm_prefetch.manifest import PATH as MANIFEST
from llm_prefetch.origins import open_origin
from llm_prefetch.origins.stated import Stated, check_tree, find_stated, from_base64, from_s3, new_hasher
from llm_prefetch.publish import publish
from llm_prefetch.sealing import seal_prefix
from tests.real.hub import Repo, git_id
from tests.samples import FILES, Counter, make_folder, make_manifest, raises

BIG = {**FILES, "big.bin": os.urandom(2 * CHUNK_BYTES + 3)}


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


@pytest.mark.parametrize(
    ("kind", "digest"),
    [
        ("sha256", hashlib.sha256(b"123").hexdigest()),
        ("sha1", hashlib.sha1(b"123").hexdigest()),
        ("md5", hashlib.md5(b"123").hexdigest()),
        ("crc32", f"{zlib.crc32(b'123'):08x}"),
        ("crc32c", "107b2fb2"),  # of RFC 3720's polynomial
        ("git", git_id(b"123")),
    ],
)
def test_every_kind_can_be_computed_piece_by_piece_and_from_a_copy(kind, digest):
    hasher = new_hasher(kind, 3)
    hasher.update(b"12")
    aside = hasher.copy()
    aside.update(b"x")
    hasher.update(memoryview(b"3"))
    assert hasher.digest().hex() == digest
    assert aside.digest() != hasher.digest()


def test_what_is_no_digest_of_the_whole_is_not_taken():
    text = _base64(hashlib.sha256(b"123").digest())
    assert from_s3({"ChecksumSHA256": text}) == Stated("sha256", hashlib.sha256(b"123").hexdigest())
    assert from_s3({"ChecksumSHA256": f"{text}-2"}) is None
    assert from_s3({"ChecksumSHA256": text, "ChecksumType": "COMPOSITE"}) is None
    assert from_s3({"ChecksumCRC64NVME": text}) is None
    assert from_base64("md5", "") is None
    assert from_base64("md5", "no base64!") is None


@pytest.mark.cloud
@pytest.mark.parametrize(("server", "scheme", "kind"), [("gcs", "gs", "crc32c"), ("azure", "az", "md5")])
def test_an_upload_is_compared_with_what_is_stated(request, tmp_path, server, scheme, kind):
    bucket = request.getfixturevalue(server).create_bucket(f"stated-{scheme}")
    uri = f"{scheme}://{bucket}/p"
    publish(make_folder(tmp_path / "source"), uri)
    origin = open_origin(uri)
    hasher = new_hasher(kind, 8)
    hasher.update(FILES["config.json"])
    assert find_stated(origin, origin.stat("config.json")) == Stated(kind, hasher.digest().hex())


@pytest.mark.cloud
def test_an_upload_that_arrived_otherwise_is_not_published(gcs, tmp_path):
    bucket = gcs.create_bucket("lying-upload")
    with raises(DigestError, 5, "CRC32C", "gs://lying-upload/p"):
        publish(make_folder(tmp_path / "source"), f"gs://{bucket}/p")
    assert f"p/{MANIFEST}" not in gcs.keys(bucket)


@pytest.mark.cloud
@pytest.mark.parametrize(("server", "scheme"), [("s3", "s3"), ("gcs", "gs"), ("azure", "az")])
def test_an_object_that_was_replaced_after_its_upload_is_not_published(request, tmp_path, server, scheme):
    server = request.getfixturevalue(server)
    bucket = server.create_bucket(f"replaced-{scheme}")
    uri = f"{scheme}://{bucket}/p"

    def replace(delta):
        if delta > 1000:  # of the large file, while the small one is there already
            for _ in range(300):
                with contextlib.suppress(Exception):  # not there yet, as each client says in its way
                    server.get(bucket, "p/config.json")
                    break
                time.sleep(0.1)
            server.put(bucket, "p/config.json", b'{"a": 2}')

    source = make_folder(tmp_path / "source", {"big": bytes(2**20), "config.json": b'{"a": 1}'})
    # What is stated may be asked for before the object is replaced, or after it.
    kinds = OriginChangedError if scheme == "s3" else (OriginChangedError, DigestError)
    with pytest.raises(kinds, match=r"'config\.json'"):
        publish(source, uri, progress=Counter(on_advance=replace))
    assert open_origin(uri).stat(MANIFEST) is None


def _fill_s3(request, files, lie):
    s3 = request.getfixturevalue("s3")
    bucket = s3.create_bucket(f"sealed-{abs(hash(lie))}")
    for path, data in files.items():
        told = hashlib.sha256(data + (b"!" if path == lie else b"")).digest()
        # Moto keeps what it is told, where S3 would refuse a wrong one.
        said = {"ChecksumAlgorithm": "SHA256", "ChecksumSHA256": _base64(told)}
        s3.client.put_object(Bucket=bucket, Key=f"p/{path}", Body=data, **said)
    return f"s3://{bucket}/p"


def _fill_gcs(request, files, lie):
    gcs = request.getfixturevalue("gcs")
    bucket = gcs.create_bucket(f"{'lying' if lie else 'sealed'}-{abs(hash(lie))}")
    for path, data in files.items():
        gcs.put(bucket, f"p/{path}", data)
    return f"gs://{bucket}/p"


def _fill_azure(request, files, lie):
    from azure.storage.blob import ContentSettings

    azure = request.getfixturevalue("azure")
    bucket = azure.create_bucket(f"sealed-{abs(hash(lie))}")
    for path, data in files.items():
        azure.put(bucket, f"p/{path}", data)
        told = hashlib.md5(data + (b"!" if path == lie else b"")).digest()
        azure.client.get_blob_client(bucket, f"p/{path}").set_http_headers(
            ContentSettings(content_type="application/octet-stream", content_md5=bytearray(told))
        )
    return f"az://{bucket}/p"


def _fill_hub(request, files, lie):
    repo = request.getfixturevalue("hub").repos["org/model"] = Repo()
    repo.commit(files)
    if lie:
        repo.served[lie] = bytes([files[lie][0] ^ 1]) + files[lie][1:]
    return "hf://org/model"


FILLED = [pytest.param(fill, marks=pytest.mark.cloud) for fill in (_fill_s3, _fill_gcs, _fill_azure)]


@pytest.mark.parametrize("fill", [*FILLED, _fill_hub])
def test_sealing_compares_every_file_with_what_is_stated(request, fill):
    uri = fill(request, BIG, "")
    origin = open_origin(uri)
    assert find_stated(origin, origin.stat("big.bin")) is not None
    report = seal_prefix(uri, dry_run=fill is _fill_hub)
    assert report.version == make_manifest(BIG, CHUNK_BYTES).version


@pytest.mark.parametrize("lie", ["config.json", "big.bin"])
@pytest.mark.parametrize("fill", [*FILLED, _fill_hub])
def test_what_is_not_as_stated_is_not_sealed(request, fill, lie):
    uri = fill(request, BIG, lie)
    with raises(DigestError, 5, "the origin states another", uri):
        seal_prefix(uri, dry_run=fill is _fill_hub)


@pytest.mark.parametrize("lie", ["", "config.json", "big.bin", "empty"])
def test_a_tree_is_compared_with_what_the_listing_states(hub, tmp_path, lie):
    repo = hub.repos["org/model"] = Repo()
    repo.commit(BIG)
    origin = open_origin("hf://org/model")
    tree = make_folder(tmp_path / "tree", {**BIG, **({lie: BIG[lie] + b"!"} if lie else {})})
    if lie:
        with raises(DigestError, 5, repr(lie), "hf://org/model"):
            check_tree(origin, origin.list(), tree)
    else:
        check_tree(origin, origin.list(), tree)


def test_where_nothing_is_stated_nothing_is_compared(tmp_path):
    origin = open_origin(f"file://{tmp_path}")
    etag = origin.write("x", io.BytesIO(b"1"), 1)
    assert etag == origin.stat("x").etag
    assert find_stated(origin, origin.stat("x")) is None
