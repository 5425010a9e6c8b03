"""Leases: a running replica keeps its generation, until its process ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm_prefetch.errors import DiskError, LockTimeoutError
from llm_prefetch.leases import Lease, hold, leased, staging, staging_in_progress, wait_for_stagings
from llm_prefetch.store import open_store, release
from tests.samples import as_nobody

REPOSITORY = Path(__file__).parents[1]
_HOLDER = """
import sys, time
from pathlib import Path
from llm_prefetch import leases
from llm_prefetch.store import open_store
store = open_store(Path(sys.argv[1]))
with leases.staging(store, "llama"):
    leases.hold(store, "bundle-a", deployment="llama", replica="r1")
    print("held", flush=True)
    time.sleep(1000)
"""


@contextlib.contextmanager
def holder(store) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds a lease and stages."""
    argv = [sys.executable, "-c", _HOLDER, str(store.root)]
    with subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def files(store) -> list[str]:
    return [path.name for path in (store.root / "leases").iterdir()]


def test_a_lease_tells_who_runs_on_what(store):
    fd = hold(store, "bundle-a", deployment="llama", replica="app#llama#1")
    [lease] = leased(store)
    assert (lease.bundle, lease.deployment, lease.replica, lease.pid) == (
        "bundle-a", "llama", "app#llama#1", os.getpid(),
    )  # fmt: skip
    assert lease.at > 0
    release(fd)


def test_several_replicas_lease_the_same_generation_and_each_counts(store):
    fds = [hold(store, bundle) for bundle in ("bundle-b", "bundle-a", "bundle-a")]
    assert [lease.bundle for lease in leased(store)] == ["bundle-a", "bundle-a", "bundle-b"]
    release(fds.pop())
    assert [lease.bundle for lease in leased(store)] == ["bundle-a", "bundle-b"]
    for fd in fds:
        release(fd)


def test_a_lease_that_was_let_go_leaves_nothing(store):
    release(hold(store, "bundle-a"))
    assert leased(store) == []
    assert files(store) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_lease_ends_with_its_process_however_it_ends(store, how):
    with holder(store) as process:
        assert [lease.pid for lease in leased(store)] == [process.pid]
        process.send_signal(how)
        process.wait()
        assert leased(store) == []
    assert files(store) == []


def test_a_program_that_the_replica_started_does_not_keep_the_lease(store):
    fd = hold(store, "bundle-a")
    with subprocess.Popen(["sleep", "1000"], close_fds=False) as child:
        os.close(fd)
        assert leased(store) == []
        child.kill()


def test_a_child_that_was_forked_keeps_the_lease_as_it_has_the_files_mapped(store):
    fd = hold(store, "bundle-a")
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    os.close(fd)
    assert [lease.bundle for lease in leased(store)] == ["bundle-a"]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert leased(store) == []


def test_what_cannot_be_read_counts_as_held(store):
    fd = hold(store, "bundle-a")
    os.ftruncate(fd, 0)
    assert leased(store) == [Lease("bundle-a")]
    release(fd)


def test_another_who_looks_at_the_same_time_is_not_taken_for_the_holder(store):
    release(hold(store, "bundle-a"))
    [path] = (store.root / "leases").iterdir()
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert leased(store) == []


def test_a_file_of_a_taker_that_died_half_way_is_swept(store):
    (store.root / "leases" / ".bundle-a.7-aa.json.tmp").write_text("{")
    assert leased(store) == []
    assert files(store) == []


def test_sweeps_do_not_disturb_those_who_take_leases(store):
    stop = threading.Event()
    problems: list[Exception] = []

    def sweep() -> None:
        while not stop.is_set():
            try:
                leased(store)
            except Exception as error:
                problems.append(error)

    sweepers = [threading.Thread(target=sweep) for _ in range(2)]
    for thread in sweepers:
        thread.start()
    try:
        for _ in range(50):
            fds = [hold(store, "bundle-a") for _ in range(3)]
            assert len(leased(store)) == 3
            for fd in fds:
                release(fd)
    finally:
        stop.set()
        for thread in sweepers:
            thread.join()
    assert problems == []


def test_a_store_that_may_not_be_written_says_so(nobodys_folder):
    store = open_store(nobodys_folder / "store", create=True)
    with as_nobody(), pytest.raises(DiskError):
        hold(store, "bundle-a")


def test_a_staging_in_progress_is_seen_until_it_ends(store):
    assert not staging_in_progress(store, "llama")
    with staging(store, "llama"), staging(store, "llama"):
        assert staging_in_progress(store, "llama")
        assert not staging_in_progress(store, "other")
    assert not staging_in_progress(store, "llama")


def test_a_staging_is_seen_by_one_who_may_only_read_too(nobodys_folder):
    store = open_store(nobodys_folder / "store", create=True)
    with staging(store, "llama"), as_nobody():
        assert staging_in_progress(store, "llama")
    with as_nobody():
        assert not staging_in_progress(store, "llama")


def test_a_staging_whose_process_was_killed_is_not_in_progress(store):
    with holder(store) as process:
        assert staging_in_progress(store, "llama")
        process.kill()
        process.wait()
        assert not staging_in_progress(store, "llama")


def test_a_staging_that_cannot_give_its_sign_goes_on(store):
    (store.root / "locks").rmdir()
    with staging(store, "llama"):
        assert not staging_in_progress(store, "llama")


def test_a_wait_for_stagings_ends_with_the_last_of_them(store):
    wait_for_stagings(store, "llama", seconds=0)
    with staging(store, "llama"):
        wait_for_stagings(store, "other", seconds=0)
        with pytest.raises(LockTimeoutError, match="a staging of llama did not end"):
            wait_for_stagings(store, "llama", seconds=0)
    wait_for_stagings(store, "llama", seconds=0)
