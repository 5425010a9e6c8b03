"""A new version fetches only what no committed version on the node holds; a repair fetches only what is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_prefetch.plan import make_plan
from llm_prefetch.record import CommitRecord, Verdict, read_record
from llm_prefetch.stage import repair, stage
from llm_prefetch.store import NodeStore, open_store
from llm_prefetch.verify import full_check, quick_check
from tests.samples import (
    FILES,
    TOTAL,
    FakeOrigin,
    make_manifest,
    make_published,
    make_source,
    make_spec,
    stage_source,
)

WEIGHTS = "layers/0/weights.bin"
CHANGED = {**FILES, "layers/1/weights.bin": b"layer 1 has changed"}


def staged(store: NodeStore, files=FILES, **options) -> tuple[FakeOrigin, str]:
    origin = FakeOrigin(files)
    return origin, stage_source(store, make_source(origin, **options)).version


def assert_whole(store: NodeStore, version: str, files, name: str = "weights") -> None:
    assert full_check(store, name, version).verdict is Verdict.HIT
    base = store.artifact(name, version)
    assert {str(p.relative_to(base)): p.read_bytes() for p in base.rglob("*") if p.is_file()} == dict(files)


def test_only_the_changed_file_is_fetched_and_the_others_are_links(store):
    _, one = staged(store)
    origin, two = staged(store, CHANGED)
    assert {read.path for read in origin.reads} == {"layers/1/weights.bin"}
    for path in ("config.json", WEIGHTS):
        assert (store.artifact("weights", one) / path).samefile(store.artifact("weights", two) / path)
    assert_whole(store, one, FILES)
    assert_whole(store, two, CHANGED)


def test_of_a_changed_file_only_the_changed_chunks_are_fetched(store):
    _, one = staged(store)
    changed = {**FILES, WEIGHTS: FILES[WEIGHTS][:8] + b"CHANGED!" + FILES[WEIGHTS][16:]}
    origin, two = staged(store, changed)
    assert [(read.start, read.length) for read in origin.reads] == [(8, 8)]
    assert_whole(store, one, FILES)
    assert_whole(store, two, changed)


def test_the_same_version_under_another_name_fetches_nothing(store):
    staged(store)
    origin, version = staged(store, name="other")
    assert origin.reads == []
    assert_whole(store, version, FILES, name="other")


def test_a_plan_counts_what_is_held_and_writes_nothing(store):
    staged(store)
    before = sorted(store.root.rglob("*"))
    plan = make_plan(store, make_source(FakeOrigin(CHANGED)))
    assert plan.fetch_bytes == len(CHANGED["layers/1/weights.bin"])
    assert sorted(store.root.rglob("*")) == before


def test_a_version_that_is_not_a_hit_lends_nothing(store):
    _, one = staged(store)
    (store.artifact("weights", one) / "config.json").write_bytes(b'{"a": 2}')
    origin, _ = staged(store, CHANGED)
    assert sum(read.length for read in origin.reads) == sum(map(len, CHANGED.values()))


def test_a_lent_chunk_that_rotted_unseen_is_fetched_instead(store):
    _, one = staged(store)
    path = store.artifact("weights", one) / WEIGHTS
    times = path.stat()
    path.write_bytes(b"rotten" + FILES[WEIGHTS][6:])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed = {**FILES, WEIGHTS: FILES[WEIGHTS][:16] + b"CHANGED!" + FILES[WEIGHTS][24:]}
    _, two = staged(store, changed)
    assert_whole(store, two, changed)


def test_a_file_that_two_versions_share_is_never_written_to(store):
    """A staging of the second version was killed after it linked, before it entered that into the journal."""
    _, one = staged(store)
    source = make_source(FakeOrigin(CHANGED))
    tree = store.partial(source.key) / "tree"
    (tree / "layers/1").mkdir(parents=True)
    os.link(store.artifact("weights", one) / "layers/1/weights.bin", tree / "layers/1/weights.bin")
    report = stage_source(store, source)
    assert_whole(store, one, FILES)
    assert_whole(store, report.version, CHANGED)


@given(
    data=st.binary(max_size=64),
    edits=st.lists(st.tuples(st.integers(0, 63), st.binary(min_size=1, max_size=9))),
)
def test_whatever_was_edited_the_versions_are_whole(tmp_path_factory, data, edits):
    edited = bytearray(data)
    for at, piece in edits:
        edited[at : at + len(piece)] = piece
    root = open_store(tmp_path_factory.mktemp("store"), create=True)
    first, second = {"a": data, "b": b"same"}, {"a": bytes(edited), "c": b"same"}
    _, one = staged(root, first)
    origin, two = staged(root, second)
    held = {digest for file in make_manifest(first).files for digest in file.chunks}
    new = [d for file in make_manifest(second).files for d in file.chunks if d not in held]
    assert len(origin.reads) == len(new)
    assert_whole(root, one, first)
    assert_whole(root, two, second)


@pytest.fixture
def published(store, tmp_path: Path) -> tuple[str, str]:
    uri = make_published(tmp_path / "origin")
    return uri, stage(make_spec(uri), store).artifacts[0].version


def _record(store: NodeStore, version: str) -> CommitRecord:
    record = read_record(store, "weights", version)
    assert record is not None
    return record


def test_a_repair_fetches_the_wrong_chunk_alone_and_leaves_open_files_as_they_are(store, published):
    _, version = published
    path = store.artifact("weights", version) / WEIGHTS
    damaged = FILES[WEIGHTS][:8] + b"damaged!" + FILES[WEIGHTS][16:]
    path.chmod(0o644)
    path.write_bytes(damaged)
    with path.open("rb") as running:
        assert full_check(store, "weights", version).verdict is Verdict.CORRUPT
        report = repair(store, _record(store, version))
        assert running.read() == damaged
    assert (report.fetched_bytes, report.reused_bytes) == (8, TOTAL - 8)
    assert_whole(store, version, FILES)
    assert quick_check(store, "weights", version).ready


def test_a_repair_works_without_the_origins_manifest(store, published, tmp_path):
    _, version = published
    (tmp_path / "origin/.llm-prefetch/manifest.json").unlink()
    (store.artifact("weights", version) / "config.json").unlink()
    assert repair(store, _record(store, version)).fetched_bytes == len(FILES["config.json"])
    assert_whole(store, version, FILES)
