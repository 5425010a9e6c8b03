"""What every origin must do, whatever it speaks and by whichever transport: what it lists and what it reads."""

from __future__ import annotations

import pytest

from llm_prefetch.errors import OriginChangedError, OriginError, OriginNotFoundError
from llm_prefetch.origins import ObjectInfo
from llm_prefetch.resolve import resolve
from tests.origins.places import ALL, BUCKETS, LISTED, ODD_NAMES, WRITABLE, at, body_of, read_range, take
from tests.samples import FILES, raises

PAGED = ("s3", "gs-key", "gs-node", "hf")
CHANGING = tuple(name for name in ALL if name != "hf")  # what a commit holds cannot change


@at(LISTED)
def test_what_is_written_is_listed_with_its_size(place):
    for path, data in FILES.items():
        place.put(path, data)
    found = list(place.open().list())
    assert {info.path: info.size for info in found} == {path: len(data) for path, data in FILES.items()}
    assert all(info.etag for info in found)


@at(LISTED)
def test_a_list_is_the_same_twice_and_from_anew(place):
    place.put("x", b"1")
    origin = place.open()
    assert list(origin.list()) == list(origin.list()) == list(place.open().list())


@at(LISTED)
def test_odd_names_make_the_whole_way(place):
    for name in ODD_NAMES:
        place.put(name, name.encode())
    origin = place.open()
    listed = {info.path: info for info in origin.list()}
    assert {path: info.size for path, info in listed.items()} == {
        name: len(name.encode()) for name in ODD_NAMES
    }
    for name, info in listed.items():
        data = name.encode()
        assert origin.stat(name) == info
        assert origin.read(name, 100) == data
        assert read_range(origin, info, 0, len(data)) == data


@at(ALL)
def test_odd_names_need_no_list(place):
    for name in ODD_NAMES:
        place.put(name, name.encode())
    origin = place.open()
    for name in ODD_NAMES:
        assert read_range(origin, ObjectInfo(name, len(name.encode()), ""), 0, 1) == name.encode()[:1]


@at(LISTED)
def test_one_object_is_described_as_in_the_list(place):
    place.put("sub/x", b"123")
    origin = place.open()
    [info] = origin.list()
    assert origin.stat("sub/x") == info


@at(ALL)
def test_what_is_not_there_is_described_by_nothing(place):
    place.put("sub/x", b"123")
    origin = place.open()
    assert origin.stat("sub/x").size == 3
    assert origin.stat("sub/y") is None
    assert origin.stat("sub/x/y") is None
    assert origin.stat("sub") is None


@at(CHANGING)
def test_the_etag_changes_with_the_bytes(place):
    place.put("x", b"123")
    before = place.open().stat("x")
    place.put("x", b"321")
    assert before.etag
    assert place.open().stat("x").etag != before.etag


@at(WRITABLE)
def test_a_neighbour_whose_name_begins_alike_is_not_listed(place):
    place.put("x", b"1")
    place.open(f"{place.uri}-2").write("y", *body_of(b"1"))
    assert [info.path for info in place.open().list()] == ["x"]


@at(LISTED)
def test_a_slash_at_the_end_changes_nothing(place):
    place.put("x", b"1")
    assert list(place.open(f"{place.uri}/").list()) == list(place.open().list())


@at(LISTED)
def test_an_empty_prefix_cannot_be_staged(place):
    assert list(place.open().list()) == []
    with raises(OriginNotFoundError, 3, place.uri):
        resolve(place.spec().artifacts[0])


@at(ALL)
def test_a_missing_bucket_root_or_repository_is_not_found(place):
    spec = place.spec().artifacts[0].model_copy(update={"uri": place.missing})
    with raises(OriginNotFoundError, 3, place.missing):
        resolve(spec)


@at(ALL)
def test_a_small_object_is_read_whole_and_a_larger_one_refused(place):
    place.put("x", b"123")
    place.put("empty", b"")
    origin = place.open()
    assert origin.read("x", 3) == b"123"
    assert origin.read("empty", 3) == b""
    with raises(OriginError, 3, "larger than 2 bytes", place.uri):
        origin.read("x", 2)
    with raises(OriginNotFoundError, 3, place.uri):
        origin.read("y", 2)


