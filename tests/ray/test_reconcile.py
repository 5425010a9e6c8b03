"""Looking after staged nodes, on real hosts: who joins is staged alone, what was rolled back stays, damage is mended."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.ray.conftest import Staging
from tests.real.hosts import Host, HostSpec
from tests.real.processes import wait_until
from tests.samples import flip_byte

pytestmark = pytest.mark.ray


def fleet(staging: Staging, *calls: Sequence[Any]) -> list[dict[str, Any]]:
    """Run `(function, its first argument, keywords)` of the module `fleet_driver` on the head; what each came to."""
    whole = [(name, what, rest[0] if rest else {}) for name, what, *rest in calls]
    argv = [sys.executable, "-m", "tests.ray.fleet_driver", json.dumps(whole)]
    lines = staging.world.head.run(argv, timeout=240).stdout.splitlines()
    return [json.loads(line.removeprefix("fleet:")) for line in lines if line.startswith("fleet:")]


def column(outcome: dict[str, Any], name: str, hosts: Sequence[Host]) -> list[Any]:
    return [outcome["nodes"][host.ip][name] for host in hosts]


def live(host: Host, deployment: str) -> str:
    return (host.disk / "live" / deployment).readlink().name


def test_nodes_that_join_or_lose_it_are_staged_alone_and_a_rollback_is_kept(staging: Staging) -> None:
    size = staging.put("weights")
    spec, name = staging.spec("weights"), staging.bucket
    with ThreadPoolExecutor(2) as pool:  # two at once, on empty nodes: one copy for each node all the same
        both = list(pool.map(lambda _: fleet(staging, ("reconcile", spec))[0], range(2)))
    assert [outcome["ready"] for outcome in both] == [True, True]
    assert staging.bytes_read() == 3 * size

    joined = staging.world.cluster.add_host(HostSpec(num_cpus=0))
    try:
        only_the_one_that_joined_is_staged(staging, spec, joined, size)
        first = live(joined, name)
        staging.put("second")
        newer = {**spec, "artifacts": [{"name": "weights", "uri": f"s3://{name}/second"}]}
        a_rollback_is_kept(staging, newer, joined, first, size)
        a_node_that_dies_in_a_scrub_is_named(staging, joined, size)
    finally:
        joined.kill()


def only_the_one_that_joined_is_staged(
    staging: Staging, spec: dict[str, Any], joined: Host, size: int
) -> None:
    hosts = [*staging.hosts, joined]
    staging.world.s3.forget()
    planned, done, again = fleet(
        staging, ("reconcile", spec, {"dry_run": True}), ("reconcile", spec), ("reconcile", spec)
    )
    assert column(planned, "did", hosts) == ["", "", "", "to stage"]
    assert column(done, "did", hosts) == ["", "", "", "staged"]
    assert column(done, "fetched_bytes", hosts) == [0, 0, 0, size]
    assert column(again, "did", hosts) == [""] * 4
    assert staging.bytes_read() == size  # one copy, by the one that joined
    staging.full_checks(hosts)


def a_rollback_is_kept(staging: Staging, newer: dict[str, Any], joined: Host, first: str, size: int) -> None:
    hosts, name = [*staging.hosts, joined], staging.bucket
    done, back, kept = fleet(
        staging,
        ("reconcile", newer),
        ("rollback", name, {"by": "ada", "why": "rhymes"}),
        ("reconcile", newer),
    )
    second = done["nodes"][joined.ip]["bundle"]
    assert column(done, "did", hosts) == ["staged"] * 4
    assert column(back, "did", hosts) == ["went back"] * 4
    assert {live(host, name) for host in hosts} == {first}
    assert (kept["ready"], column(kept, "did", hosts)) == (True, [""] * 4)
    assert "by ada: rhymes" in kept["note"]
    code, report, _ = staging.cli("stage", newer)
    assert code == 1
    assert all("by ada: rhymes" in node["error"]["message"] for node in report["nodes"])

    for entry in joined.disk.iterdir():  # its disk was exchanged: it is a node that joins
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    staging.world.s3.forget()
    done, refused, forward = fleet(
        staging, ("reconcile", newer), ("rollback", name), ("rollback", name, {"to": second})
    )
    assert column(done, "fetched_bytes", hosts) == [0, 0, 0, size]
    assert "cannot go back, so none did" in refused["refusal"]
    assert f"1 of 4 nodes cannot go back, so none did; {joined.ip}" in forward["refusal"]  # it never had it
    assert {live(host, name) for host in hosts} == {first}
    assert len(staging.full_checks(hosts)) == 1


def a_node_that_dies_in_a_scrub_is_named(staging: Staging, joined: Host, size: int) -> None:
    slowly = ("scrub", staging.bucket, {"bytes_per_second": size / 20})
    with ThreadPoolExecutor(1) as pool:
        scrub = pool.submit(fleet, staging, slowly)
        wait_until((joined.disk / "locks" / "scrub.lock").exists, 60, "the host that joined scrubs")
        joined.kill()
        (done,) = scrub.result()
    assert done["ready"] is False
    assert column(done, "verdict", staging.hosts) == ["HIT"] * 3
    assert "the node or the process at work there died" in done["nodes"][joined.ip]["error"]


def test_a_scrub_mends_what_is_damaged_while_others_scrub_and_stage(staging: Staging) -> None:
    size = staging.put("weights")
    spec, name = staging.spec("weights"), staging.bucket
    staging.cli("stage", spec)
    one, two, three = staging.hosts
    (damaged,) = one.disk.glob("artifacts/weights/b3-*/part-1.bin")
    flip_byte(damaged)
    (cut,) = two.disk.glob("artifacts/weights/b3-*/part-2.bin")
    with cut.open("r+b") as file:
        file.truncate(10)
    shutil.rmtree(three.disk / "live")  # and this one has lost its store, or what makes it one
    (three.disk / "LAYOUT").unlink()
    staging.world.s3.forget()

    (report,) = fleet(staging, ("scrub", name, {"on_damage": "report"}))
    assert report["ready"] is False
    assert column(report, "verdict", [one, two]) == ["CORRUPT", "PARTIAL"]
    assert "no node store here" in report["nodes"][three.ip]["error"]
    assert staging.bytes_read() == 0

    with ThreadPoolExecutor(2) as pool:
        scrubs = [pool.submit(fleet, staging, ("scrub", name)) for _ in range(2)]
        staging.cli("stage", spec)
        [[first], [second]] = [scrub.result() for scrub in scrubs]
    assert column(first, "verdict", [one, two]) == ["HIT", "HIT"]
    assert column(second, "verdict", [one, two]) == ["HIT", "HIT"]
    (done,) = fleet(staging, ("scrub", name))
    assert (done["ready"], column(done, "did", staging.hosts)) == (True, ["", "", ""])
    assert staging.bytes_read() <= size  # two chunks on two nodes; the third still had its files
    staging.full_checks(staging.hosts)
