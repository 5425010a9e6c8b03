"""Staging: from a spec to a deployment that is live, safe to repeat, and all or nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from llm_prefetch import ledger
from llm_prefetch.errors import (
    DigestError,
    DiskPermissionError,
    NoSpaceError,
    OriginChangedError,
    OriginNotFoundError,
    PrefetchError,
    UnsafePathError,
    UnsupportedOriginError,
)
from llm_prefetch.forecast import find_sources, forecast
from llm_prefetch.live import check_deployment, current_bundle, rollback
from llm_prefetch.manifest import CHUNK_BYTES, FileEntry, Manifest
from llm_prefetch.publish import publish
from llm_prefetch.record import Verdict, check_record
from llm_prefetch.stage import stage
from llm_prefetch.store import open_store
from llm_prefetch.verify import full_check
from tests.samples import (
    CHUNK,
    FILES,
    TOTAL,
    Counter,
    FakeOrigin,
    as_after_reboot,
    as_nobody,
    flip_byte,
    make_artifact,
    make_folder,
    make_listing,
    make_manifest,
    make_published,
    make_source,
    make_spec,
    no_record,
    only_record,
    put_manifest,
    raises,
    stage_source,
    tree,
)

pytestmark = pytest.mark.usefixtures("no_leaks")
WEIGHTS = "layers/0/weights.bin"
OTHER_PIN = "b3-" + "0" * 64


@pytest.fixture
def origin(tmp_path):
    """A published folder."""
    make_published(tmp_path / "origin")
    return tmp_path / "origin"


def _engine_files(store, name="weights"):
    return tree(store.engine_path("llama", name).resolve())


def _reads_nothing(origin):
    """Take the data away, but not its manifest."""
    for path in FILES:
        (origin / path).unlink()


def test_staging_makes_a_deployment_live_and_says_what_it_did(store, origin):
    progress = Counter()
    report = stage(make_spec(f"file://{origin}"), store, progress=progress)
    [artifact] = report.artifacts
    assert (artifact.total_bytes, artifact.fetched_bytes, artifact.reused_bytes) == (TOTAL, TOTAL, 0)
    assert (report.verdict, report.switched, report.fetched_bytes) == (Verdict.HIT, True, TOTAL)
    assert (progress.total, progress.done) == (TOTAL, TOTAL)
    assert _engine_files(store) == FILES
    assert check_deployment(store, "llama", full=True).ready
    assert list((store.root / "partial").iterdir()) == []
    assert only_record(store).boot == ""  # synced


def test_staging_again_reads_no_byte_of_the_data(store, origin):
    stage(make_spec(f"file://{origin}"), store)
    _reads_nothing(origin)
    report = stage(make_spec(f"file://{origin}"), store)
    assert (report.fetched_bytes, report.reused_bytes, report.switched) == (0, TOTAL, False)


def test_staging_a_listing_again_reads_no_byte_of_the_data(store):
    origin = FakeOrigin()
    source = make_source(origin, make_listing(origin))
    stage_source(store, source)
    assert origin.bytes_read == TOTAL
    origin.reads.clear()
    assert stage_source(store, source).fetched_bytes == 0
    assert origin.reads == []


def _planned(spec, store):
    return forecast(spec, store, find_sources(spec, store)).artifacts


def test_the_plan_says_what_staging_then_does(store, origin):
    spec = make_spec(f"file://{origin}", f"file://{origin}")
    assert [one.fetch_bytes for one in _planned(spec, store)] == [TOTAL, TOTAL]
    stage(make_spec(f"file://{origin}"), store)
    assert [one.fetch_bytes for one in _planned(spec, store)] == [0, 0], "the other name can share the files"
    assert stage(spec, store).fetched_bytes == 0


def test_a_listing_and_a_publication_of_the_same_bytes_are_the_same_version(store, tmp_path):
    files = {**FILES, "big": os.urandom(CHUNK_BYTES + 5)}
    make_folder(tmp_path / "listed", files)
    published = publish(tmp_path / "listed", f"file://{tmp_path}/published")
    report = stage(make_spec(f"file://{tmp_path}/listed"), store)
    assert report.artifacts[0].version == published.version
    assert stage(make_spec(f"file://{tmp_path}/published"), store).fetched_bytes == 0
    assert only_record(store).listing
    assert stage(make_spec(f"file://{tmp_path}/listed"), store).fetched_bytes == 0


def test_a_version_that_is_here_by_another_way_serves(store, tmp_path):
    """Published first, listed later: the bytes are fetched once more, as nobody knows yet that they are the same."""
    make_folder(tmp_path / "listed")
    publish(tmp_path / "listed", f"file://{tmp_path}/published")
    one = stage(make_spec(f"file://{tmp_path}/published"), store)
    inode = (store.artifact("weights", one.artifacts[0].version) / WEIGHTS).stat().st_ino
    two = stage(make_spec(f"file://{tmp_path}/listed"), store)
    assert one.bundle == two.bundle
    assert (store.artifact("weights", one.artifacts[0].version) / WEIGHTS).stat().st_ino == inode
    assert stage(make_spec(f"file://{tmp_path}/listed"), store).fetched_bytes == 0
    assert list((store.root / "partial").iterdir()) == []


def test_an_origin_that_was_only_touched_gives_the_same_version(store, tmp_path):
    make_folder(tmp_path / "o")
    one = stage(make_spec(f"file://{tmp_path}/o"), store)
    os.utime(tmp_path / "o" / WEIGHTS, ns=(1, 1))
    two = stage(make_spec(f"file://{tmp_path}/o"), store)
    assert (two.bundle, two.switched) == (one.bundle, False)


def test_a_new_version_goes_live_and_the_old_one_stays_for_a_rollback(store, origin):
    one = stage(make_spec(f"file://{origin}"), store)
    make_published(origin, {**FILES, "config.json": b'{"a": 2}'})
    two = stage(make_spec(f"file://{origin}"), store)
    assert two.switched
    assert _engine_files(store)["config.json"] == b'{"a": 2}'
    rollback(store, "llama")
    assert current_bundle(store, "llama") == one.bundle
    assert _engine_files(store) == FILES


def test_artifacts_with_the_same_content_are_each_whole(store, origin):
    report = stage(make_spec(f"file://{origin}", f"file://{origin}"), store)
    assert report.artifacts[0].version == report.artifacts[1].version
    assert _engine_files(store, "weights") == _engine_files(store, "weights1") == FILES


def test_a_manifest_that_the_run_knows_is_what_every_node_stages(store, tmp_path):
    make_folder(tmp_path / "o")
    known = {"weights": make_manifest()}
    report = stage(make_spec(f"file://{tmp_path}/o"), store, manifests=known)
    assert report.artifacts[0].version == make_manifest().version
    make_folder(tmp_path / "o", {"config.json": b'{"a": 2}'})
    other = open_store(tmp_path / "other", create=True)
    with raises(DigestError, 5, "config.json"):
        stage(make_spec(f"file://{tmp_path}/o"), other, manifests=known)
    assert no_record(other)


# Pins


def test_a_pin_that_fits_is_staged(store, origin):
    version = make_manifest().version
    assert stage(make_spec(f"file://{origin}", version=version), store).artifacts[0].version == version


@pytest.mark.parametrize("staged_before", [True, False])
def test_a_pin_holds_for_a_prefix_that_nobody_published(store, tmp_path, staged_before):
    """Also when the very same listing is committed here already, under the version that it really is."""
    make_folder(tmp_path / "o")
    if staged_before:
        stage(make_spec(f"file://{tmp_path}/o"), store)
    with raises(DigestError, 5, "the spec pins b3-00"):
        stage(make_spec(f"file://{tmp_path}/o", version=OTHER_PIN, deployment="pinned"), store)
    assert current_bundle(store, "pinned") is None


def test_a_pin_that_the_origin_does_not_hold_changes_nothing(store, origin):
    before = stage(make_spec(f"file://{origin}"), store)
    with raises(DigestError, 5, "the spec pins b3-00"):
        stage(make_spec(f"file://{origin}", version=OTHER_PIN), store)
    assert current_bundle(store, "llama") == before.bundle


# Wrong bytes


@pytest.mark.parametrize("path", ["config.json", WEIGHTS, "layers/1/weights.bin"])
def test_a_chunk_with_wrong_bytes_is_never_committed(store, origin, path):
    before = stage(make_spec(f"file://{origin}"), store)
    make_published(origin, {**FILES, "new": b"1", path: FILES[path][::-1]})
    flip_byte(origin / path, 3)
    progress = Counter()
    with raises(DigestError, 5, path, str(origin)):
        stage(make_spec(f"file://{origin}"), store, progress=progress)
    assert only_record(store).version == before.artifacts[0].version
    assert current_bundle(store, "llama") == before.bundle
    assert check_deployment(store, "llama", full=True).ready
    assert _engine_files(store) == FILES
    assert ledger.read(store, "stage")[-1]["outcome"].startswith(f"{path!r}: bytes 0 to ")
    assert 0 <= progress.done < progress.total


@pytest.mark.parametrize("size", [-1, +1])
def test_a_size_that_disagrees_with_the_origin_is_refused(store, origin, size):
    os.truncate(origin / WEIGHTS, len(FILES[WEIGHTS]) + size)
    with raises(OriginChangedError, 3, WEIGHTS, str(len(FILES[WEIGHTS]) + size)):
        stage(make_spec(f"file://{origin}"), store)
    assert no_record(store)


def test_a_file_that_is_gone_from_the_origin_is_named(store, origin):
    (origin / WEIGHTS).unlink()
    with raises(OriginNotFoundError, 3, WEIGHTS):
        stage(make_spec(f"file://{origin}"), store)
    assert no_record(store)


def test_a_listed_file_that_changes_before_it_is_read_is_refused(store):
    origin = FakeOrigin()
    listing = make_listing(origin)
    changed = OriginChangedError("changed", where="fake://origin", hint="again")
    origin.fault = lambda read: changed
    with raises(OriginChangedError, 3):
        stage_source(store, make_source(origin, listing))
    assert no_record(store)


@pytest.mark.parametrize("path", ["../escape", "/tmp/escape", "", "a\\b", "a\0b"])
def test_a_manifest_with_an_unsafe_path_writes_nothing(store, origin, path):
    body = json.loads(make_manifest().to_json())
    body["files"] = [[path, 0, []]]
    put_manifest(origin, json.dumps(body).encode())
    before = sorted(store.root.rglob("*"))
    with raises(UnsafePathError, 5, repr(path)):
        stage(make_spec(f"file://{origin}"), store)
    assert sorted(p for p in store.root.rglob("*") if p.parent.name not in ("ledger", "locks")) == before


def test_an_unknown_scheme_leaves_the_store_alone(store):
    with raises(UnsupportedOriginError, 2, "gopher://"):
        stage(make_spec("gopher://host/x"), store)
    assert no_record(store)


def test_when_one_artifact_fails_nothing_goes_live_and_the_others_are_kept(store, origin, tmp_path):
    spec = make_spec(f"file://{origin}", f"file://{tmp_path}/none")
    with raises(OriginNotFoundError, 3):
        stage(spec, store)
    assert current_bundle(store, "llama") is None
    make_published(tmp_path / "none", {"x": b"12"})
    report = stage(spec, store)
    assert [artifact.fetched_bytes for artifact in report.artifacts] == [0, 2]


# Damage and reboot


def test_a_touched_version_is_proven_and_not_fetched(store, origin):
    stage(make_spec(f"file://{origin}"), store)
    _reads_nothing(origin)
    os.utime(store.engine_path("llama", "weights") / WEIGHTS)
    progress = Counter()
    report = stage(make_spec(f"file://{origin}"), store, progress=progress)
    assert (report.fetched_bytes, report.verdict) == (0, Verdict.HIT)
    assert any("reading every byte" in line for line in progress.lines)
    assert progress.total == progress.done == TOTAL


@pytest.mark.parametrize("published", [True, False])
def test_after_a_reboot_a_version_that_was_not_synced_is_proven_before_it_counts(store, origin, published):
    source = make_source(FakeOrigin())
    if not published:
        source = make_source(source.origin, make_listing(source.origin))
    version = stage_source(store, source).version
    as_after_reboot(store, only_record(store))
    assert check_record(store, "weights", version).verdict is Verdict.STALE
    source.origin.reads.clear()
    assert stage_source(store, source).verdict is Verdict.HIT
    assert source.origin.reads == []
    assert only_record(store).boot == ""


def test_after_a_reboot_lost_bytes_are_found_and_fetched(store, origin):
    spec = make_spec(f"file://{origin}")
    stage(spec, store)
    as_after_reboot(store, only_record(store))
    path = store.engine_path("llama", "weights").resolve() / WEIGHTS
    flip_byte(path)
    report = stage(spec, store)
    assert report.fetched_bytes == CHUNK
    assert _engine_files(store) == FILES
    assert check_deployment(store, "llama", full=True).ready


@pytest.mark.parametrize("published", [True, False])
def test_a_damaged_version_is_repaired_in_place_of_its_names(store, origin, tmp_path, published):
    uri = f"file://{origin}"
    if not published:
        uri = f"file://{make_folder(tmp_path / 'listed')}"
    one = stage(make_spec(uri), store)
    (store.engine_path("llama", "weights") / WEIGHTS).unlink()
    assert check_deployment(store, "llama").verdict is Verdict.PARTIAL
    two = stage(make_spec(uri), store)
    assert (one.bundle, two.switched) == (two.bundle, False)
    assert check_deployment(store, "llama", full=True).ready
    assert _engine_files(store) == FILES


def test_progress_adds_up_when_proof_fails_and_bytes_are_fetched(store, origin):
    spec = make_spec(f"file://{origin}")
    stage(spec, store)
    path = store.engine_path("llama", "weights").resolve() / WEIGHTS
    flip_byte(path)
    os.utime(path)
    progress = Counter()
    stage(spec, store, progress=progress)
    assert progress.done == progress.total == 2 * TOTAL


# Concurrency


def test_stagings_of_one_version_at_once_fetch_it_once(store):
    source, reports = make_source(), []
    threads = [threading.Thread(target=lambda: reports.append(stage_source(store, source))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(report.fetched_bytes for report in reports) == [0, 0, 0, TOTAL]
    assert source.origin.bytes_read == TOTAL
    assert source.origin.readers > 0


# Disk


def test_what_cannot_fit_is_refused_before_a_byte_is_written(store, origin):
    huge = Manifest((FileEntry("config.json", 2**62, ("0" * 64,)),), 2**62)
    put_manifest(origin, huge.to_json())
    with raises(NoSpaceError, 4, str(2**62), str(store.root)):
        stage(make_spec(f"file://{origin}"), store)
    assert [path for path in (store.root / "partial").rglob("*") if path.is_file()] == []


def _on_a_small_disk(tmp_path: Path, size: str, code: str) -> str:
    """Run `code` where `disk` is a file system of `size` that ends with the process; returns what it printed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f"from pathlib import Path\ndisk = Path({str(disk)!r})\n{textwrap.dedent(code)}"
    unshare = (
        ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--user", "--map-root-user"]
    )
    mount = f'mount -t tmpfs -o size={size} tmpfs {disk} && exec {sys.executable} -c "$SCRIPT"'
    done = subprocess.run(
        [*unshare, "sh", "-c", mount],
        env={**os.environ, "SCRIPT": script},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_disk_that_is_too_small_is_told_at_once(tmp_path):
    make_published(tmp_path / "o", {"a": bytes(10**6)}, 10**5)
    out = _on_a_small_disk(
        tmp_path,
        "512k",
        f"""
        from llm_prefetch.errors import NoSpaceError
        from llm_prefetch.stage import stage
        from llm_prefetch.store import open_store
        from tests.samples import Counter, make_spec, no_record, raises
        store, progress = open_store(disk / "store", create=True), Counter()
        with raises(NoSpaceError, 4, "1000000 bytes", "free at least"):
            stage(make_spec("file://{tmp_path}/o"), store, progress=progress)
        assert no_record(store)
        assert progress.total == 0
        print("told")
        """,
    )
    assert out == "told\n"


def test_a_disk_that_fills_up_on_the_way_keeps_what_is_done(tmp_path):
    make_published(tmp_path / "o", {"a": bytes(10**6)}, 10**5)
    out = _on_a_small_disk(
        tmp_path,
        "2m",
        f"""
        from llm_prefetch.errors import NoSpaceError
        from llm_prefetch.stage import stage
        from llm_prefetch.store import open_store
        from llm_prefetch.verify import full_check
        from tests.samples import Counter, make_spec, no_record, raises
        store = open_store(disk / "store", create=True)

        def fill():
            (disk / "filler").write_bytes(bytes(1_400_000))

        progress = Counter(on_start=fill)
        with raises(NoSpaceError, 4, "no space left", "then run the same again"):
            stage(make_spec("file://{tmp_path}/o"), store, progress=progress)
        assert no_record(store)
        (disk / "filler").unlink()
        report = stage(make_spec("file://{tmp_path}/o"), store)
        assert report.fetched_bytes + progress.done == 10**6, (report, progress.done)
        assert full_check(store, "weights", report.artifacts[0].version).ready
        print("done")
        """,
    )
    assert out == "done\n"


@pytest.mark.parametrize("folder", ["partial", "artifacts", "locks", "bundles", "live"])
def test_a_store_that_may_not_be_written_is_a_permission(nobodys_folder, folder):
    with as_nobody():
        store = open_store(nobodys_folder / "store", create=True)
        make_published(nobodys_folder / "o")
        (store.root / folder).chmod(0o555)
        with raises(DiskPermissionError, 4, str(store.root), "write access"):
            stage(make_spec(f"file://{nobodys_folder}/o"), store)
        assert current_bundle(store, "llama") is None
        (store.root / folder).chmod(0o755)
        report = stage(make_spec(f"file://{nobodys_folder}/o"), store)
        assert full_check(store, "weights", report.artifacts[0].version).ready


def test_an_origin_that_may_not_be_read_is_told(nobodys_folder):
    with as_nobody():
        store = open_store(nobodys_folder / "store", create=True)
        make_published(nobodys_folder / "o")
        (nobodys_folder / "o" / WEIGHTS).chmod(0)
        with pytest.raises(PrefetchError) as caught:
            stage(make_spec(f"file://{nobodys_folder}/o"), store)
        assert (caught.value.code, caught.value.exit_code) == ("origin-access", 3)
        assert no_record(store)


# Records


def test_the_ledger_tells_what_was_staged_and_by_which_steps(store, origin):
    report = stage(make_spec(f"file://{origin}"), store)
    [row] = ledger.read(store, "stage")
    assert (row["deployment"], row["outcome"]) == ("llama", "ready")
    version = report.artifacts[0].version
    assert row["artifacts"] == [
        {"name": "weights", "version": version, "fetched": TOTAL, "reused": 0, "evicted": 0}
    ]
    steps = [step["step"] for step in row["steps"]]
    assert steps == ["resolve", "lock", "prepare", "transfer", "commit", "verify", "live", "sync"]


def test_no_secret_of_the_uri_is_recorded(store):
    source = make_source(uri="s3://key:secret@bucket/x")
    stage_source(store, source)
    assert only_record(store).uri == "s3://bucket/x"
    assert "secret" not in "".join(path.read_text() for path in store.root.rglob("*.json"))


def test_a_cancelled_staging_changes_nothing_and_can_go_on(store, origin):
    stop = threading.Event()
    stop.set()
    with pytest.raises(PrefetchError, match="cancelled"):
        stage(make_spec(f"file://{origin}"), store, stop=stop)
    assert no_record(store)
    assert stage(make_spec(f"file://{origin}"), store).verdict is Verdict.HIT


def test_the_report_of_nothing_but_hits_is_a_hit(store, origin):
    report = stage(make_spec(f"file://{origin}", f"file://{origin}"), store)
    assert report.verdict is Verdict.HIT
    assert report.fetched_bytes + report.reused_bytes == 2 * TOTAL
    assert make_artifact().name == "weights"