@at(ALL)
def test_a_range_is_just_that_range(place):
    data = bytes(range(100))
    place.put("x", data)
    origin = place.open()
    for start, length in [(0, 1), (0, 100), (3, 50), (99, 1), (50, 50)]:
        assert read_range(origin, origin.stat("x"), start, length) == data[start : start + length]


@at(ALL)
def test_a_range_never_gives_more_than_was_asked_for(place):
    place.put("x", bytes(range(100)))
    origin = place.open()
    reader = origin.reader()
    body = reader.open_range(origin.stat("x"), 10, 5)
    buffer = memoryview(bytearray(b"\xff" * 100))
    assert body.readinto(buffer) == 5
    assert bytes(buffer[:6]) == bytes(range(10, 15)) + b"\xff"
    assert body.readinto(buffer) == 0
    reader.close()


@at(ALL)
def test_a_reader_reads_range_after_range_also_when_one_was_given_up(place):
    data = {"x": bytes(range(100)), "y": bytes(range(100, 200))}
    for path, content in data.items():
        place.put(path, content)
    origin = place.open()
    items = {path: origin.stat(path) for path in data}
    reader = origin.reader()
    for path, start, whole in [("x", 0, True), ("y", 10, False), ("x", 50, True), ("y", 5, True)]:
        body = reader.open_range(items[path], start, 40)
        if whole:
            assert take(body) == data[path][start : start + 40]
        else:
            body.readinto(memoryview(bytearray(3)))
    reader.close()
    assert take(reader.open_range(items["x"], 0, 10)) == data["x"][:10]
    reader.close()


@at(ALL)
@pytest.mark.parametrize("size", [99, 101, 1000])
def test_an_object_of_another_size_is_refused(place, size):
    place.put("x", bytes(100))
    with raises(OriginChangedError, 3, "'x'"):
        read_range(place.open(), ObjectInfo("x", size, ""), size - 50, 50)


@at(CHANGING)
@pytest.mark.parametrize("later", [b"2" * 10, b"2", b"2" * 100])
def test_an_object_that_changed_since_it_was_listed_is_refused(place, later):
    place.put("x", b"1" * 10)
    origin = place.open()
    item = origin.stat("x")
    place.put("x", later)
    with raises(OriginChangedError, 3, "'x'"):
        read_range(origin, item, 0, 10)
    assert read_range(origin, ObjectInfo("x", len(later), ""), 0, 1) == b"2"


@at(CHANGING)
def test_no_reader_mixes_two_versions_of_an_object(place):
    place.put("x", b"1" * 10)
    origin = place.open()
    item = origin.stat("x")
    reader = origin.reader()
    assert take(reader.open_range(item, 0, 5)) == b"1" * 5
    place.put("x", b"2" * 10)
    try:
        assert take(reader.open_range(item, 5, 5)) == b"1" * 5  # a file that is still open
    except OriginChangedError as error:
        assert "'x'" in str(error)  # noqa: PT017 (either will do)
    reader.close()


@at(ALL)
def test_an_object_that_is_not_there_is_not_found(place):
    place.put("x", b"1")
    with raises(OriginNotFoundError, 3, "'none'"):
        read_range(place.open(), ObjectInfo("none", 10, ""), 0, 10)
    # Azurite, asked for a version of what is not there, says only that this version is not.
    with pytest.raises((OriginNotFoundError, OriginChangedError), match="'none'"):
        read_range(place.open(), ObjectInfo("none", 10, '"1"'), 0, 10)


@at(BUCKETS)
def test_a_whole_bucket_can_be_an_origin(place):
    place.put("x", b"1")
    whole = place.uri.removesuffix("/some/prefix")
    for uri in (whole, f"{whole}/"):
        origin = place.open(uri)
        [info] = origin.list()
        assert info.path == "some/prefix/x"
        assert read_range(origin, info, 0, 1) == b"1"


@at(BUCKETS)
def test_objects_that_stand_for_folders_are_left_out(place):
    place.put("sub/x", b"1")
    place.put("empty", b"")
    place.server.put(place.bucket, "some/prefix/sub/", b"")
    assert {info.path for info in place.open().list()} == {"sub/x", "empty"}


@at(PAGED)
def test_a_list_of_many_pages_is_whole(place):
    """The servers of these give three objects at a time."""
    for number in range(8):
        place.put(f"{number % 2}/{number}", b"1")
    assert len({info.path for info in place.open().list()}) == 8
