"""Publishing: all of a folder or nothing, and the manifest last."""

from __future__ import annotations

import io
import json
import os
import threading

import pytest

from llm_prefetch import manifest as manifests
from llm_prefetch.errors import (
    DiskPermissionError,
    OriginChangedError,
    OriginError,
    UnsafePathError,
    UnsupportedOriginError,
    UsageError,
)
from llm_prefetch.manifest import CHUNK_BYTES, parse_manifest
from llm_prefetch.publish import ETAGS_PATH, _Hashing, publish
from llm_prefetch.stage import stage
from tests.samples import (
    FILES,
    TOTAL,
    Counter,
    as_nobody,
    make_folder,
    make_manifest,
    make_spec,
    raises,
    tree,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def source(tmp_path):
    return make_folder(tmp_path / "source")


@pytest.fixture
def uri(tmp_path):
    return f"file://{tmp_path}/target"


def _published(tmp_path):
    body = (tmp_path / "target" / manifests.PATH).read_bytes()
    return parse_manifest(body, "here")


def test_what_is_published_is_what_was_there_and_its_manifest(source, uri, tmp_path):
    progress = Counter()
    report = publish(source, uri, progress=progress)
    manifest = make_manifest(chunk_bytes=CHUNK_BYTES)
    assert (report.uri, report.version, report.files, report.bytes) == (
        uri,
        manifest.version,
        len(FILES),
        TOTAL,
    )
    assert _published(tmp_path) == manifest
    target = tree(tmp_path / "target")
    assert set(json.loads(target.pop(ETAGS_PATH))) == set(FILES)
    assert target == {**FILES, manifests.PATH: manifest.to_json()}
    assert progress.total == progress.done == TOTAL


def test_a_dry_run_tells_the_version_and_writes_nothing(source, uri, tmp_path):
    report = publish(source, uri, dry_run=True)
    assert report.version == make_manifest(chunk_bytes=CHUNK_BYTES).version
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("size", [CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_chunks_end_where_they_should(tmp_path, uri, size):
    files = {"big": bytes(size)}
    report = publish(make_folder(tmp_path / "source", files), uri)
    assert report.version == make_manifest(files, CHUNK_BYTES).version


def test_publishing_again_the_same_gives_the_same_version(source, uri):
    assert publish(source, uri).version == publish(source, uri).version


def test_a_published_folder_can_be_published_elsewhere(source, uri, tmp_path):
    one = publish(source, uri)
    two = publish(tmp_path / "target", f"file://{tmp_path}/mirror")
    assert one.version == two.version


def test_publishing_is_a_round_trip(source, uri, store):
    version = publish(source, uri).version
    report = stage(make_spec(uri), store)
    assert report.artifacts[0].version == version
    assert tree(store.engine_path("llama", "weights").resolve()) == FILES


def test_files_behind_links_are_published_as_files(source, uri, tmp_path):
    (source / "link").symlink_to(source / "config.json")
    publish(source, uri)
    assert (tmp_path / "target/link").read_bytes() == FILES["config.json"]
    assert not (tmp_path / "target/link").is_symlink()


def test_a_folder_of_ours_inside_is_data_like_any_other(source, uri, tmp_path, store):
    """As a listing sees it: only the one beside the data is ours."""
    make_folder(source, {"nested/.llm-prefetch/manifest.json": b"{}", ".llm-prefetch/old": b""})
    version = publish(source, uri).version
    listed = stage(make_spec(f"file://{source}"), store)
    assert listed.artifacts[0].version == version
    assert not (tmp_path / "target/.llm-prefetch/old").exists()


def test_a_linked_folder_is_refused_and_not_left_out(source, uri, tmp_path):
    (source / "linked").symlink_to(source / "layers")
    with raises(UsageError, 2, "'linked'", str(source)):
        publish(source, uri)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("what", ["pipe", "dangling"])
def test_what_is_no_file_is_refused(source, uri, tmp_path, what):
    os.mkfifo(source / "odd") if what == "pipe" else (source / "odd").symlink_to(tmp_path / "none")
    with raises(UsageError, 2, "'odd'"):
        publish(source, uri)
    assert not (tmp_path / "target").exists()


def test_a_missing_or_empty_folder_is_refused(tmp_path, uri):
    with raises(UsageError, 2, "no such folder", "none"):
        publish(tmp_path / "none", uri)
    (tmp_path / "empty").mkdir()
    with raises(UsageError, 2, "empty"):
        publish(tmp_path / "empty", uri)


def test_a_name_that_cannot_be_staged_is_not_published(source, uri, tmp_path):
    make_folder(source, {"back\\slash": b""})
    with raises(UnsafePathError, 5, "backslash"):
        publish(source, uri)
    assert not (tmp_path / "target").exists()


def test_a_target_that_nobody_speaks_is_refused(source):
    with raises(UnsupportedOriginError, 2, "nobody://"):
        publish(source, "nobody://host/x")


@pytest.mark.parametrize("what", ["layers", "config.json"])
def test_what_may_not_be_read_is_told_and_not_left_out(nobodys_folder, what):
    with as_nobody():
        source = make_folder(nobodys_folder / "source")
        (source / what).chmod(0)
        with raises(DiskPermissionError, 4, what, "readable"):
            publish(source, f"file://{nobodys_folder}/target")
        assert not (nobodys_folder / "target" / manifests.PATH).exists()
        (source / what).chmod(0o755)


def test_a_target_that_refuses_leaves_no_manifest(source, uri, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target/layers").write_bytes(b"a file in the way")
    with pytest.raises(OriginError) as caught:
        publish(source, uri)
    assert caught.value.exit_code == 3
    assert not (tmp_path / "target" / manifests.PATH).exists()


def test_a_file_that_grows_while_it_is_read_is_not_published(source, uri, tmp_path):
    def grow(delta):
        path = source / "layers/1/weights.bin"
        if path.stat().st_size == len(FILES["layers/1/weights.bin"]):
            with path.open("ab") as file:
                file.write(b"more")

    with raises(OriginChangedError, 3, "changed while it was read"):
        publish(source, uri, progress=Counter(on_advance=grow))
    assert not (tmp_path / "target" / manifests.PATH).exists()


def test_going_back_to_the_front_starts_digests_and_count_anew(source):
    """Uploaders look for the size first, and read again what they have to send again."""
    progress = Counter()
    with (source / "config.json").open("rb", buffering=0) as file:
        hashing = _Hashing(file, progress, threading.Event())
        assert hashing.seek(0, io.SEEK_END) == 8
        assert hashing.tell() == 8
        hashing.seek(0)
        assert hashing.read(5) == FILES["config.json"][:5]
        hashing.seek(0)
        assert hashing.read() == FILES["config.json"]
        assert hashing.digests() == make_manifest(chunk_bytes=CHUNK_BYTES).files[0].chunks
        assert hashing.bytes == progress.done == 8


def test_publishing_again_uploads_only_what_changed(source, uri, tmp_path):
    publish(source, uri)
    inodes = {path: (tmp_path / "target" / path).stat().st_ino for path in FILES}
    (source / "config.json").write_bytes(b'{"a": 2}')
    report = publish(source, uri)
    assert report.kept == len(FILES) - 1
    changed = {path for path, inode in inodes.items() if (tmp_path / "target" / path).stat().st_ino != inode}
    assert changed == {"config.json"}
    assert (tmp_path / "target/config.json").read_bytes() == b'{"a": 2}'


def test_what_an_interrupted_publish_left_is_uploaded_again(source, uri, tmp_path, store):
    """Other bytes of the same size lie beside the manifest of before: neither size nor manifest shows it."""
    publish(source, uri)
    (tmp_path / "target/config.json").write_bytes(b'{"a": 2}')
    assert publish(source, uri).kept == len(FILES) - 1
    assert stage(make_spec(uri), store).fetched_bytes == TOTAL


def test_a_damaged_note_of_what_was_published_costs_only_uploads(source, uri, tmp_path):
    publish(source, uri)
    (tmp_path / "target/.llm-prefetch/etags.json").write_bytes(b"[")
    assert publish(source, uri).kept == 0
