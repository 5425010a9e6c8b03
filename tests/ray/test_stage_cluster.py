"""`--cluster` on three real hosts, each with its own disk: who gets what, and what it costs the origin."""

from __future__ import annotations

import pytest

from tests.ray.conftest import Staging

pytestmark = pytest.mark.ray


def test_every_node_stages_on_its_own_disk_and_only_once(staging: Staging) -> None:
    size = staging.put("weights") + staging.put("adapter", files=1)
    spec = staging.spec("weights", "adapter")

    code, planned, _ = staging.cli("plan", spec)
    assert code == 0
    assert [node["host"] for node in planned["nodes"]] == ["host0", "host1", "host2"]
    assert {node["fetch_bytes"] for node in planned["nodes"]} == {size}
    assert not any(list(host.disk.iterdir()) for host in staging.hosts)
    assert staging.bytes_read() == 0

    code, first, _ = staging.cli("stage", spec)
    assert (code, first["ready"], first["needed"]) == (0, True, 3)
    assert [node["node"]["address"] for node in first["nodes"]] == [host.ip for host in staging.hosts]
    for node in first["nodes"]:
        assert sum(artifact["fetched_bytes"] for artifact in node["report"]["artifacts"]) == size
    assert staging.bytes_read() == 3 * size
    assert len(staging.full_checks(staging.hosts)) == 2

    code, again, _ = staging.cli("stage", spec)
    assert code == 0
    assert {(a["fetched_bytes"], a["verdict"]) for n in again["nodes"] for a in n["report"]["artifacts"]} == {
        (0, "HIT")
    }
    assert staging.bytes_read() == 3 * size
    staging.wait_for_no_actor()


def test_selectors_choose_nodes_by_label_resource_and_id(staging: Staging) -> None:
    ids = staging.driver(("ids",))[0]
    host0, host1, host2 = staging.hosts
    cases = {
        "label": ({"labels": {"disk": "nvme"}}, ["host2"]),
        "resource": ({"resources": {"fast_disk": 2}}, ["host2"]),
        "cpus": ({"resources": {"CPU": 3}}, ["host1"]),
        "too many": ({"resources": {"fast_disk": 3}}, None),
        "address": ({"ids": [host1.ip]}, ["host1"]),
        "name": ({"ids": ["host0", "host2"]}, ["host0", "host2"]),
        "node id": ({"ids": [ids["host1"]]}, ["host1"]),
        "all must fit": ({"ids": ["host0", "host2"], "labels": {"disk": "nvme"}}, ["host2"]),
        "nothing fits both": ({"ids": ["host0"], "labels": {"disk": "nvme"}}, None),
    }
    found = staging.driver(("select", [selector for selector, _ in cases.values()]))[0]
    for (case, (_, expected)), hosts in zip(cases.items(), found, strict=True):
        if expected is None:
            assert hosts["type"] == "ClusterError", case
        else:
            assert hosts == expected, case
    assert [host0.ip, host1.ip, host2.ip] == sorted([host0.ip, host1.ip, host2.ip])

    staging.put("weights", files=1)
    code, report, _ = staging.cli("stage", staging.spec("weights", nodes={"labels": {"disk": "nvme"}}))
    assert code == 0
    assert [node["node"]["hostname"] for node in report["nodes"]] == ["host2"]
    assert [list(host.disk.iterdir()) == [] for host in staging.hosts] == [True, True, False]


def test_no_node_and_no_cluster_are_one_clear_line(staging: Staging) -> None:
    code, out, err = staging.cli("stage", staging.spec("weights", nodes={"labels": {"disk": "tape"}}))
    assert code == 3
    assert out["error"]["code"] == "cluster"
    (line,) = err.splitlines()
    assert "no node of the cluster matches; 3 are alive" in line or "4 are alive" in line
    assert "'disk': 'tape'" in line

    # Nothing listens there. Ray alone would try for more than a minute, and end the process in the end.
    for address in (f"{staging.world.head.ip}:1", "ray://127.0.0.1:1", "no-such-host:6379"):
        code, out, err = staging.cli("plan", staging.spec("weights"), "--address", address)
        assert code == 3
        (line,) = err.splitlines()
        assert line.startswith("llm-prefetch: cluster: no Ray cluster answers")
        assert address in line
        assert "--address" in line


