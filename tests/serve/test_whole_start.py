"""A whole start: leases, a full disk, a switch on the way, and what is said when nothing helped."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llm_prefetch.leases import leased
from llm_prefetch.live import current_bundle
from llm_prefetch.spec import Spec
from llm_prefetch.stage import stage
from tests.samples import FILES, make_published
from tests.serve.conftest import REPOSITORY, during, go_on, refused, stager


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, logger="ray.serve.llm_prefetch")
    return caplog


def test_a_start_on_a_hit_takes_a_lease_that_lasts_when_the_engine_is_up(make, staged):
    make().run()
    [lease] = leased(staged)
    assert (lease.bundle, lease.deployment) == (current_bundle(staged, "llama"), "llama")


def test_a_start_that_failed_leaves_no_lease(make, staged):
    async def fail():
        raise RuntimeError("no GPU")

    with pytest.raises(RuntimeError):
        make().run(fail)
    assert leased(staged) == []


def test_a_start_on_a_miss_takes_none(make, store):
    make(on_miss=["ray"]).run()
    assert leased(store) == []


_LEASED = """
import asyncio, time
from tests.serve.conftest import LLMConfig
from llm_prefetch.serve import PrefetchCallback
asyncio.run(PrefetchCallback(LLMConfig(), deployment="llama").run_callback("on_before_node_init"))
print("up", flush=True)
time.sleep(1000)
"""


def test_the_lease_of_a_replica_that_was_killed_is_free(staged):
    with subprocess.Popen(
        [sys.executable, "-c", _LEASED], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as replica:
        assert replica.stdout.readline() == "up\n"
        assert [lease.pid for lease in leased(staged)] == [replica.pid]
        replica.send_signal(signal.SIGKILL)
        replica.wait()
        assert leased(staged) == []


_ON_A_FULL_DISK = """
import asyncio, shutil, sys
from pathlib import Path
from llm_prefetch.spec import Spec
from llm_prefetch.stage import stage
from llm_prefetch.store import open_store
from tests.serve.conftest import LLMConfig
from llm_prefetch.serve import PrefetchCallback

root, spec = Path(sys.argv[1]), Spec.model_validate_json(sys.argv[2])
stage(spec, open_store(root, create=True))
shutil.rmtree(root / "locks")
(root / "locks").mkdir()
root.joinpath("ledger", "ledger.jsonl").unlink()
with (root / "filler").open("wb", buffering=0) as filler:
    try:
        while filler.write(bytes(4096)):
            pass
    except OSError:
        pass
for folder in ("ledger", "locks", "leases"):  # and no inode for a new file either
    for number in range(10_000):
        try:
            (root / folder / f"filler-{number}").touch()
        except OSError:
            break
on_miss = sys.argv[3].split(",")
callback = PrefetchCallback(LLMConfig(), deployment=sys.argv[4], on_miss=on_miss, root=str(root), spec={
    **spec.model_dump(), "deployment": sys.argv[4], "artifacts": [
        {**artifact.model_dump(), "exclude": ["empty"]} for artifact in spec.artifacts]})
try:
    asyncio.run(callback.on_before_node_init())
except Exception as error:
    print(error)
print(callback.llm_config.engine.hf_model_id)
"""


def on_a_full_disk(tmp_path, spec, on_miss, deployment):
    disk = tmp_path / "disk"
    disk.mkdir()
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    mount = f'mount -t tmpfs -o size=2m,nr_inodes=200 tmpfs {disk} && exec {sys.executable} -c "$SCRIPT" "$@"'
    arguments = [str(disk), Spec.model_validate(spec).model_dump_json(), on_miss, deployment]
    done = subprocess.run(
        [*unshare, "sh", "-c", mount, "sh", *arguments],
        env={**os.environ, "SCRIPT": _ON_A_FULL_DISK}, cwd=REPOSITORY, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_on_a_full_disk_a_replica_starts_from_what_is_staged(tmp_path, spec):
    [model], said = on_a_full_disk(tmp_path, spec, "fail", "llama")
    assert model == str(tmp_path / "disk" / "live" / "llama" / "weights")
    assert "starting without a lease: no space left" in said


def test_on_a_full_disk_nothing_can_be_staged_and_the_start_says_so(tmp_path, spec):
    [error, model], _ = on_a_full_disk(tmp_path, spec, "stage,fail", "other")
    assert "other is MISSING on this node" in error
    assert "no space left" in error
    assert model == "meta-llama/Llama-3-8B"


def test_a_generation_that_is_switched_during_the_ladder_is_the_one_that_is_started(
    make, store, spec, tmp_path
):
    other = make_published(tmp_path / "other", {**FILES, "config.json": b'{"a": 9}'})
    stage(Spec.model_validate(spec), store)
    [folder] = [path for path in (store.root / "artifacts" / "weights").iterdir() if path.is_dir()]
    (folder / "config.json").chmod(0o644)
    (folder / "config.json").touch()
    start = make(on_miss=["wait", "fail"])
    later = {"deployment": "llama", "artifacts": [{"name": "weights", "uri": other}]}
    with stager(store, later) as process:
        during(start, lambda: go_on(process))
    assert Path(start.engine.hf_model_id, "config.json").read_bytes() == b'{"a": 9}'


def test_a_ladder_that_ends_in_fail_says_what_was_tried(make, store):
    message = refused(make(on_miss=["wait", "fail"]), "llama is MISSING on this node: nothing is live")
    assert "[wait no staging is in progress on this node]" in message
