"""A manifest says one thing in one way, and what contradicts itself is never believed."""

from __future__ import annotations

import json

import pytest
from blake3 import blake3
from hypothesis import assume, given
from hypothesis import strategies as st

from llm_prefetch.errors import ManifestError, PrefetchError, UnsafePathError
from llm_prefetch.manifest import (
    CHUNK_BYTES,
    FileEntry,
    ListedFile,
    Listing,
    Manifest,
    canonical_json,
    chunk_count,
    parse_manifest,
)
from tests.samples import FILES, make_manifest, raises

_component = st.text(alphabet="abAB09._- äü", min_size=1, max_size=6).filter(lambda c: c not in (".", ".."))
_files = st.dictionaries(
    st.lists(_component, min_size=1, max_size=3).map("/".join), st.binary(max_size=40), min_size=1, max_size=5
)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_identity = st.dictionaries(st.text(min_size=1, max_size=5), _json, max_size=3)


def _no_collision(files):
    return not any(other.startswith(f"{path}/") for path in files for other in files)


@st.composite
def manifests(draw):
    files = draw(_files.filter(_no_collision))
    return make_manifest(files, draw(st.integers(1, 16)), **draw(_identity.filter(_is_utf8)))


def _is_utf8(value):
    try:
        canonical_json(value)
    except UnicodeEncodeError:
        return False
    return not {"files", "chunk_bytes"} & set(value)


@given(manifests())
def test_a_manifest_survives_the_round_trip(manifest):
    again = parse_manifest(manifest.to_json(), "here")
    assert again == manifest
    assert again.version == manifest.version
    assert again.to_json() == manifest.to_json()


@given(manifests(), st.integers(0, 4))
def test_layout_of_the_json_does_not_change_the_version(manifest, indent):
    other = json.dumps(json.loads(manifest.to_json()), indent=indent, ensure_ascii=True).encode()
    assert parse_manifest(other, "here").version == manifest.version


@given(manifests(), manifests())
def test_versions_are_equal_exactly_when_manifests_are(one, two):
    assert (one.version == two.version) == (one == two)


@given(manifests(), st.data())
def test_a_changed_byte_never_passes_for_the_same_version(manifest, data):
    body = bytearray(manifest.to_json())
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    _refused_or_other(bytes(body), manifest)


@given(manifests(), st.data())
def test_a_cut_manifest_is_refused(manifest, data):
    body = manifest.to_json()
    with pytest.raises(ManifestError):
        parse_manifest(body[: data.draw(st.integers(0, len(body) - 1))], "here")


@given(manifests(), _json, st.data())
def test_a_changed_value_never_passes_for_the_same_version(manifest, value, data):
    body = json.loads(manifest.to_json())
    place = body
    while isinstance(place, dict | list) and place:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or data.draw(st.booleans()):
            break
        place = place[key]
    assume(place)
    place[key] = value
    _refused_or_other(json.dumps(body).encode(), manifest)


def _refused_or_other(body, manifest):
    try:
        found = parse_manifest(body, "here")
    except (ManifestError, UnsafePathError):
        return
    assert (found.version == manifest.version) == (found == manifest)
    assert parse_manifest(found.to_json(), "here") == found


@given(st.binary(max_size=60) | _json.map(lambda value: json.dumps(value).encode()))
def test_anything_else_is_refused_in_our_words(body):
    with pytest.raises(PrefetchError) as caught:
        parse_manifest(body, "here")
    assert caught.value.exit_code in (3, 5)


def _body(**change):
    return {**json.loads(make_manifest().to_json()), **change}


