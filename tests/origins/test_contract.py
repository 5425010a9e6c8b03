"""What every origin must do, whatever it speaks."""

from __future__ import annotations

import io
import itertools

import pytest

from llm_prefetch.errors import OriginChangedError, OriginError, OriginNotFoundError
from llm_prefetch.live import check_deployment
from llm_prefetch.manifest import CHUNK_BYTES
from llm_prefetch.origins import ObjectInfo, open_origin
from llm_prefetch.publish import publish
from llm_prefetch.resolve import resolve
from llm_prefetch.stage import stage
from tests.samples import FILES, Counter, make_artifact, make_folder, make_manifest, make_spec, raises, tree

_numbers = itertools.count()
ODD_NAMES = [
    "a b",
    "a+b",
    "a%20b",
    "a#b",
    "a?b=c&d",
    "ünï",
    "~x",
    "a'\"b",
    "{a}",
    "sub/deep/x",
    "-",
    "a:b",
    "*",
]


# Where Google and Azure can be read in several ways, each is gone through: see `llm_prefetch.origins.gcs` and `azure`.
CLOUDS = ["s3", "gs-key", "gs-node", "az-key", "az-sas", "abfss-key"]


@pytest.fixture(params=["file", *(pytest.param(cloud, marks=pytest.mark.cloud) for cloud in CLOUDS)])
def uri(request, tmp_path, monkeypatch):
    """An empty prefix of its own."""
    if request.param == "file":
        (tmp_path / "origin/prefix").mkdir(parents=True)
        return f"file://{tmp_path}/origin/prefix"
    scheme, _, credentials = request.param.partition("-")
    server = request.getfixturevalue({"s3": "s3", "gs": "gcs"}.get(scheme, "azure"))
    bucket = server.create_bucket(f"bucket-{next(_numbers)}")
    if credentials == "node":
        monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT_KEY")
        for name, value in server.node_env.items():
            monkeypatch.setenv(name, value)
        # google-auth reads this variable once, on import.
        host = server.node_env["GCE_METADATA_HOST"]
        monkeypatch.setattr("google.auth.compute_engine._metadata._GCE_METADATA_HOST", host)
    elif credentials == "sas":
        monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", server.token())
    host = "@devstoreaccount1.dfs.core.windows.net" if scheme == "abfss" else ""
    return f"{scheme}://{bucket}{host}/some/prefix"


@pytest.fixture
def origin(uri):
    return open_origin(uri)


def _put(origin, path, data):
    origin.write(path, io.BytesIO(data), len(data))


def _take(body):
    """All of a range, by small pieces."""
    taken, buffer = b"", memoryview(bytearray(7))
    while count := body.readinto(buffer):
        taken += bytes(buffer[:count])
    return taken


def _read(origin, item, start, length):
    reader = origin.reader()
    try:
        return _take(reader.open_range(item, start, length))
    finally:
        reader.close()


def test_what_is_written_is_listed_with_its_size(origin):
    for path, data in FILES.items():
        _put(origin, path, data)
    assert {info.path: info.size for info in origin.list()} == {p: len(data) for p, data in FILES.items()}
    assert all(info.etag for info in origin.list())


def test_a_list_is_the_same_twice(origin):
    _put(origin, "x", b"1")
    assert list(origin.list()) == list(origin.list())


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_make_the_whole_way(origin, name):
    data = name.encode()
    _put(origin, name, data)
    [info] = origin.list()
    assert (info.path, info.size) == (name, len(data))
    assert origin.stat(name) == info
    assert origin.read(name, 100) == data
    assert _read(origin, info, 0, len(data)) == data


def test_one_object_is_described_as_in_the_list(origin):
    _put(origin, "sub/x", b"123")
    [info] = origin.list()
    assert origin.stat("sub/x") == info
    assert origin.stat("sub/y") is None
    assert origin.stat("sub/x/y") is None


def test_the_etag_changes_with_the_bytes(origin):
    _put(origin, "x", b"123")
    before = origin.stat("x")
    _put(origin, "x", b"321")
    assert origin.stat("x").etag != before.etag


def test_a_neighbour_whose_name_begins_alike_is_not_listed(uri, origin):
    _put(origin, "x", b"1")
    _put(open_origin(f"{uri}-2"), "y", b"1")
    assert [info.path for info in origin.list()] == ["x"]


def test_a_slash_at_the_end_changes_nothing(uri, origin):
    _put(origin, "x", b"1")
    assert list(open_origin(f"{uri}/").list()) == list(origin.list())


def test_an_empty_prefix_lists_nothing_and_cannot_be_staged(uri, origin):
    assert list(origin.list()) == []
    with raises(OriginNotFoundError, 3, uri):
        resolve(make_artifact(uri))


def test_a_missing_prefix_is_not_found(uri):
    with raises(OriginNotFoundError, 3, f"{uri}/none"):
        resolve(make_artifact(f"{uri}/none"))