def test_one_node_that_fails_neither_stops_nor_hides_the_others(staging: Staging) -> None:
    size = staging.put("weights", files=1)
    in_the_way = staging.hosts[1].disk / "artifacts"
    in_the_way.write_text("not a folder")

    code, report, err = staging.cli("stage", staging.spec("weights"))
    assert code == 4
    assert "2 of 3 nodes are ready, 3 are needed" in err
    assert [node["ready"] for node in report["nodes"]] == [True, False, True]
    assert report["nodes"][1]["report"] is None
    assert report["nodes"][1]["error"]["code"].startswith(("disk", "layout"))
    assert report["nodes"][1]["error"]["hint"]
    staging.full_checks([staging.hosts[0], staging.hosts[2]])
    assert staging.bytes_read() == 2 * size

    code, report, err = staging.cli("stage", staging.spec("weights", policy={"min_ready": "2"}))
    assert (code, report["ready"]) == (0, True)
    assert report["nodes"][1]["error"]["code"].startswith(("disk", "layout"))

    in_the_way.unlink()
    code, report, _ = staging.cli("stage", staging.spec("weights"))
    assert code == 0
    assert staging.bytes_read() == 3 * size


def test_the_nodes_of_a_run_share_its_bandwidth(staging: Staging) -> None:
    """Three nodes fetch three times the bytes that may pass in a second, which takes three but for their first second,
    until each has heard of the others. However late one of them begins, it is not faster for all of them together.
    """
    size = staging.put("weights", files=16, kilobytes=256)
    policy = {"run_bandwidth": f"{size}B/s"}
    code, report, _ = staging.cli("stage", staging.spec("weights", policy=policy))
    assert (code, report["ready"]) == (0, True)
    at = [request.at for request in staging.reads()]
    assert max(at) - min(at) > 1.5
    assert staging.bytes_read() == 3 * size


def test_a_plan_of_one_node_that_fails_does_not_hide_the_others(staging: Staging) -> None:
    first, *others = staging.hosts
    (first.disk / "only-here").mkdir()
    (first.disk / "only-here" / "a").write_bytes(b"x")
    spec = staging.spec("weights")
    spec["artifacts"][0]["uri"] = f"file://{first.root}/only-here"
    code, planned, err = staging.cli("plan", spec)
    assert code == 3
    rows = {row["node"]: row for row in planned["nodes"]}
    assert rows[first.ip]["fetch_bytes"] == 1
    assert all("no such folder" in rows[host.ip]["error"] for host in others)
    assert all(f"{host.ip}: no such folder" in err for host in others)


def test_without_a_manifest_the_first_node_pins_the_others(staging: Staging) -> None:
    size = staging.put("plain", publish=False) + staging.put("published", files=1)
    code, report, _ = staging.cli("stage", staging.spec("plain", "published"))
    assert code == 0
    assert staging.bytes_read() == 3 * size
    assert len({node["report"]["bundle"] for node in report["nodes"]}) == 1
    assert len(staging.full_checks(staging.hosts)) == 2

    staging.put("changing", publish=False)
    version, *others = staging.driver(
        ("change_between", staging.spec("changing", deployment="changing"), "part-2.bin")
    )[0]
    assert version.startswith("b3-")
    assert {other["code"] for other in others} == {"digest"}
    assert staging.full_checks([staging.hosts[0]], "changing") == {version}
    for host in staging.hosts[1:]:
        assert not (host.disk / "live" / "changing").exists()


def test_errors_of_a_node_arrive_as_they_were(staging: Staging) -> None:
    missing = {"deployment": "m", "artifacts": [{"name": "w", "uri": "s3://no-such-bucket-here/x"}]}
    unknown = {"deployment": "m", "artifacts": [{"name": "w", "uri": "gopher://old/x"}]}
    on_one = {"nodes": {"ids": ["host1"]}}
    *pairs, vanished = staging.driver(
        ("fail", missing | on_one), ("fail", unknown | on_one), ("vanish", missing | on_one)
    )
    assert vanished["message"] == "the node has left the cluster since it was selected"
    assert (vanished["type"], vanished["where"]) == ("ClusterError", staging.hosts[1].ip)
    assert vanished["hint"].startswith("run the same again")
    for planned, staged in pairs:
        assert planned == staged
        assert all(planned.values())
    assert [staged["type"] for _, staged in pairs] == ["OriginNotFoundError", "UnsupportedOriginError"]
    assert [staged["code"] for _, staged in pairs] == ["origin-not-found", "unsupported"]