@pytest.mark.parametrize(
    "change",
    [
        {"format": "llm-prefetch/manifest/2"},
        {"format": None},
        {"chunk_bytes": 0},
        {"chunk_bytes": -1},
        {"chunk_bytes": True},
        {"chunk_bytes": 8.0},
        {"chunk_bytes": "8"},
        {"files": []},
        {"files": None},
        {"files": [["a"]]},
        {"files": [["a", 0, [], []]]},
        {"files": [["a", -1, []]]},
        {"files": [["a", True, ["0" * 64]]]},
        {"files": [["a", 1.0, ["0" * 64]]]},
        {"files": [[1, 0, []]]},
        {"files": [["a", 0, ["0" * 64]]]},
        {"files": [["a", 9, ["0" * 64]]]},
        {"files": [["a", 8, ["0" * 64] * 2]]},
        {"files": [["a", 1, "0" * 64]]},
        {"files": [["a", 1, ["0" * 63]]]},
        {"files": [["a", 1, ["0" * 64 + "\n"]]]},
        {"files": [["a", 1, ["A" * 64]]]},
        {"files": [["a", 1, [None]]]},
        {"files": [["b", 0, []], ["a", 0, []]]},
        {"identity": []},
        {"identity": "x"},
        {"identity": {"gpu": float("nan")}},
        {"identity": {"gpu": float("inf")}},
        {"identity": {"gpu": "\ud800"}},
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(change):
    with raises(ManifestError, 3, "not a usable manifest", "s3://b/p"):
        parse_manifest(json.dumps(_body(**change)).encode(), "s3://b/p")


@pytest.mark.parametrize("path", ["", "../a", "/a", "a\\b", "a\0b", "a/../b", "a//b", "a/", "."])
def test_a_manifest_with_an_unsafe_path_is_refused(path):
    body = json.dumps(_body(files=[[path, 0, []]])).encode()
    with raises(UnsafePathError, 5, repr(path), "s3://b/p"):
        parse_manifest(body, "s3://b/p")


@pytest.mark.parametrize("paths", [["a", "a"], ["a", "a/b"]])
def test_a_manifest_whose_entries_collide_is_refused(paths):
    body = json.dumps(_body(files=[[path, 0, []] for path in paths])).encode()
    with raises(UnsafePathError, 5, "'a'"):
        parse_manifest(body, "here")


def test_a_manifest_nested_too_deeply_is_refused():
    body = b'{"format":"llm-prefetch/manifest/1","identity":' + b"[" * 200_000
    with raises(ManifestError, 3):
        parse_manifest(body, "here")


def test_every_part_enters_the_version():
    base = make_manifest()
    others = [
        make_manifest({**FILES, "more": b""}),
        make_manifest({**FILES, "config.json": b'{"a": 2}'}),
        make_manifest(chunk_bytes=16),
        make_manifest(gpu="A10G"),
    ]
    assert len({manifest.version for manifest in [base, *others]}) == 5


def test_a_selection_keeps_order_digests_and_identity():
    manifest = make_manifest(gpu="A10G").select(["layers/1/weights.bin", "config.json", "not there"])
    assert [file.path for file in manifest.files] == ["config.json", "layers/1/weights.bin"]
    assert manifest.identity == {"gpu": "A10G"}
    assert manifest.total_bytes == 8 + 17


@pytest.mark.parametrize(
    ("size", "chunks"), [(0, 0), (1, 1), (CHUNK_BYTES, 1), (CHUNK_BYTES + 1, 2), (5 * CHUNK_BYTES, 5)]
)
def test_an_empty_file_has_no_chunk_and_the_last_may_be_short(size, chunks):
    assert chunk_count(size) == chunks


def test_a_sealed_listing_is_the_manifest_that_publishing_gives():
    listing = Listing(tuple(ListedFile(path, len(FILES[path]), "tag") for path in sorted(FILES)))
    digests = [[blake3(FILES[file.path]).hexdigest()] if file.size else [] for file in listing.files]
    assert listing.seal(digests) == make_manifest(chunk_bytes=CHUNK_BYTES)


@pytest.mark.parametrize("other", [ListedFile("b", 1, "t"), ListedFile("a", 2, "t"), ListedFile("a", 1, "u")])
def test_a_listing_of_other_objects_has_another_key(other):
    assert Listing((ListedFile("a", 1, "t"),)).key != Listing((other,)).key


def test_sealing_needs_the_digests_of_every_file():
    with pytest.raises(ValueError):
        Listing((ListedFile("a", 0, ""), ListedFile("b", 0, ""))).seal([[]])


def test_an_entry_is_a_plain_value():
    assert Manifest((FileEntry("a", 0, ()),)) == Manifest((FileEntry("a", 0, ()),))
