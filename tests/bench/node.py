"""What is measured on one node alone, in milliseconds: the quick check, the import, staging what is there."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from llm_prefetch.ledger import read
from llm_prefetch.live import Member, check_deployment, make_bundle, switch
from llm_prefetch.record import make_record, write_record
from llm_prefetch.spec import parse_spec
from llm_prefetch.stage import stage
from llm_prefetch.store import NodeStore, open_store
from llm_prefetch.verify import quick_check
from tests.bench.origin import FastOrigin
from tests.bench.samples import lay_out, publish_random, sparse_manifest
from tests.bench.table import GB, Row, row

_FORBIDDEN = ("prefect", "vllm", "torch", "obstore", "huggingface_hub")
_IMPORT = f"""
import sys, time, ray, pydantic
begin = time.perf_counter()
from llm_prefetch.serve import PrefetchCallback
seconds = time.perf_counter() - begin
print(seconds, *[name for name in {_FORBIDDEN!r} if name in sys.modules])
"""


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
            return [Row("import of the callback", 0, "ms", 0, 0, 0, "<= 150 ms", done.stderr.strip()[-80:])]
        seconds, *names = done.stdout.split()
        values.append(float(seconds) * 1e3)
        loaded.update(names)
    note = f"loads {', '.join(sorted(loaded))}" if loaded else "loads none of the forbidden"
    return [row("import of the callback, over ray and pydantic", values[1:], "ms", "<= 150 ms", note)]


def stage_again(base: Path, runs: int, origin: FastOrigin | None) -> list[Row]:
    """Staging what is committed already."""
    rows = []
    sizes = [64 * 2**10] * 300
    folder = origin.folder("small") if origin else base / "small"
    publish_random(folder, sizes)
    uris = {"file://": f"file://{folder}"}
    if origin:
        uris["s3://"] = origin.write_listing("small")
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
