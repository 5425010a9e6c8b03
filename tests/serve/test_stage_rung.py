"""The rung `stage`: a replica stages what its node lacks, once for all that start there, and never for ever."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from llm_prefetch.leases import leased
from llm_prefetch.live import check_deployment, current_bundle
from llm_prefetch.spec import Spec
from tests.samples import FILES, flip_byte, make_folder, make_manifest, put_manifest, tree
from tests.serve.conftest import REPOSITORY, refused, row, until
from tests.serve.troubles import NO_STORE, TROUBLE


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, logger="ray.serve.llm_prefetch")
    return caplog


@pytest.mark.parametrize("way", ["mapping", "file"])
def test_a_replica_stages_what_its_node_lacks_and_the_next_one_finds_it(
    make, store, spec, rows, tmp_path, way
):
    (tmp_path / "spec.yaml").write_text(Spec.model_validate(spec).model_dump_json())
    given = spec if way == "mapping" else str(tmp_path / "spec.yaml")
    start = make(on_miss=["stage", "fail"], spec=given)
    start.run()
    assert start.engine.hf_model_id == str(store.root / "live" / "llama" / "weights")
    assert start.engine.mirror_config is None
    assert start.callback.ctx.run_init_node is False
    assert not start.ray.calls
    assert check_deployment(store, "llama", full=True).ready
    verdict, rung, [outcome] = row(rows)
    assert (verdict, rung) == ("MISSING", "stage")
    assert outcome.startswith("staged")
    assert [lease.bundle for lease in leased(store)] == [current_bundle(store, "llama")]
    following = make(on_miss=["fail"])
    following.run()
    assert following.engine == start.engine


def test_a_node_without_a_store_gets_one(make, store, spec):
    shutil.rmtree(store.root)
    make(on_miss=["stage", "fail"], spec=spec).run()
    assert check_deployment(store, "llama").ready


def test_what_is_damaged_is_mended_by_staging(make, staged, weights, rows, tmp_path):
    (weights / "config.json").chmod(0o644)
    (weights / "config.json").write_bytes(b'{"a": 2}')
    uri = f"file://{tmp_path / 'origin'}"
    artifacts = [{"name": "weights", "uri": uri}, {"name": "extra", "uri": uri, "kind": "files"}]
    make(on_miss=["stage", "fail"], spec={"deployment": "llama", "artifacts": artifacts}).run()
    assert check_deployment(staged, "llama", full=True).ready
    assert row(rows)[:2] == ("CORRUPT", "stage")


@pytest.mark.parametrize(
    ("break_it", "verdict", "reason"), (TROUBLE | NO_STORE).values(), ids=TROUBLE | NO_STORE
)
def test_whatever_is_wrong_with_the_store_it_is_mended_or_no_engine_starts(
    make, staged, weights, tmp_path, break_it, verdict, reason
):
    break_it(staged, weights)
    uri = f"file://{tmp_path / 'origin'}"
    artifacts = [{"name": "weights", "uri": uri}, {"name": "extra", "uri": uri, "kind": "files"}]
    start = make(on_miss=["stage", "fail"], spec={"deployment": "llama", "artifacts": artifacts})
    if reason in ("layout '99'", "a file is in the way"):
        assert reason in refused(start, f"llama is {verdict}")
    else:
        start.run()
        assert check_deployment(staged, "llama", full=True).ready
        assert tree(Path(start.engine.hf_model_id).resolve()) == FILES


def test_replicas_that_start_together_stage_once(make, store, spec, rows):
    starts = [make(on_miss=["stage", "fail"], spec=spec) for _ in range(3)]

    async def main():
        await asyncio.gather(*(start.callback.run_callback("on_before_node_init") for start in starts))

    asyncio.run(main())
    assert len({start.engine.hf_model_id for start in starts}) == 1
    until(lambda: not children())  # a replica that is ready does not wait for its staging's last sync
    total = sum(map(len, FILES.values()))
    fetched = [artifact["fetched"] for run in rows("stage") for artifact in run["artifacts"]]
    assert sum(fetched) == total


SPOILED = {
    "an origin that is not there": (shutil.rmtree, "no such folder"),
    "bytes that are not those of the manifest": (
        lambda folder: flip_byte(folder / "layers/0/weights.bin"),
        "do not match the manifest",
    ),
    "a manifest that is no manifest": (lambda folder: put_manifest(folder, b"{]"), "manifest"),
}


@pytest.mark.parametrize(("spoil", "reason"), SPOILED.values(), ids=SPOILED)
def test_a_staging_that_fails_leaves_nothing_half_applied(make, store, spec, rows, tmp_path, spoil, reason):
    spoil(tmp_path / "origin")
    start = make(on_miss=["stage", "ray"], spec=spec)
    start.run()
    assert start.by_ray
    outcome = row(rows)[2][0]
    assert outcome.startswith("failed: ")
    assert reason in outcome
    assert current_bundle(store, "llama") is None


@pytest.mark.parametrize("given", ["missing", "other deployment", "no yaml"])
def test_a_spec_file_that_does_not_serve_is_a_reason(make, store, spec, rows, tmp_path, given):
    path = tmp_path / "spec.yaml"
    if given == "other deployment":
        path.write_text(Spec.model_validate({**spec, "deployment": "other"}).model_dump_json())
    elif given == "no yaml":
        path.write_text("{")
    start = make(on_miss=["stage", "fail"], spec=str(path))
    message = refused(start, "llama is MISSING on this node")
    assert "stage failed: " in message
    assert str(path) in message


def slow(folder: Path) -> dict:
    """A spec whose staging never ends: its one file is a pipe that nobody fills."""
    make_folder(folder, {"config.json": b"{}"})
    put_manifest(folder, make_manifest({"config.json": b"{}"}).to_json())
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    return {"deployment": "llama", "artifacts": [{"name": "weights", "uri": f"file://{folder}"}]}


def test_a_staging_ends_at_the_deadline_of_its_rung(make, store, tmp_path, rows):
    start = make(on_miss=["stage", "ray"], spec=slow(tmp_path / "slow"), deadlines={"stage": 3})
    start.run()
    assert start.by_ray
    assert row(rows)[2][0].startswith(("gave up after 3 s", "failed"))
    until(lambda: not children())  # a process that looks at what Ray has brought ends by itself


@pytest.mark.cloud
def test_a_list_that_stalls_does_not_keep_a_staging_from_ending_in_order(make, store, rows, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
            monkeypatch.setenv(name, "us-east-1")
        monkeypatch.setenv("LLM_PREFETCH_STALL_SECONDS", "200")
        spec = {"deployment": "llama", "artifacts": [{"name": "weights", "uri": "s3://bucket/x"}]}
        refused(
            make(on_miss=["stage", "fail"], spec=spec, deadlines={"stage": 10}), "stage gave up after 10 s"
        )
        assert children() == []
        asked, _ = silent.accept()
        asked.close()
    [staged] = rows("stage")  # who is killed writes none
    assert staged["outcome"].startswith("the staging was cancelled")


def test_a_start_that_is_cancelled_takes_its_staging_with_it(make, store, tmp_path, rows):
    start = make(on_miss=["stage", "ray"], spec=slow(tmp_path / "slow"))

    async def main():
        task = asyncio.ensure_future(start.callback.run_callback("on_before_node_init"))
        await asyncio.to_thread(until, lambda: len(children()) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert children() == []
    assert start.untouched
    assert rows("start")[0]["rung"] == "fail"


_REPLICA = """
import asyncio, json, sys
from tests.serve.conftest import LLMConfig
from llm_prefetch.serve import PrefetchCallback
callback = PrefetchCallback(LLMConfig(), deployment="llama", on_miss=["stage", "fail"], spec=json.loads(sys.argv[1]))
asyncio.run(callback.run_callback("on_before_node_init"))
"""


def test_a_staging_does_not_outlive_the_replica_that_was_killed(store, tmp_path):
    spec = Spec.model_validate(slow(tmp_path / "slow")).model_dump_json()
    with subprocess.Popen([sys.executable, "-c", _REPLICA, spec], cwd=REPOSITORY) as replica:
        until(lambda: children(replica.pid))
        [child] = children(replica.pid)
        replica.kill()
    until(lambda: not Path(f"/proc/{child}").exists() or b"staging_process" not in cmdline(child))


def children(parent: int | None = None) -> list[int]:
    """Stagings that a process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            above = int(path.read_text().rpartition(")")[2].split()[1])
            pid = int(path.parent.name)
            if above == (parent or os.getpid()) and b"staging_process" in cmdline(pid):
                found.append(pid)
    return found


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_staging_process_that_says_nothing_is_named(make, store, spec, monkeypatch):
    monkeypatch.setenv("PYTHONHOME", "/nowhere")  # it ends before its first line
    said = r"the staging process ended with 1 \(llm_prefetch.serve.staging_process\)"
    refused(make(on_miss=["stage", "fail"], spec=spec), said)
