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
from tests.flows.conftest import Run
from tests.real.checkpoint import write_checkpoint
from tests.real.hosts import Host, HostSpec
from tests.real.prefect_server import PrefectServer, prefect_server
from tests.real.serve_app import APPLICATIONS
from tests.real.world import World
from tests.real_fixtures import REPLICAS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

YAML = Path(__file__).parents[2] / "deployments" / "serve" / "tiny-llama-compiled.yaml"
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
    # A capture leaves Serve running, as it should; but while it runs, the next test's HTTP options would be ignored.
    serve = f"{surroundings.cluster.dashboard_url}{APPLICATIONS}"
    httpx.delete(serve, timeout=60, trust_env=False).raise_for_status()
    second.kill()
    surroundings.cluster.wait_alive()


@pytest.fixture
def server(surroundings: World) -> Iterator[PrefectServer]:
    """One that the hosts reach, with nothing in it."""
    with prefect_server(surroundings.cluster.gateway_ip) as running:
        yield running


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
    """The example, with these arguments of the engine besides."""
    config = yaml.safe_load(YAML.read_text())
    (llm,) = config["applications"][0]["args"]["llm_configs"]
    llm["engine_kwargs"] |= arguments
    path = folder / f"serve-{len(arguments)}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def leave_a_replica(world: World) -> None:
    """What a capture leaves in Ray Serve that is killed while its replica starts."""
    script = (
        "import ray; from ray import serve; from ray.serve import deployment\n"
        "ray.init(log_to_driver=False)\n"
        "class Left: pass\n"
        "serve.run(deployment(Left).options(ray_actor_options={'num_cpus': 0}).bind(), "
        "name='llm-prefetch-capture-tiny-llama', route_prefix=None)"
    )
    world.head.run([sys.executable, "-c", script])


def run_flow(world: World, server: PrefectServer, name: str, **parameters: Any) -> Run:
    """One that boots an engine, as a person's script or a worker runs it."""
    parameters = {key: str(value) if isinstance(value, Path) else value for key, value in parameters.items()}
    command = [sys.executable, "-m", "tests.flows.driver", name, json.dumps([parameters])]
    done = world.head.run(command, env=server.env, timeout=700)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"run"')]
    return Run(server.api_url, json.loads(line)["run"])


def compiled(world: World, host: Host) -> dict[str, Any]:
    """What the ledger says of the newest start there."""
    return [dict(row["compile"]) for row in world.ledger(host) if row["kind"] == "engine"][-1]


def test_a_captured_cache_is_found_on_another_host_and_missed_by_name_with_other_arguments(
    two, server, tmp_path
):
    world, one, other = two
    same, changed = compiling(tmp_path), compiling(tmp_path, max_num_seqs=8)

    dry = world.cli(world.head, "capture", same, "--to", CACHE, "--node", one.name, "--dry-run")
    assert f"would start a replica of tiny-llama on {one.ip}" in dry[1]
    leave_a_replica(world)
    run = run_flow(world, server, "capture", serve_yaml=same, to=CACHE, nodes={"ids": [one.name]})
    assert run.state[0] == "Completed", run.state
    assert any("which an earlier run has left" in line["message"] for line in run.logs)
    (page,) = run.markdowns
    artifact = json.loads(page.partition("```yaml\n- ")[2].partition("\n```")[0])
    built = compiled(world, one)
    assert built["outcome"] == Outcome.NONE
    assert built["new_kernels"] > 0
    # What the engine compiled there was the capture's alone.
    assert list((one.disk / "caches").iterdir()) == []
    keys = {o["Key"] for o in world.s3.client.list_objects_v2(Bucket="caches")["Contents"]}
    assert any(built["keys"][0] in key and key.endswith("/rank_0_0/model") for key in keys)
    assert not any(key.endswith((".lock", "cache_key_factors.json")) for key in keys)

    stage(world, [WEIGHTS, artifact])
    store = NodeStore(other.disk)
    assert proof(store, "tiny-llama") is None
    code, out, talk = world.cli(
        world.head, "prove", same, "--node", other.name, "--json", check=False, timeout=700
    )
    (row,) = json.loads(out)["proven"]
    found = row["proof"]
    assert (code, found["node"], found["used"]) == (0, other.ip, True), talk
    assert found["outcome"] == Outcome.PARTIAL
    assert "finalize_loading" in found["reason"]
    had = compiled(world, other)
    assert (had["keys"], had["new_keys"], had["kernels"], had["new_kernels"]) == (
        built["keys"], [], built["new_kernels"], 0,
    )  # fmt: skip
    remembered = proof(store, "tiny-llama")
    assert remembered is not None
    assert (remembered.used, remembered.node) == (True, other.ip)

    run = run_flow(world, server, "prove", serve_yaml=changed, nodes={"ids": [other.name]})
    assert run.state[0] == "Failed"
    (row,) = json.loads(run.artifact("table"))
    assert (row["booted_on"], row["outcome"]) == (other.ip, Outcome.MISS)
    assert "max_num_seqs: 4 -> 8" in row["reason"]
    remembered = proof(store, "tiny-llama")
    assert remembered is not None
    assert not remembered.used
