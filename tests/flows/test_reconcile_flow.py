"""The flows that look after what is staged: `reconcile`, `rollback` and `verify`, and what a person sees of each."""

from __future__ import annotations

from typing import Any

import pytest

from tests.flows.conftest import Flows, Run, call, spec
from tests.real.processes import wait_until
from tests.samples import flip_byte

pytestmark = [pytest.mark.prefect, pytest.mark.ray]


def runs(flows: Flows, flow: str, *calls: dict[str, Any]) -> list[Run]:
    return [flows.run(result["run"]) for result in flows.call(flow, *calls)]


def artifacts(run: Run) -> list[str]:
    found = call(run.api, "/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run.id]}}})
    return sorted(artifact["key"] for artifact in found)


def column(run: Run, name: str) -> set[Any]:
    return {row[name] for row in run.table.values()}


def test_what_is_staged_is_looked_after_and_each_run_says_what_it_did(flows: Flows) -> None:
    size = flows.publish("flow-fleet", "weights")
    flows.publish("flow-fleet", "second")
    one = spec("flow-fleet", "weights", nodes={"ids": ["host1", "host2"]})
    two = {**one, "artifacts": [{"name": "weights", "uri": "s3://flow-fleet/second"}]}

    staged, nothing, planned, newer = runs(
        flows, "reconcile", {"spec": one}, {"spec": one}, {"spec": two, "dry_run": True}, {"spec": two}
    )
    assert staged.state[0] == nothing.state[0] == planned.state[0] == newer.state[0] == "Completed"
    assert column(staged, "did") == column(newer, "did") == {"staged"}
    assert column(staged, "fetched_bytes") == {size}
    wait_until(lambda: len(staged.attempts) == 2, 60, "a task run for each node, as of `stage`, is known")
    assert (artifacts(nothing), nothing.attempts) == ([], {})
    assert "flow-fleet is ready on 2 nodes; nothing to do" in {line["message"] for line in nothing.logs}
    assert column(planned, "did") == {"to stage"}
    assert planned.attempts == {}

    hosts = flows.world.cluster.hosts[1:3]
    nodes = {"deployment": "flow-fleet"}  # on every node that holds it
    asked, back, again = runs(
        flows, "rollback", {**nodes, "dry_run": True}, {**nodes, "why": "it rhymes"}, nodes
    )
    assert (column(asked, "did"), column(back, "did")) == ({"would go back"}, {"went back"})
    assert again.state[0] == "Failed"
    assert "no earlier generation" in again.state[1]
    (kept,) = runs(flows, "reconcile", {"spec": two})
    assert kept.state[0] == "Completed"
    assert artifacts(kept) == []
    [said] = [line["message"] for line in kept.logs if "rolled back on" in line["message"]]
    assert "by the flow run rollback-flow-fleet: it rhymes" in said
    bundles = {(host.disk / "live" / "flow-fleet").readlink().name[:19] for host in hosts}
    assert bundles == column(back, "bundle")

    link = hosts[1].disk / "live" / "flow-fleet"
    link.unlink()  # one node lacks it, and two are needed
    (one_more,) = runs(flows, "reconcile", {"spec": {**two, "policy": {"min_ready": "2"}}})
    assert one_more.state[0] == "Completed"
    assert one_more.artifact("progress") == 100.0
    told = {event["event"]: event["payload"] for event in one_more.events(2)}
    assert set(told) == {"llm-prefetch.bundle.staged", "llm-prefetch.node.ready"}
    payload = told["llm-prefetch.bundle.staged"]
    assert [payload[key] for key in ("nodes", "ready", "needed")] == [2, 2, 2]
    (damaged,) = (link.parent / link.readlink() / "weights").resolve().glob("part-0.bin")
    flip_byte(damaged)
    found, mended, clean = runs(flows, "verify", {**nodes, "on_damage": "report"}, nodes, nodes)
    assert found.state[0] == "Failed"
    assert "1 of 2 nodes are ready, 2 are needed; it is CORRUPT" in found.state[1]
    assert "'part-0.bin' from byte 0" in found.table[hosts[1].ip]["reason"]
    assert mended.state[0] == clean.state[0] == "Completed"
    assert [mended.table[host.ip]["did"] for host in hosts] == ["", "repaired"]
    assert "1 repaired" in mended.artifact("markdown")
    assert artifacts(clean) == []
