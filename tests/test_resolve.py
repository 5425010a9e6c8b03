"""From an artifact of the spec to what exactly is to be staged."""

from __future__ import annotations

import json

import pytest

from llm_prefetch.errors import (
    DigestError,
    ManifestError,
    OriginNotFoundError,
    SpecError,
    UnsafePathError,
    UnsupportedOriginError,
)
from llm_prefetch.manifest import Listing
from llm_prefetch.resolve import resolve
from tests.samples import (
    FILES,
    make_artifact,
    make_folder,
    make_manifest,
    make_published,
    put_manifest,
    raises,
)


def test_a_published_manifest_is_taken(tmp_path):
    source = resolve(make_artifact(make_published(tmp_path / "o")))
    assert source.content == make_manifest()
    assert source.key == make_manifest().version


def test_a_prefix_that_nobody_published_is_listed(tmp_path):
    make_folder(tmp_path / "o")
    source = resolve(make_artifact(f"file://{tmp_path}/o"))
    assert isinstance(source.content, Listing)
    assert [(file.path, file.size) for file in source.content.files] == [
        (path, len(FILES[path])) for path in sorted(FILES)
    ]
    assert source.key == source.content.key == resolve(make_artifact(f"file://{tmp_path}/o")).key


def test_a_change_at_the_origin_changes_the_key(tmp_path):
    make_folder(tmp_path / "o")
    before = resolve(make_artifact(f"file://{tmp_path}/o")).key
    make_folder(tmp_path / "o", {"config.json": b'{"a": 2}'})
    assert resolve(make_artifact(f"file://{tmp_path}/o")).key != before


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        ({"include": ["*.bin"]}, ["layers/0/weights.bin", "layers/1/weights.bin"]),
        ({"exclude": ["layers/*"]}, ["config.json", "empty"]),
        ({"include": ["layers/*"], "exclude": ["*/1/*"]}, ["layers/0/weights.bin"]),
        ({}, sorted(FILES)),
    ],
)
def test_patterns_choose_files(tmp_path, published, patterns, chosen):
    make_published(tmp_path / "o") if published else make_folder(tmp_path / "o")
    source = resolve(make_artifact(f"file://{tmp_path}/o", **patterns))
    assert [file.path for file in source.content.files] == chosen


@pytest.mark.parametrize("published", [True, False])
def test_patterns_that_leave_nothing_are_refused(tmp_path, published):
    make_published(tmp_path / "o") if published else make_folder(tmp_path / "o")
    with raises(SpecError, 2, "leave no file"):
        resolve(make_artifact(f"file://{tmp_path}/o", include=["*.gguf"]))


def test_a_manifest_that_the_run_knows_needs_no_look_at_the_origin(tmp_path):
    source = resolve(make_artifact(f"file://{tmp_path}/gone"), pinned=make_manifest())
    assert source.content == make_manifest()


def test_a_pin_must_be_what_the_origin_holds(tmp_path):
    uri = make_published(tmp_path / "o")
    assert resolve(make_artifact(uri, version=make_manifest().version)).content == make_manifest()
    with raises(DigestError, 5, "the spec pins b3-00", uri):
        resolve(make_artifact(uri, version="b3-" + "0" * 64))


def test_a_pin_must_be_what_the_run_knows(tmp_path):
    with raises(DigestError, 5, "the spec pins b3-00"):
        resolve(make_artifact(f"file://{tmp_path}", version="b3-" + "0" * 64), pinned=make_manifest())


@pytest.mark.parametrize("uri", ["nobody://host/x", "S3://bucket/x", "x", "zip://a::file:///b"])
def test_a_scheme_that_nobody_speaks_is_refused(uri):
    artifact = make_artifact().model_copy(update={"uri": uri})
    with raises(UnsupportedOriginError, 2, uri.partition("a::")[0]):
        resolve(artifact)


@pytest.mark.parametrize("uri", ["file://relative/x", "file:///a%00b", "s3:///prefix", "s3://b ucket/x"])
def test_a_uri_that_names_no_place_is_refused(uri):
    with raises(UnsupportedOriginError, 2, uri):
        resolve(make_artifact(uri))


def test_a_missing_folder_is_not_found(tmp_path):
    with raises(OriginNotFoundError, 3, str(tmp_path)):
        resolve(make_artifact(f"file://{tmp_path}/none"))


@pytest.mark.parametrize("content", [{}, {".llm-prefetch/notes": b""}])
def test_an_empty_prefix_is_not_found(tmp_path, content):
    make_folder(tmp_path, content)
    with raises(OriginNotFoundError, 3, "empty", str(tmp_path)):
        resolve(make_artifact(f"file://{tmp_path}"))


def test_an_unsafe_path_in_the_listing_is_refused(tmp_path):
    make_folder(tmp_path / "o", {"back\\slash": b""})
    with raises(UnsafePathError, 5, "backslash"):
        resolve(make_artifact(f"file://{tmp_path}/o"))


def test_an_unsafe_path_in_the_manifest_is_refused(tmp_path):
    body = json.loads(make_manifest().to_json())
    body["files"][0][0] = "../../escape"
    put_manifest(tmp_path, json.dumps(body).encode())
    with raises(UnsafePathError, 5, "../../escape", ".llm-prefetch/manifest.json"):
        resolve(make_artifact(f"file://{tmp_path}"))


def test_a_torn_manifest_is_refused_and_not_replaced_by_a_listing(tmp_path):
    make_published(tmp_path)
    put_manifest(tmp_path, make_manifest().to_json()[:50])
    with raises(ManifestError, 3, ".llm-prefetch/manifest.json"):
        resolve(make_artifact(f"file://{tmp_path}"))
