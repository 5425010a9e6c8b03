"""Nodes and drivers that die in the middle: the others finish, nothing is left running, and the next run goes on."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.ray.conftest import Staging
from tests.real.hosts import Host, HostSpec
from tests.real.processes import wait_until

pytestmark = pytest.mark.ray

SLOWLY = {"bandwidth": "2MB/s"}

# Runs the CLI and sends it a signal once a file appears: a signal from outside would end `nsenter` and not the CLI.
_SIGNALLED = """
import subprocess, sys, time
from pathlib import Path
run = subprocess.Popen(sys.argv[3:], stdin=sys.stdin)
while run.poll() is None and not Path(sys.argv[1]).exists():
    time.sleep(0.1)
run.send_signal(int(sys.argv[2]))
sys.exit(run.wait() % 256)
"""


def staged_until(staging: Staging, spec: dict[str, Any], number: int) -> tuple[int, str]:
    """Stage, and send the driver a signal when every node is in the middle; exit code and what it said."""
    before = [staging.chunks_done(host) for host in staging.hosts]
    now = staging.folder / f"signal-{number}"
    cli = [sys.executable, "-m", "llm_prefetch.cli", "stage", "--cluster", "-"]
    with ThreadPoolExecutor(1) as pool:
        argv = [sys.executable, "-c", _SIGNALLED, now, str(number), *cli]
        run = pool.submit(staging.world.head.run, argv, check=False, stdin=json.dumps(spec))
        try:
            staging.wait_for_chunks(staging.hosts, before=before)
        finally:
            now.touch()
        done = run.result()
    return done.returncode, done.stderr


def test_a_driver_that_dies_or_is_interrupted_leaves_no_actor_and_the_next_run_resumes(
    staging: Staging,
) -> None:
    size = staging.put("weights", files=80)
    spec = staging.spec("weights", policy={"bandwidth": "500KB/s"})

    staged_until(staging, spec, 9)
    staging.wait_for_no_actor()
    done = [staging.chunks_done(host) for host in staging.hosts]
    assert all(0 < chunks < 80 for chunks in done), done

    code, err = staged_until(staging, spec, 2)
    assert code == 130
    assert "Traceback" not in err, err
    assert err.splitlines()[-1].startswith("llm-prefetch: interrupted")
    staging.wait_for_no_actor()
    done = [staging.chunks_done(host) for host in staging.hosts]
    assert all(0 < chunks < 80 for chunks in done), done

    staging.world.s3.forget()
    code, report, _ = staging.cli("stage", staging.spec("weights"))
    assert code == 0
    reused = [node["report"]["artifacts"][0]["reused_bytes"] for node in report["nodes"]]
    assert reused == [chunks * 256 * 1024 for chunks in done]
    assert staging.bytes_read() == 3 * size - sum(reused)
    staging.full_checks(staging.hosts)


@pytest.mark.usefixtures("isolation")
def test_a_full_disk_and_a_lost_node_leave_the_others_alone(staging: Staging) -> None:
    lost = staging.world.cluster.add_host(HostSpec(num_cpus=0, disk="tmpfs:24m"))
    size = staging.put("large", files=26, kilobytes=1024)
    spec = staging.spec("large", nodes={"ids": ["host0", lost.name]}, policy={"min_ready": "50%"})
    code, report, _ = staging.cli("stage", spec)
    assert code == 0
    assert [node["ready"] for node in report["nodes"]] == [True, False]
    assert report["nodes"][1]["error"]["code"] == "no-space"
    assert staging.bytes_read() == size

    staging.put("weights", files=40)
    spec = staging.spec("weights", policy=SLOWLY | {"min_ready": "3"})
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(staging.cli, "stage", spec)
        try:
            staging.wait_for_chunks([lost])
        finally:
            lost.kill()
        code, report, _ = run.result()
    assert (code, report["ready"]) == (0, True)
    errors = {node["node"]["hostname"]: node["error"] for node in report["nodes"]}
    assert [errors[host.name] for host in staging.hosts] == [None, None, None]
    assert errors[lost.name]["code"] == "cluster"
    assert errors[lost.name]["message"] == "the node or the process at work there died"
    assert errors[lost.name]["where"] == lost.ip
    staging.full_checks(staging.hosts)

    # It comes back with its disk: the next run goes on there.
    done = staging.chunks_done(lost)
    lost.start()
    code, report, _ = staging.cli("stage", staging.spec("weights"))
    assert code == 0
    (again,) = [node["report"] for node in report["nodes"] if node["node"]["hostname"] == lost.name]
    assert again["artifacts"][0]["reused_bytes"] == done * 256 * 1024 > 0
    staging.full_checks([lost])

    dies_after_its_report(staging, lost)
    staging.wait_for_no_actor()


def dies_after_its_report(staging: Staging, lost: Host) -> None:
    """When all is well on a node and another is still at work: then it does not count."""
    staging.put("more", files=32)
    staging.cli("stage", staging.spec("more", deployment="more", nodes={"ids": [lost.name]}))
    spec = staging.spec(
        "more", deployment="more", policy={"bandwidth": "1MB/s"}, nodes={"ids": ["host1", lost.name]}
    )
    before = len(staging.world.ledger(lost))
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(staging.cli, "stage", spec)
        try:
            wait_until(lambda: len(staging.world.ledger(lost)) > before, 90, "it has staged")
            staging.wait_for_chunks([staging.hosts[1]])
        finally:
            lost.kill()
        code, report, err = run.result()
    assert code == 3
    assert (
        f"1 of 2 nodes are ready, 2 are needed; {lost.ip}: the node or the process at work there died" in err
    )
    there, dead = report["nodes"]
    assert (there["ready"], dead["ready"], dead["error"]["code"]) == (True, False, "cluster")
    assert dead["report"]["artifacts"][0]["verdict"] == "HIT"  # what it did before
