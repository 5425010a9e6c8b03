"""The measurements, each a list of rows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from llm_prefetch.ledger import read
from llm_prefetch.live import Member, check_deployment, make_bundle, switch
from llm_prefetch.record import make_record, write_record
from llm_prefetch.spec import parse_spec
from llm_prefetch.stage import stage
from llm_prefetch.store import NodeStore, open_store
from llm_prefetch.verify import quick_check
from tests.bench.origin import FastOrigin
from tests.bench.samples import lay_out, publish_random, sparse_manifest

GB = 10**9
_FORBIDDEN = ("prefect", "vllm", "torch", "obstore", "huggingface_hub")
_IMPORT = f"""
import sys, time, ray, pydantic
begin = time.perf_counter()
import llm_prefetch.serve
seconds = time.perf_counter() - begin
print(seconds, *[name for name in {_FORBIDDEN!r} if name in sys.modules])
"""


@dataclass(frozen=True)
class Row:
    """One line of the table: a median, the range it came from, and the target of the design, if it has one."""

    what: str
    value: float
    unit: str
    low: float
    high: float
    runs: int
    target: str = ""
    note: str = ""


def row(what: str, values: list[float], unit: str, target: str = "", note: str = "") -> Row:
    """The median of `values`."""
    return Row(what, median(values), unit, min(values), max(values), len(values), target, note)


def quick_verify(base: Path, runs: int) -> list[Row]:
    """The quick check of 300 files of 200 GB by their sizes: what a replica's start waits for."""
    store = _fresh(base / "verify")
    manifest = sparse_manifest(300, 200 * GB)
    lay_out(store.artifact("weights", manifest.version), manifest)
    store.manifest("weights", manifest.version).write_bytes(manifest.to_json())
    write_record(store, make_record(store, "weights", manifest, uri="file:///none", listing="", boot=""))
    switch(store, "bench", make_bundle(store, [Member("weights", "model", manifest.version)]), why="bench")

    def check() -> None:
        assert quick_check(store, "weights", manifest.version).ready

    def check_all() -> None:
        assert check_deployment(store, "bench").ready

    values, whole = _timed(check, runs * 40), _timed(check_all, runs * 40)
    shutil.rmtree(store.root)
    return [
        row("quick verify, 300 files, 200 GB", values, "ms", "<= 5 ms"),
        row("the same for the live deployment", whole, "ms"),
    ]


def import_callback(base: Path, runs: int) -> list[Row]:
    """What the callback adds to a process that has ray and pydantic."""
    values: list[float] = []
    loaded: set[str] = set()
    for _ in range(runs + 1):  # the first one writes bytecode
        done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=False)
        if done.returncode:
            return [
                Row("import llm_prefetch.serve", 0, "ms", 0, 0, 0, "<= 150 ms", done.stderr.strip()[-80:])
            ]
        seconds, *names = done.stdout.split()
        values.append(float(seconds) * 1e3)
        loaded.update(names)
    note = f"loads {', '.join(sorted(loaded))}" if loaded else "loads none of the forbidden"
    return [row("import llm_prefetch.serve, over ray and pydantic", values[1:], "ms", "<= 150 ms", note)]


def stage_again(base: Path, runs: int, origin: FastOrigin | None) -> list[Row]:
    """Staging what is committed already."""
    rows = []
    sizes = [64 * 2**10] * 300
    folder = origin.folder("small") if origin else base / "small"
    publish_random(folder, sizes)
    uris = {"file://": f"file://{folder}"}
    if origin:
        uris["s3://"] = origin.list("small")
    for scheme, uri in uris.items():
        store = _fresh(base / "again")
        spec = parse_spec({"deployment": "bench", "artifacts": [{"name": "weights", "uri": uri}]}, "bench")
        stage(spec, store)
        before = origin.data_bytes() if origin else 0
        values = _timed(lambda spec=spec, store=store: stage(spec, store), runs * 5)  # type: ignore[misc]
        fetched = [
            step
            for entry in read(store, "stage")[1:]
            for step in entry["steps"]
            if step["step"] == "transfer"
        ]
        read_again = origin.data_bytes() - before if origin else len(fetched)
        note = f"{read_again} bytes of data read from the origin"
        rows.append(
            row(f"stage a committed version again, 300 files, {scheme}", values, "ms", "<= 50 ms", note)
        )
        shutil.rmtree(store.root)
    return rows