def test_a_missing_bucket_or_root_is_not_found(uri):
    missing = uri.replace("bucket-", "no-bucket-").replace("/origin/", "/no-origin/")
    with raises(OriginNotFoundError, 3, missing):
        resolve(make_artifact(missing))


def test_a_small_object_is_read_whole_and_a_larger_one_refused(uri, origin):
    _put(origin, "x", b"123")
    assert origin.read("x", 3) == b"123"
    with raises(OriginError, 3, "larger than 2 bytes", uri):
        origin.read("x", 2)
    with raises(OriginNotFoundError, 3, uri):
        origin.read("y", 2)


@pytest.mark.parametrize(("start", "length"), [(0, 1), (0, 100), (3, 50), (99, 1), (50, 50)])
def test_a_range_is_just_that_range(origin, start, length):
    data = bytes(range(100))
    _put(origin, "x", data)
    assert _read(origin, origin.stat("x"), start, length) == data[start : start + length]


def test_a_range_never_gives_more_than_was_asked_for(origin):
    _put(origin, "x", bytes(range(100)))
    reader = origin.reader()
    body = reader.open_range(origin.stat("x"), 10, 5)
    buffer = memoryview(bytearray(b"\xff" * 100))
    assert body.readinto(buffer) == 5
    assert bytes(buffer[:6]) == bytes(range(10, 15)) + b"\xff"
    assert body.readinto(buffer) == 0
    reader.close()


def test_a_reader_reads_range_after_range_also_when_one_was_given_up(origin):
    data = {"x": bytes(range(100)), "y": bytes(range(100, 200))}
    for path, content in data.items():
        _put(origin, path, content)
    items = {info.path: info for info in origin.list()}
    reader = origin.reader()
    for path, start, whole in [("x", 0, True), ("y", 10, False), ("x", 50, True), ("y", 5, True)]:
        body = reader.open_range(items[path], start, 40)
        if whole:
            assert _take(body) == data[path][start : start + 40]
        else:
            body.readinto(memoryview(bytearray(3)))
    reader.close()
    assert _take(reader.open_range(items["x"], 0, 10)) == data["x"][:10]
    reader.close()


@pytest.mark.parametrize("size", [99, 101, 1000])
def test_an_object_of_another_size_is_refused(origin, size):
    _put(origin, "x", bytes(100))
    with raises(OriginChangedError, 3, "'x'"):
        _read(origin, ObjectInfo("x", size, ""), size - 50, 50)


def test_an_object_that_changed_since_it_was_listed_is_refused(origin):
    _put(origin, "x", b"1" * 10)
    [item] = origin.list()
    _put(origin, "x", b"2" * 10)
    with raises(OriginChangedError, 3, "'x'"):
        _read(origin, item, 0, 10)
    assert _read(origin, ObjectInfo("x", 10, ""), 0, 10) == b"2" * 10


def test_an_object_that_is_gone_is_not_found(origin):
    with raises(OriginNotFoundError, 3, "'none'"):
        _read(origin, ObjectInfo("none", 10, ""), 0, 10)


def test_a_write_replaces_the_whole_object(origin):
    _put(origin, "x", b"a long text")
    _put(origin, "x", b"short")
    assert origin.read("x", 100) == b"short"
    assert len(list(origin.list())) == 1


def test_publishing_and_staging_give_back_every_byte(uri, tmp_path, store):
    files = {
        **FILES,
        **{name: name.encode() for name in ODD_NAMES},
        "big": bytes(range(256)) * (CHUNK_BYTES // 200),
    }
    source, progress = make_folder(tmp_path / "source", files), Counter()
    report = publish(source, uri, progress=progress)
    total = sum(len(data) for data in files.values())
    assert report.version == make_manifest(files, CHUNK_BYTES).version
    assert progress.total == progress.done == total

    progress = Counter()
    staged = stage(make_spec(uri), store, progress=progress)
    assert staged.artifacts[0].version == report.version
    assert staged.fetched_bytes == progress.total == progress.done == total
    assert tree(store.engine_path("llama", "weights").resolve()) == files
    assert check_deployment(store, "llama", full=True).ready


def test_a_listing_gives_the_version_that_a_publication_gives(uri, origin, tmp_path, store):
    for path, data in FILES.items():
        _put(origin, path, data)
    listed = stage(make_spec(uri), store).artifacts[0].version
    assert listed == publish(make_folder(tmp_path / "source"), uri).version
    assert stage(make_spec(uri), store).fetched_bytes == 0


def test_a_size_in_the_manifest_that_disagrees_with_the_origin_is_refused(uri, origin, tmp_path, store):
    publish(make_folder(tmp_path / "source"), uri)
    _put(origin, "config.json", b"longer than before")
    with raises(OriginChangedError, 3, "config.json", "18 bytes"):
        stage(make_spec(uri), store)
    assert list(store.root.glob("artifacts/*/*")) == []
