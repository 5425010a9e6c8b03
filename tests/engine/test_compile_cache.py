"""Compile caches with a real engine: captured on one host, found on another, and missed, by name, with other arguments.

vLLM's CPU build compiles for real, but cannot load a compiled graph: there, what hits are the kernels beside it. Each
start takes a minute or more on two cores, so one test shows all that its three starts can show.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from llm_prefetch.caches.evidence import Outcome
from llm_prefetch.caches.proof import proof
from llm_prefetch.caches.this_node import ThisNode
from llm_prefetch.store import NodeStore
from tests.real.checkpoint import write_checkpoint
from tests.real.hosts import Host, HostSpec
from tests.real.processes import wait_until
from tests.real.world import World
from tests.real_fixtures import REPLICAS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

YAML = Path(__file__).parents[2] / "deployments" / "serve" / "tiny-llama-cpu.yaml"
CACHE = "s3://caches/tiny-llama-cpu"
WEIGHTS = {"name": "weights", "uri": "s3://captured/tiny-llama"}


@pytest.fixture
def two(surroundings: World, tmp_path: Path) -> Iterator[tuple[World, Host, Host]]:
    """Two hosts with CPUs, the model staged on both."""
    surroundings.wipe()
    second = surroundings.cluster.add_host(HostSpec(num_cpus=4))
    for name in {"captured", "caches"} - {
        b["Name"] for b in surroundings.s3.client.list_buckets()["Buckets"]
    }:
        surroundings.s3.create_bucket(name)
    model = write_checkpoint(tmp_path / "model", says="I was compiled elsewhere.")
    surroundings.cli(surroundings.head, "publish", model, WEIGHTS["uri"])
    stage(surroundings, [WEIGHTS])
    yield surroundings, surroundings.cluster.hosts[REPLICAS], second
    second.kill()
    surroundings.cluster.wait_alive()


@pytest.mark.gpu
@pytest.mark.skipif(not ThisNode().gpus(), reason="needs a GPU, and a cluster of one's own")
def test_on_gpus_the_compiled_graph_itself_is_loaded_on_every_kind_of_node():
    """In a running cluster: GPU_SERVE_YAML names a YAML whose deployment is staged with its captured cache."""
    command = [sys.executable, "-m", "llm_prefetch.cli", "prove", os.environ["GPU_SERVE_YAML"], "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for kind in json.loads(done.stdout)["proven"]:
        assert kind["proof"]["outcome"] == Outcome.HIT, kind


def stage(world: World, artifacts: list[dict[str, str]]) -> None:
    spec = json.dumps({"deployment": "tiny-llama", "artifacts": artifacts})
    world.cli(world.head, "stage", "--cluster", "-", stdin=spec)


def compiling(folder: Path, **arguments: Any) -> Path:
    """The example, with torch.compile on."""
    config = yaml.safe_load(YAML.read_text())
    (llm,) = config["applications"][0]["args"]["llm_configs"]
    llm["engine_kwargs"] |= {"enforce_eager": False, **arguments}
    path = folder / f"serve-{len(arguments)}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def run(world: World, *argv: str | Path) -> tuple[int, dict[str, Any], str]:
    """A command that boots an engine: exit code, answer, talk."""
    command = [sys.executable, "-m", "llm_prefetch.cli", *argv, "--deadline", "600", "--json"]
    done = world.head.run(command, check=False, timeout=700)
    try:
        return done.returncode, json.loads(done.stdout), done.stderr
    except ValueError:
        pytest.fail(f"{argv[0]} answered {done.stdout!r}\n{done.stderr}")


def kill_a_capture(world: World, path: Path, host: Host) -> None:
    """As soon as its replica is being started."""
    command = [sys.executable, "-m", "llm_prefetch.cli", "capture", path, "--to", CACHE, "--node", host.name]
    process = world.head.popen(command, name="killed-capture")

    def deployed() -> bool:
        try:
            found = httpx.get(
                f"{world.cluster.dashboard_url}/api/serve/applications/", trust_env=False
            ).json()
        except (httpx.TransportError, ValueError):
            return False
        return "llm-prefetch-capture-tiny-llama" in found.get("applications", {})

    wait_until(deployed, 300, "the capture deploys its replica", watch=process)
    process.stop(grace=0)


def test_a_captured_cache_is_found_on_another_host_and_missed_by_name_with_other_arguments(two, tmp_path):
    world, one, other = two
    same, changed = compiling(tmp_path), compiling(tmp_path, max_num_seqs=8)

    kill_a_capture(world, same, one)
    code, report, talk = run(world, "capture", same, "--to", CACHE, "--node", one.name)
    assert code == 0, talk
    assert "which an earlier run has left" in talk
    built = report["captured"]["evidence"]
    assert (report["node"], built["outcome"]) == (one.ip, Outcome.NONE)
    assert built["new_kernels"] > 0
    assert report["captured"]["identity"]["arguments"]["max_num_seqs"] == 4
    assert (
        list((one.disk / "caches").iterdir()) == []
    )  # what the engine compiled there was the capture's alone
    keys = {o["Key"] for o in world.s3.client.list_objects_v2(Bucket="caches")["Contents"]}
    assert any(built["keys"][0] in key and key.endswith("/rank_0_0/model") for key in keys)
    assert not any(key.endswith((".lock", "cache_key_factors.json")) for key in keys)

    stage(world, [WEIGHTS, report["artifact"]])
    store = NodeStore(other.disk)
    assert proof(store, "tiny-llama") is None
    code, report, talk = run(world, "prove", same, "--node", other.name)
    (row,) = report["proven"]
    found = row["proof"]
    assert (code, found["node"], found["used"]) == (0, other.ip, True), talk
    assert found["outcome"] == Outcome.PARTIAL
    assert "finalize_loading" in found["reason"]
    (had,) = [row["compile"] for row in world.ledger(other) if row["kind"] == "engine"]
    assert (had["keys"], had["new_keys"], had["kernels"], had["new_kernels"]) == (
        built["keys"], [], built["new_kernels"], 0,
    )  # fmt: skip
    assert found["init_seconds"] < built["init_seconds"]
    remembered = proof(store, "tiny-llama")
    assert remembered is not None
    assert (remembered.used, remembered.node) == (True, other.ip)

    code, report, talk = run(world, "prove", changed, "--node", other.name)
    (row,) = report["proven"]
    found = row["proof"]
    assert (code, found["outcome"], found["used"]) == (1, Outcome.MISS, False), talk
    assert any("max_num_seqs: 4 -> 8" in line for line in found["differences"])
    remembered = proof(store, "tiny-llama")
    assert remembered is not None
    assert not remembered.used
