"""A real Ray Serve LLM replica on a real vLLM engine: from the staged files, and from Ray's download when they fail.

Each start costs a minute or more on two cores, so each of the two tests shows all that its start can show.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.real.checkpoint import write_checkpoint
from tests.real.hosts import Host
from tests.real.serve_app import ServeApp, chat, serve_llm
from tests.real.world import World

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

YAML = Path(__file__).parents[2] / "deployments" / "serve" / "tiny-llama-cpu.yaml"
STAGED, AT_ORIGIN = "I came from the node store.", "Ray fetched me from the bucket."


@pytest.fixture
def staged(surroundings: World, tmp_path: Path) -> World:
    """`live/tiny-llama` on every host holds one model, the prefix that Ray would download from another."""
    surroundings.wipe()
    for name in {"models", "staged"} - {b["Name"] for b in surroundings.s3.client.list_buckets()["Buckets"]}:
        surroundings.s3.create_bucket(name)
    for bucket, says in (("staged", STAGED), ("models", AT_ORIGIN)):
        model = write_checkpoint(tmp_path / bucket, says=says)
        surroundings.cli(surroundings.head, "publish", model, f"s3://{bucket}/tiny-llama")
    spec = "{deployment: tiny-llama, artifacts: [{name: weights, uri: 's3://staged/tiny-llama'}]}"
    surroundings.cli(surroundings.head, "stage", "--cluster", "-", stdin=spec)
    surroundings.s3.forget()
    return surroundings


@contextmanager
def replica(world: World) -> Iterator[ServeApp]:
    temp_dirs = [host.folder / "ray" for host in world.cluster.hosts]
    with serve_llm(
        YAML, dashboard=world.cluster.dashboard_url, host=world.head.ip, temp_dirs=temp_dirs, deadline=600
    ) as app:
        yield app


def answer(app: ServeApp) -> str:
    return str(
        chat(app.base_url, "tiny-llama", "Where do you come from?")["choices"][0]["message"]["content"]
    )


def test_a_replica_on_a_staged_node_starts_from_the_engine_path_and_reads_nothing_from_the_origin(staged):
    with replica(staged) as app:
        assert answer(app) == STAGED
        (host,) = [host for host in hosts(staged) if rows(staged, host, "start")]
        (start,), (engine,) = rows(staged, host, "start"), rows(staged, host, "engine")
        assert (start["verdict"], start["rung"]) == ("HIT", "hit")
        assert (engine["outcome"], engine["start"]) == ("ready", start["start"])
        phases = {phase["phase"] for phase in engine["phases"]}
        assert {"imports", "verify", "engine config", "weights", "ready"} <= phases
        assert f"{host.root}/live/tiny-llama/weights" in app.replica_log()
        assert staged.s3.bytes_read() == 0
        # The engine is up, so the generation is free: a switch need not wait for the replica's end.
        bundle = staged.ask(host, "ls")["deployments"][0]["bundle"]
        respec = "{deployment: tiny-llama, artifacts: [{name: weights, uri: 's3://models/tiny-llama'}]}"
        staged.cli(host, "stage", "-", stdin=respec)
        back = staged.ask(host, "rollback", "tiny-llama")
        assert back["to"] == bundle


def test_a_replica_never_starts_from_files_that_changed_and_falls_back_to_rays_download(staged):
    for host in hosts(staged):
        (shard,) = host.disk.glob("artifacts/weights/b3-*/model-00001-*.safetensors")
        with shard.open("r+b") as file:
            file.seek(-1, 2)
            byte = file.read(1)
            file.seek(-1, 2)
            file.write(bytes([byte[0] ^ 1]))
    with replica(staged) as app:
        assert answer(app) == AT_ORIGIN
        (host,) = [host for host in hosts(staged) if rows(staged, host, "start")]
        (start,) = rows(staged, host, "start")
        assert (start["verdict"], start["rung"]) == ("CORRUPT", "ray")
        assert "was changed since it was committed" in start["reason"]
        assert "is CORRUPT on this node" in app.replica_log()
        assert staged.s3.bytes_read() > 0


def hosts(world: World) -> list[Host]:
    """Other tests of the session add hosts and kill them."""
    return [host for host in world.cluster.hosts if host.running]


def rows(world: World, host: object, kind: str) -> list[dict]:
    return [row for row in world.ledger(host) if row["kind"] == kind]
