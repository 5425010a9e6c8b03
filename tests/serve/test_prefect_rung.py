"""The rung `prefect`: one run for all replicas that start, watched until it has made the node ready, or has ended."""

from __future__ import annotations

import asyncio
import sys

import httpx
import pytest

from llm_prefetch.live import check_deployment
from llm_prefetch.names import remember
from llm_prefetch.serve.fallback_event import EVENT
from llm_prefetch.spec import Spec
from tests.real import processes
from tests.real.prefect_server import prefect_server
from tests.samples import make_published
from tests.serve.conftest import REPOSITORY, outcome, until
from tests.serve.prefect_stand_in import DEPLOYMENT_ID, FLOW_ID, Run, ends

RUN_ID = "33333333-0d0f-4d5b-9f3e-2f6f8f1b2c3d"


def test_a_run_is_started_and_when_it_is_done_the_replica_starts_from_what_it_staged(
    replica, server, store, ready, rows
):
    ends(server, "COMPLETED", ready)
    start = replica()
    start.run()
    assert start.engine.hf_model_id == str(store.root / "live" / "llama" / "weights")
    assert outcome(rows) == "flow run run-1 has made the node ready"
    assert rows("start")[0]["rung"] == "prefect"
    assert len(server.started) == 1


def test_the_deployment_may_be_named_by_its_id(replica, server, ready):
    ends(server, "COMPLETED", ready)
    start = replica(deployment="llama", prefect={"deployment": DEPLOYMENT_ID})
    start.run()
    assert not start.by_ray
    assert not any("deployments/name" in path for _, path in server.asked)


def test_a_deployment_that_this_node_does_not_know_by_its_id_yet_is_known_once_its_run_has_staged(
    replica, server, store, ready, rows
):
    def stage_and_tell():
        ready()
        remember(store, DEPLOYMENT_ID, "llama")  # as the flow does

    ends(server, "COMPLETED", stage_and_tell)
    start = replica(deployment=DEPLOYMENT_ID)
    start.run()
    assert start.engine.hf_model_id == str(store.root / "live" / "llama" / "weights")
    [row] = rows("start")
    assert (row["deployment"], row["verdict"], row["rung"]) == (DEPLOYMENT_ID, "MISSING", "prefect")
    assert "no deployment of that id has staged on this node" in row["reason"]


WRONG_IDS = {
    "a flow": (FLOW_ID, f"{FLOW_ID} is the id of the flow stage, not of a deployment"),
    "a flow run": (RUN_ID, f"{RUN_ID} is the id of the flow run run-{RUN_ID}, not of a deployment"),
    "nothing": ("22222222-0d0f-4d5b-9f3e-2f6f8f1b2c3d", "Prefect answered 404"),
}


@pytest.mark.parametrize(("given", "reason"), WRONG_IDS.values(), ids=WRONG_IDS)
def test_an_id_of_something_else_is_called_what_it_is(replica, server, rows, given, reason):
    server.runs.append(Run(RUN_ID, "", "COMPLETED"))
    start = replica(deployment=given)
    start.run()
    assert start.by_ray
    assert reason in outcome(rows)
    assert server.started == []


def test_fifty_replicas_that_start_at_once_cause_one_run(replica, server, ready):
    ends(server, "COMPLETED", ready)
    starts = [replica() for _ in range(50)]

    async def main():
        await asyncio.gather(*(start.callback.run_callback("on_before_node_init") for start in starts))

    asyncio.run(main())
    assert len(server.started) == 1
    assert len({start.engine.hf_model_id for start in starts}) == 1
    assert not starts[0].by_ray


def test_after_a_run_that_failed_the_next_start_may_cause_another(replica, server, rows):
    ends(server, "FAILED")
    replica().run()
    replica().run()
    assert len(server.started) == 2
    assert len({run.key for run in server.started}) == 2


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "SCHEDULED"])
def test_a_run_in_progress_is_joined(replica, server, ready, state):
    server.add(state)
    ends(server, "COMPLETED", ready)
    start = replica()
    start.run()
    assert not start.by_ray
    assert server.started == []


def test_a_run_that_a_schedule_has_made_for_later_is_not_waited_for(replica, server, ready):
    server.add("SCHEDULED", due_in=3600)
    ends(server, "COMPLETED", ready)
    start = replica()
    start.run()
    assert not start.by_ray
    assert len(server.started) == 1


def test_when_the_run_that_was_joined_left_this_node_out_another_is_started(replica, server, ready):
    early = server.add("RUNNING")

    def end(run):
        if run is not early:
            ready()
        run.state = "COMPLETED"

    server.on_read = end
    start = replica()
    start.run()
    assert not start.by_ray
    assert len(server.started) == 1