def stage_fresh(base: Path, runs: int, origin: FastOrigin | None, total_bytes: int) -> list[Row]:
    """Staging from a fast origin, side by side with s5cmd and dd; each run starts on a synced disk."""
    sizes = [total_bytes // 8] * 8
    folder = origin.folder("large") if origin else base / "large"
    publish_random(folder, sizes)
    uri = origin.list("large") if origin else f"file://{folder}"
    env = os.environ | (origin.env if origin else {})
    ours: list[dict[str, Any]] = []
    peers: dict[str, list[dict[str, float]]] = {}
    s5cmd = shutil.which("s5cmd", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    for _ in range(runs):
        ours.append(_stage_once(base / "fresh", uri, env))
        if origin and s5cmd:
            argv = [s5cmd, "--log", "error", "cp", f"{uri}/*", f"{base / 'peer'}/"]
            peers.setdefault("s5cmd cp (no digests)", []).append(_peer(base / "peer", argv, env))
        argv = [
            "dd",
            "if=/dev/zero",
            f"of={base / 'peer' / 'zeros'}",
            "bs=1M",
            f"count={sum(sizes) // 2**20}",
        ]
        peers.setdefault("dd to the page cache", []).append(_peer(base / "peer", argv, env))
    size, scheme = sum(sizes), uri.partition(":")[0]
    rows = [
        row(
            f"stage {size / GB:.1f} GB, {scheme}://, until committed",
            _rates(ours, "committed", size),
            "GB/s",
            ">= 1 GB/s",
        ),
        row("  of it the transfer step", _rates(ours, "transfer", size), "GB/s"),
        row("  of it the commit step", [run["commit"] * 1e3 for run in ours], "ms"),
        row("  the sync step, after the switch", [run["sync"] for run in ours], "s"),
        row("  until durable", _rates(ours, "durable", size), "GB/s"),
        row("  peak memory", [run["peak"] / 1e6 for run in ours], "MB", "<= 300 MB"),
        row("  processor seconds per GB", [run["cpu"] * GB / size for run in ours], "s/GB"),
    ]
    for name, results in peers.items():
        rows += [
            row(name, _rates(results, "seconds", size), "GB/s"),
            row("  until durable", _rates(results, "durable", size), "GB/s"),
            row("  peak memory", [run["peak"] / 1e6 for run in results], "MB"),
            row("  processor seconds per GB", [run["cpu"] * GB / size for run in results], "s/GB"),
        ]
    return rows


def _stage_once(root: Path, uri: str, env: dict[str, str]) -> dict[str, Any]:
    shutil.rmtree(root, ignore_errors=True)
    os.sync()
    argv = [sys.executable, "-m", "tests.bench.worker", str(root), uri]
    done = subprocess.run(argv, env=env, check=True, capture_output=True, text=True)
    shutil.rmtree(root)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _peer(folder: Path, argv: list[str], env: dict[str, str]) -> dict[str, float]:
    """Run a program that fills `folder`; its own time, and that with a sync of the whole disk behind it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.sync()
    # The program is measured by a small process of its own: what `wait4` says of a child includes its children.
    code = (
        "import json, resource, subprocess, sys, time; b = time.perf_counter(); "
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); "
        "s = time.perf_counter() - b; u = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print(json.dumps({'seconds': s, 'cpu': u.ru_utime + u.ru_stime, 'peak': u.ru_maxrss * 1024}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], env=env, check=True, capture_output=True, text=True
    )
    begin = time.perf_counter()
    os.sync()
    result: dict[str, float] = json.loads(done.stdout)
    result["durable"] = result["seconds"] + time.perf_counter() - begin
    shutil.rmtree(folder)
    return result


def _rates(runs: list[dict[str, Any]], key: str, size: int) -> list[float]:
    return [size / run[key] / GB for run in runs]


def _timed(call: Callable[[], object], runs: int) -> list[float]:
    """Milliseconds of each run; one more before them warms up."""
    call()
    values = []
    for _ in range(runs):
        begin = time.perf_counter()
        call()
        values.append((time.perf_counter() - begin) * 1e3)
    return values


def _fresh(root: Path) -> NodeStore:
    shutil.rmtree(root, ignore_errors=True)
    return open_store(root, create=True)
