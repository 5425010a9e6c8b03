"""A replica whose placement group spans hosts: each is checked and repaired where it is, and holds what it started from."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from llm_prefetch.leases import leased
from llm_prefetch.live import start_lock
from llm_prefetch.store import NodeStore, locked
from tests.ray.conftest import Staging
from tests.real.hosts import Host, HostSpec
from tests.real.processes import wait_until
from tests.serve.conftest import safetensors

pytestmark = pytest.mark.ray


def argv(hosts: list[Host], engine: dict[str, Any], until: Path | str, **arguments: Any) -> list[str]:
    """The command of a replica on `hosts`, whose own is the head."""
    request = [[host.ip for host in hosts], arguments, engine, str(until)]
    return [sys.executable, "-m", "tests.ray.group_driver", json.dumps(request)]


def start(
    staging: Staging, *on_miss: str, hosts: list[Host] | None = None, engine: Any = None, **arguments: Any
) -> tuple[dict[str, Any], str]:
    """Start a replica: what came of it, and its log."""
    arguments = {"deployment": staging.bucket, "on_miss": on_miss or ["fail"], **arguments}
    done = staging.world.head.run(argv(hosts or staging.hosts, engine or {}, "", **arguments))
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def row(staging: Staging, host: Host, kind: str = "start") -> dict[str, Any]:
    """The last row of a kind in a host's ledger, once it is there: the other nodes are not waited for."""
    rows = lambda: [one for one in staging.world.ledger(host) if one["kind"] == kind]  # noqa: E731
    wait_until(lambda: bool(rows()), 30, f"{host.name} has a row of kind {kind}")
    return rows()[-1]


def verdicts(staging: Staging) -> list[tuple[str, str]]:
    """Of the last start: the verdict and the rung of each host, as the replica's own ledger tells."""
    told = {node["address"]: node for node in row(staging, staging.hosts[0])["nodes"]}
    found = [told[host.ip] for host in staging.hosts]
    return [(node["verdict"], node["rung"]) for node in found]


def actors(staging: Staging) -> list[str]:
    """The nodes of our actors that are alive."""
    url = f"{staging.world.cluster.dashboard_url}/api/v0/actors?limit=1000"
    with urllib.request.urlopen(url, timeout=30) as answer:
        found = json.load(answer)["data"]["result"]["result"]
    return [one["node_id"] for one in found if "NodeActor" in one["class_name"] and one["state"] == "ALIVE"]


def test_each_node_is_checked_and_keeps_its_generation_until_the_replica_is_killed(staging: Staging) -> None:
    staging.put("weights")
    staging.cli("stage", staging.spec("weights"))
    now = staging.folder / "now"
    command = argv(staging.hosts, {}, now, deployment=staging.bucket, on_miss=["fail"])
    driver = staging.world.head.popen(command, name="replica")
    held = lambda: [leased(NodeStore(host.disk)) for host in staging.hosts]  # noqa: E731
    try:
        wait_until(lambda: '"error"' in driver.tail(), 90, "the replica has started", watch=driver)
        assert f'"model": "{staging.world.head.root}/live/{staging.bucket}/weights"' in driver.tail()
        assert verdicts(staging) == [("HIT", "hit")] * 3
        for host in staging.hosts[1:]:
            assert row(staging, host)["role"] == "worker"
            assert row(staging, host, "engine")["outcome"] == "ready"
        time.sleep(3)  # an actor that nobody keeps would end in this time
        assert [[lease.deployment for lease in leases] for leases in held()] == [[staging.bucket]] * 3
        now.touch()
        wait_until(lambda: "killed" in driver.tail(), 30, "the replica is killed", watch=driver)
        wait_until(lambda: held() == [[], [], []], 60, "no host holds a lease", watch=driver)
    finally:
        driver.stop(grace=0)


def test_only_the_node_that_lacks_it_fetches_and_versions_that_differ_become_one(staging: Staging) -> None:
    size = staging.put("weights")
    spec = staging.spec("weights")
    for host in staging.hosts[:2]:
        staging.world.cli(host, "stage", "-", stdin=json.dumps(spec))
    staging.world.s3.forget()
    came, log = start(staging, "stage", "fail", spec=spec)
    assert (came["error"], came["by_ray"]) == ("", False)
    assert staging.bytes_read() == size
    assert verdicts(staging) == [("HIT", "hit"), ("HIT", "hit"), ("MISSING", "stage")]
    assert f"{staging.bucket} is MISSING on {staging.hosts[2].ip}: no node store here" in log
    staging.full_checks(staging.hosts)

    staging.put("later")
    later = spec | {"artifacts": [spec["artifacts"][0] | {"uri": f"s3://{staging.bucket}/later"}]}
    staging.world.cli(staging.hosts[1], "stage", "-", stdin=json.dumps(later))
    staging.world.s3.forget()
    came, _ = start(staging)
    assert "is STALE on the 3 nodes of its placement group: its nodes have different bundles" in came["error"]
    assert all(f"{host.ip} has bundle-" in came["error"] for host in staging.hosts)
    assert came["model"] == "from/the-hub"
    came, _ = start(staging, "stage", "fail", spec=later)
    assert came["error"] == ""
    assert staging.bytes_read() == 2 * size
    assert len(staging.full_checks(staging.hosts)) == 1


def test_no_engine_starts_on_a_download_that_is_not_whole_on_another_node(staging: Staging) -> None:
    folders = [host.disk / "downloaded" for host in staging.hosts]
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(safetensors())
    engine = {"hf_model_id": f"{staging.hosts[0].root}/downloaded", "mirror_config": "s3://somewhere/x"}
    came, log = start(staging, "ray", engine=engine)
    assert came["error"] == "", log
    (folders[2] / "model.safetensors").write_bytes(safetensors()[:-1])
    came, _ = start(staging, "ray", engine=engine)
    assert (
        f"{staging.hosts[2].ip}: what Ray downloaded is not whole: 'model.safetensors' has" in came["error"]
    )


@pytest.mark.usefixtures("isolation")
def test_a_node_that_dies_during_its_check_is_missing_and_the_start_ends(staging: Staging) -> None:
    lost = staging.world.cluster.add_host(HostSpec(num_cpus=0))
    staging.put("weights")
    hosts = [staging.hosts[0], lost]
    for host in hosts:
        staging.world.cli(host, "stage", "-", stdin=json.dumps(staging.spec("weights")))
    lock = start_lock(NodeStore(lost.disk), staging.bucket)  # the check there waits for it, some seconds
    node = staging.world.cluster.alive()[lost.name]
    with (
        ThreadPoolExecutor(1) as pool,
        locked(lock, seconds=10, waiting_for="nobody"),
    ):
        replica = pool.submit(start, staging, hosts=hosts)
        wait_until(lambda: node in actors(staging), 90, "our actor is on the host that dies")
        lost.kill()
        came, _ = replica.result()
    assert f"is MISSING on the 2 nodes of its placement group: {lost.ip}: it cannot be asked" in came["error"]
    assert leased(NodeStore(staging.hosts[0].disk)) == []
