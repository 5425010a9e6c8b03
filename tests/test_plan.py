"""The plan: what to fetch is exactly what is not here yet."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from llm_prefetch.manifest import CHUNK_BYTES, ListedFile, Listing
from llm_prefetch.plan import all_chunks, find_committed, make_plan
from llm_prefetch.salvage import prepare_partial
from llm_prefetch.store import open_store
from tests.samples import (
    FILES,
    TOTAL,
    FakeOrigin,
    as_after_reboot,
    make_listing,
    make_manifest,
    make_source,
    only_record,
    stage_source,
    tree,
)

_files = st.dictionaries(st.sampled_from("abcdef"), st.binary(max_size=60), min_size=1, max_size=4)
CHUNKS = all_chunks(make_source())


@given(_files, st.integers(1, 20))
def test_chunks_cover_every_byte_once(files, chunk_bytes):
    source = make_source(FakeOrigin(files), make_manifest(files, chunk_bytes))
    covered = [
        (chunk.file, at)
        for chunk in all_chunks(source)
        for at in range(chunk.start, chunk.start + chunk.length)
    ]
    expected = [(n, at) for n, path in enumerate(sorted(files)) for at in range(len(files[path]))]
    assert covered == expected
    assert all(chunk.digest for chunk in all_chunks(source))


def test_chunks_of_a_listing_have_no_digest_yet():
    listing = Listing((ListedFile("a", CHUNK_BYTES + 1, ""), ListedFile("b", 0, "")))
    chunks = all_chunks(make_source(content=listing))
    assert [(chunk.file, chunk.index, chunk.length, chunk.digest) for chunk in chunks] == [
        (0, 0, CHUNK_BYTES, ""),
        (0, 1, 1, ""),
    ]


def test_of_an_empty_store_everything_is_fetched(store):
    plan = make_plan(store, make_source())
    assert (plan.committed, plan.total_bytes, plan.reuse_bytes, plan.fetch_bytes) == (None, TOTAL, 0, TOTAL)


def test_planning_writes_nothing(store):
    before = sorted(store.root.rglob("*"))
    make_plan(store, make_source())
    assert sorted(store.root.rglob("*")) == before


def test_of_a_committed_version_nothing_is_fetched(store):
    source = make_source()
    stage_source(store, source)
    plan = make_plan(store, source)
    assert plan.committed == only_record(store)
    assert (plan.chunks, plan.fetch_bytes, plan.reuse_bytes) == ((), 0, TOTAL)


@given(st.sets(st.sampled_from(CHUNKS)))
def test_whatever_was_done_before_the_rest_is_fetched_and_the_result_is_the_same(done):
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder), create=True)
        source = make_source()
        journal = prepare_partial(store, source)
        journal.open()
        paths = sorted(FILES)
        for chunk in done:
            target = store.partial(source.key) / "tree" / paths[chunk.file]
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.write_bytes(bytes(len(FILES[paths[chunk.file]])))
            with target.open("r+b") as file:
                file.seek(chunk.start)
                file.write(FILES[paths[chunk.file]][chunk.start : chunk.start + chunk.length])
            journal.enter(chunk.file, chunk.index, chunk.digest)
        journal.close()

        rest = TOTAL - sum(chunk.length for chunk in done)
        assert make_plan(store, source).fetch_bytes == rest
        report = stage_source(store, source)

        assert (report.fetched_bytes, report.reused_bytes) == (rest, TOTAL - rest)
        assert source.origin.bytes_read == rest
        assert report.version == make_manifest().version
        assert tree(store.artifact("weights", report.version)) == FILES


def test_a_journal_that_contradicts_the_manifest_is_not_believed(store):
    source = make_source()
    journal = prepare_partial(store, source)
    journal.open()
    journal.enter(CHUNKS[0].file, CHUNKS[0].index, "00" * 32)
    journal.enter(99, 99, "00" * 32)
    journal.close()
    assert make_plan(store, source).fetch_bytes == TOTAL


def test_a_version_in_doubt_does_not_count_as_committed(store):
    source = make_source()
    stage_source(store, source)
    as_after_reboot(store, only_record(store))
    assert find_committed(store, source) is None


def test_a_listing_is_found_by_its_key(store):
    origin = FakeOrigin()
    source = make_source(origin, make_listing(origin))
    stage_source(store, source)
    assert find_committed(store, source) == only_record(store)
    changed = FakeOrigin({**FILES, "config.json": b'{"a": 2}'})
    assert find_committed(store, make_source(changed, make_listing(changed))) is None


def test_the_same_version_under_another_name_does_not_count(store):
    stage_source(store, make_source())
    assert find_committed(store, make_source(name="other")) is None


def test_what_is_linked_takes_no_space_and_what_is_copied_does(store):
    stage_source(store, make_source())
    linked = {path: FILES[path] for path in ("layers/0/weights.bin", "layers/1/weights.bin")}
    plan = make_plan(store, make_source(FakeOrigin({**linked, "new": b"new"})))
    assert (plan.fetch_bytes, plan.space_bytes) == (3, 3)
    half = {"layers/0/weights.bin": FILES["layers/0/weights.bin"][:16] + b"other"}
    plan = make_plan(store, make_source(FakeOrigin(half)))
    assert (plan.fetch_bytes, plan.space_bytes) == (5, 21)
