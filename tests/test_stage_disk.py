"""A disk that is too small, fills up, or may not be written, and files that may not be read."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from llm_prefetch.errors import (
    DiskPermissionError,
    NoSpaceError,
    PrefetchError,
)
from llm_prefetch.live import current_bundle
from llm_prefetch.manifest import FileEntry, Manifest
from llm_prefetch.stage import stage
from llm_prefetch.store import open_store
from llm_prefetch.verify import full_check
from tests.samples import (
    WEIGHTS,
    as_nobody,
    make_published,
    make_spec,
    no_record,
    put_manifest,
    raises,
)
from tests.small_disk import run_on_small_disk

pytestmark = pytest.mark.usefixtures("no_leaks")


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
    return run_on_small_disk(disk, script, size=size)


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
