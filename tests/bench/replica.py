"""The checks of many replicas that start at one moment on one node."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace

from llm_prefetch.live import Member, make_bundle, switch
from llm_prefetch.record import make_record, write_record
from llm_prefetch.serve import PrefetchCallback
from llm_prefetch.store import open_store
from tests.bench.samples import lay_out, sparse_manifest
from tests.bench.table import GB, Row, row

_REPLICAS = 50
_PAUSE_SECONDS = 1.0


def checks_at_once(base: Path, runs: int) -> list[Row]:
    """Fifty replicas on a node where 300 files of 200 GB are staged.

    Each is a process of its own and makes the whole way of a hit: lock, lease, check, ledger.
    """
    root = base / "checks"
    _stage(root)
    slowest, middle, cpu, alone = [], [], [], []
    for _ in range(runs):
        found = _start(root, _REPLICAS)
        took = sorted(milliseconds for milliseconds, _ in found)
        slowest.append(took[-1])
        middle.append(took[len(took) // 2])
        cpu.append(sum(milliseconds for _, milliseconds in found))
        alone += [milliseconds for milliseconds, _ in _start(root, 1)]
    shutil.rmtree(root)
    cores = os.cpu_count() or 1
    return [
        row(
            "fifty replicas' checks at once, the slowest", slowest, "ms", "<= 100 ms",
            f"{_REPLICAS} processes, {cores} cores; 300 files, 200 GB",
        ),
        row("  the middle one", middle, "ms"),
        row("  one alone", alone, "ms"),
        row("  processor time of all", [each / cores for each in cpu], "ms", note=f"on each of {cores} cores: what there is to wait for without any lock"),
    ]  # fmt: skip


def _stage(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    store = open_store(root, create=True)
    manifest = sparse_manifest(300, 200 * GB)
    lay_out(store.artifact("weights", manifest.version), manifest)
    store.manifest("weights", manifest.version).write_bytes(manifest.to_json())
    write_record(store, make_record(store, "weights", manifest, uri="file:///none", listing="", boot=""))
    switch(store, "bench", make_bundle(store, [Member("weights", "model", manifest.version)]), why="bench")


def _start(root: Path, replicas: int) -> list[tuple[float, float]]:
    """Milliseconds of each of so many starts at once, and of processor time."""
    fork = multiprocessing.get_context("fork")  # all is imported, as it is in a replica
    barrier, pipes, processes = fork.Barrier(replicas), [], []
    for _ in range(replicas):
        ours, theirs = fork.Pipe(duplex=False)
        pipes.append(ours)
        processes.append(fork.Process(target=_replica, args=[root, barrier, theirs]))
        processes[-1].start()
        theirs.close()
    found = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return found


def _replica(root: Path, barrier: Barrier, told: Connection) -> None:
    # A forked process copies each page that it touches first; that of a replica does not.
    asyncio.run(_check(root))
    barrier.wait()
    until = time.monotonic() + _PAUSE_SECONDS  # until all of them have woken up
    time.sleep(max(0.0, until - time.monotonic()))
    # What follows when the engine is up does not begin while others check: an engine takes seconds.
    told.send(asyncio.run(_check(root, then=lambda: time.sleep(_PAUSE_SECONDS))))


async def _check(root: Path, then: Callable[[], object] = lambda: None) -> tuple[float, float]:
    engine = SimpleNamespace(hf_model_id=None, mirror_config=None)
    config = SimpleNamespace(get_engine_config=lambda: engine, engine_kwargs={})
    callback = PrefetchCallback(config, deployment="bench", on_miss=["fail"], root=str(root))
    began, cpu = time.perf_counter(), time.process_time()
    await callback.run_callback("on_before_node_init")
    took = (time.perf_counter() - began) * 1e3, (time.process_time() - cpu) * 1e3
    then()
    assert engine.hf_model_id == str(root / "live" / "bench" / "weights")
    return took
