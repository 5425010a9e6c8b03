"""The flow `collect` from end to end: the ledgers of all hosts in one table, and what a person sees of them."""

from __future__ import annotations

import json

import pytest

from tests.flows.conftest import Flows, spec
from tests.ray.test_plan_cluster import started

pytestmark = [pytest.mark.prefect, pytest.mark.ray]


def test_the_ledgers_of_all_nodes_are_one_table_a_summary_and_a_picture(flows: Flows) -> None:
    size = flows.publish("flow-collect", "weights")
    one, two, broken = flows.world.cluster.hosts[:3]
    flows.direct(spec("flow-collect", "weights", nodes={"ids": ["host0", "host1"]}))
    started(one, "same-id", seconds=10.0)
    started(two, "same-id", seconds=11.0)
    with (one.disk / "ledger" / "ledger.jsonl").open("a") as file:
        file.write('{"kind": "start", "start": "tor')
    (broken.disk / "LAYOUT").write_text("99")

    all_of_it, of_llama = flows.call(
        "collect", {"nodes": {"ids": ["host0", "host1", "host2"]}}, {"deployment": "llama", "hours": 1.0}
    )
    assert (all_of_it["state"], of_llama["state"]) == ("Completed", "Completed")
    run = flows.run(all_of_it["run"])
    rows = json.loads(run.artifact("table"))
    assert [(row["what"], row["node"]) for row in rows[:1]] == [("error", broken.ip)]
    assert "layout '99'" in rows[0]["outcome"]
    assert sorted((row["what"], row["node"], row["id"], row["seconds"]) for row in rows if row["what"] == "start") == [
        ("start", one.ip, "same-id", 10.0), ("start", two.ip, "same-id", 11.0),
    ]  # fmt: skip
    assert {(row["node"], row["fetched_bytes"]) for row in rows if row["what"] == "staging"} == {
        (one.ip, size), (two.ip, size),
    }  # fmt: skip
    page = run.artifact("markdown")
    assert "| verdicts | HIT: 2 |" in page
    assert f"`{broken.ip}`: this node store has layout" in page
    assert "](data:image/svg+xml;base64," in page

    rows = json.loads(flows.run(of_llama["run"]).artifact("table"))
    assert {row["deployment"] for row in rows if row["what"] != "error"} == {"llama"}
