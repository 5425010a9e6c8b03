"""What every origin must do, part two: what is written, published and staged."""

from __future__ import annotations

import errno
import io

import pytest

from llm_prefetch.errors import OriginChangedError, OriginError, OriginNotFoundError, UnsupportedOriginError
from llm_prefetch.live import check_deployment
from llm_prefetch.manifest import CHUNK_BYTES
from llm_prefetch.manifest import PATH as MANIFEST
from llm_prefetch.publish import publish
from llm_prefetch.stage import stage
from tests.origins.places import ALL, BUCKETS, LISTED, ODD_NAMES, WRITABLE, at, body_of, read_range
from tests.samples import FILES, TOTAL, Counter, make_folder, make_manifest, raises, tree

# aiohttp warns of what gcsfs and adlfs do when they upload more than a megabyte at once.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
READ_ONLY = tuple(name for name in ALL if name not in WRITABLE)


@at(WRITABLE)
def test_a_write_replaces_the_whole_object(place):
    place.put("x", b"a long text")
    place.put("x", b"short")
    assert place.open().read("x", 100) == b"short"
    assert len(list(place.open().list())) == 1


@at(WRITABLE)
def test_a_large_object_goes_up_and_comes_back(place, tmp_path, store):
    files = {"big": bytes(range(256)) * 2**16 + b"end"}
    publish(make_folder(tmp_path / "source", files), place.uri)
    stage(place.spec(), store)
    assert tree(store.engine_path("llama", "weights").resolve()) == files
    copy = place.open()
    with (tmp_path / "source/big").open("rb") as file:
        copy.write("copy", file, len(files["big"]))
    assert read_range(copy, copy.stat("copy"), 2**24 - 3, 6) == b"\xfd\xfe\xffend"


class _Broken(io.BytesIO):
    """A file on a disk that breaks at its middle."""

    def read(self, size=-1):
        if self.tell() >= len(self.getbuffer()) // 2:
            raise OSError(errno.EIO, "the disk is broken")
        return super().read(size)


@at(WRITABLE)
def test_a_body_that_breaks_off_leaves_what_was_there(place):
    place.put("x", b"before")
    with pytest.raises(OriginError):
        place.open().write("x", _Broken(bytes(2**25)), 2**25)
    assert place.open().read("x", 2**25) == b"before"
    assert [info.path for info in place.open().list()] == ["x"]


@at(WRITABLE)
@pytest.mark.parametrize("prefix", ["a b", "a%20b", "a#b", "a?b"])
def test_a_prefix_may_hold_what_a_url_gives_a_meaning(place, prefix):
    origin = place.open(f"{place.uri}/{prefix}")
    origin.write("x y", *body_of(b"123"))
    [info] = origin.list()
    assert info.path == "x y"
    assert read_range(origin, info, 0, 3) == b"123"
    if place.bucket:
        assert place.server.get(place.bucket, f"some/prefix/{prefix}/x y") == b"123"


@at(BUCKETS)
def test_a_missing_bucket_is_not_found_also_when_writing(place):
    with raises(OriginNotFoundError, 3, place.missing):
        place.open(place.missing).write("x", *body_of(b"1"))


@at(READ_ONLY)
def test_what_can_only_be_read_refuses_a_write(place):
    with raises(UnsupportedOriginError, 2, "can only be read", place.uri):
        place.open().write("x", *body_of(b"1"))


@at(WRITABLE)
def test_publishing_and_staging_give_back_every_byte(place, tmp_path, store):
    files = {
        **FILES,
        **{name: name.encode() for name in ODD_NAMES},
        "big": bytes(range(256)) * (CHUNK_BYTES // 200),
    }
    source, progress = make_folder(tmp_path / "source", files), Counter()
    report = publish(source, place.uri, progress=progress)
    total = sum(len(data) for data in files.values())
    assert report.version == make_manifest(files, CHUNK_BYTES).version
    assert progress.total == progress.done == total

    progress = Counter()
    staged = stage(place.spec(), store, progress=progress)
    assert staged.artifacts[0].version == report.version
    assert staged.fetched_bytes == progress.total == progress.done == total
    assert tree(store.engine_path("llama", "weights").resolve()) == files
    assert check_deployment(store, "llama", full=True).ready


@at(LISTED)
def test_a_listing_is_staged_to_the_version_that_a_publication_has(place, store):
    for path, data in FILES.items():
        place.put(path, data)
    staged = stage(place.spec(), store)
    assert staged.artifacts[0].version == make_manifest(FILES, CHUNK_BYTES).version
    assert tree(store.engine_path("llama", "weights").resolve()) == FILES
    assert check_deployment(store, "llama", full=True).ready
    assert stage(place.spec(), store).fetched_bytes == 0


@at(("https",))
def test_what_cannot_be_listed_is_staged_by_its_manifest(place, store):
    for path, data in {**FILES, MANIFEST: make_manifest(FILES, CHUNK_BYTES).to_json()}.items():
        place.put(path, data)
    assert stage(place.spec(), store).fetched_bytes == TOTAL
    assert tree(store.engine_path("llama", "weights").resolve()) == FILES
    assert check_deployment(store, "llama", full=True).ready
    assert stage(place.spec(), store).fetched_bytes == 0


@at(WRITABLE)
def test_a_size_in_the_manifest_that_disagrees_with_the_origin_is_refused(place, tmp_path, store):
    publish(make_folder(tmp_path / "source"), place.uri)
    place.put("config.json", b"longer than before")
    with raises(OriginChangedError, 3, "config.json", "18 bytes"):
        stage(place.spec(), store)
    assert list(store.root.glob("artifacts/*/*")) == []