def test_a_run_that_leaves_this_node_out_is_a_reason_and_not_repeated(replica, server, rows):
    ends(server, "COMPLETED")
    start = replica()
    start.run()
    assert start.by_ray
    assert "run-1 is COMPLETED, but this node is not ready" in outcome(rows)
    assert len(server.started) == 1


def test_once_the_node_is_ready_the_other_nodes_are_not_waited_for(replica, server, ready, rows):
    def read(run):
        if run.state == "SCHEDULED":
            run.state = "RUNNING"
            ready()

    server.on_read = read
    start = replica()
    start.run()
    assert not start.by_ray
    assert server.runs[0].state == "RUNNING"


@pytest.mark.parametrize("state", ["FAILED", "CRASHED", "CANCELLED"])
def test_a_run_that_ends_otherwise_is_a_reason(replica, server, rows, state):
    ends(server, state)
    start = replica()
    start.run()
    assert start.by_ray
    assert f"flow run run-1 ended {state}" in outcome(rows)


_FLOW = """
import json, os, sys, time
from pathlib import Path
from prefect import flow

@flow(name="stage")
def stage_flow(spec: str, root: str, note: str) -> None:
    from llm_prefetch.spec import Spec
    from llm_prefetch.stage import stage
    from llm_prefetch.store import open_store
    with open(note, "a") as file:
        file.write("run\\n")
    stage(Spec.model_validate_json(spec), open_store(Path(root), create=True))

if __name__ == "__main__":
    spec, root, note = sys.argv[1:]
    stage_flow.from_source(str(Path(__file__).parent), "flow.py:stage_flow").deploy(
        "llama", work_pool_name="pool", print_next_steps=False,
        parameters={"spec": spec, "root": root, "note": note},
    )
"""


@pytest.mark.prefect
def test_a_real_server_and_its_worker_make_the_node_ready_once_for_all(
    make, store, tmp_path, monkeypatch, rows
):
    artifacts = [{"name": "weights", "uri": make_published(tmp_path / "origin")}]
    spec = Spec.model_validate({"deployment": "llama", "artifacts": artifacts}).model_dump_json()
    (tmp_path / "flow.py").write_text(_FLOW)
    path = {"PYTHONPATH": str(REPOSITORY)}
    with prefect_server() as server, server.worker("pool", cwd=tmp_path, env=path):
        argv = [sys.executable, "flow.py", spec, str(store.root), str(tmp_path / "note.txt")]
        processes.run(argv, env={**processes.os.environ, **server.env, **path}, cwd=tmp_path)
        options = {"deployment": "stage/llama", "on_miss": ["prefect", "fail"]}
        starts = [make(**options, prefect={"api_url": server.api_url}) for _ in range(8)]

        async def main():
            await asyncio.gather(*(start.callback.run_callback("on_before_node_init") for start in starts))

        asyncio.run(main())
        found = httpx.post(f"{server.api_url}/flow_runs/filter", json={}).json()
        assert len(found) == 1, found
        # A deployment that is not there, and a server that wants to know who asks, are answers of the real one too.
        other = make(
            deployment="stage/nobody", on_miss=["prefect", "ray"], prefect={"api_url": server.api_url}
        )
        other.run()
        # So are events, and an id that is that of the flow.
        flow = make(
            deployment=httpx.post(f"{server.api_url}/flows/filter", json={}).json()[0]["id"],
            on_miss=["prefect", "ray"],
            prefect={"api_url": server.api_url},
        )
        flow.run()
        asked = {"filter": {"event": {"name": [EVENT]}}}
        until(lambda: httpx.post(f"{server.api_url}/events/filter", json=asked).json()["total"] == 10)
        payloads = [
            e["payload"] for e in httpx.post(f"{server.api_url}/events/filter", json=asked).json()["events"]
        ]
        assert sorted(told["rung"] for told in payloads) == ["prefect"] * 8 + ["ray"] * 2
    assert other.engine.hf_model_id == flow.engine.hf_model_id == str(other.ray.folder)
    assert "is the id of the flow stage, not of a deployment" in rows("start")[-1]["ladder"][0]["outcome"]
    assert "Prefect answered 404" in rows("start")[-2]["ladder"][0]["outcome"]
    assert check_deployment(store, "llama", full=True).ready
    assert {start.engine.hf_model_id for start in starts} == {str(store.root / "live" / "llama" / "weights")}
    assert (tmp_path / "note.txt").read_text() == "run\n"
