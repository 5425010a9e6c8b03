"""The rung `prefect`: one run for all replicas, watched to its end, and on to the next rung whatever the server does."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import httpx
import pytest

from llm_prefetch.live import check_deployment
from llm_prefetch.names import remember
from llm_prefetch.serve.fallback_event import EVENT
from llm_prefetch.spec import Spec
from llm_prefetch.stage import stage
from tests.real import processes
from tests.real.prefect_server import prefect_server
from tests.samples import make_published
from tests.serve.conftest import Start, until
from tests.serve.prefect_stand_in import DEPLOYMENT_ID, FLOW_ID, Run, prefect_stand_in

REPOSITORY = Path(__file__).parents[2]
RUN_ID = "33333333-0d0f-4d5b-9f3e-2f6f8f1b2c3d"


@pytest.fixture(autouse=True)
def log(caplog, monkeypatch):
    caplog.set_level("DEBUG")
    for name in ("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING"):
        monkeypatch.delenv(name, raising=False)
    return caplog


@pytest.fixture
def server(monkeypatch):
    with prefect_stand_in() as server:
        monkeypatch.setenv("PREFECT_API_URL", server.url)
        yield server


@pytest.fixture
def ready(store, tmp_path):
    """Make the node ready, as the staging flow does."""
    artifacts = [{"name": "weights", "uri": make_published(tmp_path / "origin")}]
    spec = Spec.model_validate({"deployment": "llama", "artifacts": artifacts})
    return lambda: stage(spec, store)


@pytest.fixture
def replica(make):
    """A replica that asks Prefect, and then lets Ray download."""

    def replica(**kwargs) -> Start:
        return make(**{"deployment": "stage/llama", "on_miss": ["prefect", "ray"], **kwargs})

    return replica


def outcome(rows) -> str:
    """What the ledger says of the rung."""
    [row] = rows("start")
    rung = row["ladder"][0]
    assert rung["rung"] == "prefect"
    return str(rung["outcome"])


def ends(server, state, ready=lambda: None):
    """Every run that is looked at makes the node ready, perhaps, and ends."""

    def end(run):
        if run.state not in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
            ready()
            run.state = state

    server.on_read = end


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


ANSWERS = {
    "401": (401, b'{"detail": "Unauthorized"}', "Prefect answered 401: Unauthorized", "PREFECT_API_AUTH_STRING"),
    "403": (403, b"{}", "Prefect answered 403", "may not run"),
    "404": (404, b'{"detail": "Deployment not found"}', "Prefect answered 404: Deployment", "deploy it first"),
    "409": (409, b'{"detail": "no such parameter"}', "Prefect answered 409: no such", "do not fit its flow"),
    "500": (500, b"Internal Server Error", "Prefect cannot be asked: it answered 500", "is the server up?"),
    "302": (302, b"", "Prefect answered 302", "ends in /api"),
    "HTML": (200, b"<!doctype html><title>Prefect</title>", "does not speak so: '<!doctype", "ends in /api"),
    "other JSON": (200, b'[{"id": 5}, 7]', "does not speak so", "ends in /api"),
    "nothing": (200, b"", "does not speak so", "ends in /api"),
}  # fmt: skip
CALLS = ("/api/deployments/name/", "/api/flow_runs/filter", "/create_flow_run", "/api/flow_runs/1")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("status", "body", "reason", "hint"), ANSWERS.values(), ids=ANSWERS)
def test_whatever_the_server_answers_the_next_rung_is_tried(
    replica, server, rows, monkeypatch, call, status, body, reason, hint
):
    monkeypatch.setattr("llm_prefetch.serve.prefect_api._BACKOFF_SECONDS", 0.01)
    server.answer = lambda path: (status, body) if call in path else None
    start = replica()
    start.run()
    assert start.by_ray
    assert reason in outcome(rows)
    assert hint in outcome(rows)


def test_a_trouble_that_passes_is_waited_out(replica, server, ready, monkeypatch):
    monkeypatch.setattr("llm_prefetch.serve.prefect_api._BACKOFF_SECONDS", 0.01)
    answers = [(503, b""), (500, b"")] * 20
    seen = []

    def answer(path):
        seen.append(path)
        return answers.pop() if seen.count(path) <= 2 else None

    server.answer = answer
    ends(server, "COMPLETED", ready)
    start = replica()
    start.run()
    assert not start.by_ray


def test_a_server_that_is_down_is_a_reason(replica, rows, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = replica(prefect={"api_url": f"http://127.0.0.1:{port}/api"})
    start.run()
    assert start.by_ray
    assert "Prefect cannot be asked: ConnectError" in outcome(rows)


def test_a_server_that_never_answers_is_given_up_at_the_deadline(replica, rows):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        start = replica(prefect={"api_url": url}, deadlines={"prefect": 0.5})
        start.run()
    assert start.by_ray
    assert outcome(rows) == "gave up after 0.5 s: asks Prefect"


def test_a_server_whose_answer_drips_is_given_up_at_the_deadline(replica, server, rows):
    server.drip = 0.1
    start = replica(deadlines={"prefect": 0.5})
    start.run()
    assert start.by_ray
    assert outcome(rows) == "gave up after 0.5 s: asks Prefect"


def test_a_run_that_does_not_end_is_given_up_at_the_deadline(replica, server, rows):
    start = replica(deadlines={"prefect": 1})
    start.run()
    assert start.by_ray
    assert outcome(rows) == "gave up after 1 s: started flow run run-1, which is SCHEDULED"


def test_without_an_address_it_is_a_reason(replica, rows):
    start = replica()
    start.run()
    assert start.by_ray
    assert "PREFECT_API_URL" in outcome(rows)


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:99999/api", "http://\x7f/api"])
def test_an_address_that_is_none_is_a_reason(replica, rows, monkeypatch, url):
    monkeypatch.setenv("PREFECT_API_URL", url)
    start = replica()
    start.run()
    assert start.by_ray
    assert outcome(rows).startswith("failed: ")


BASIC = "Basic " + "dXNlcjpwYXNz"


@pytest.mark.parametrize(
    ("environment", "options", "header"),
    [
        ({}, {}, ""),
        ({"PREFECT_API_KEY": "key"}, {}, "Bearer key"),
        ({"PREFECT_API_AUTH_STRING": "user:pass"}, {}, BASIC),
        ({"PREFECT_API_AUTH_STRING": "user:pass", "PREFECT_API_KEY": "key"}, {}, BASIC),
        ({"PREFECT_API_AUTH_STRING": "user:pass"}, {"api_key": "mine"}, "Bearer mine"),
        ({"PREFECT_API_KEY": "key"}, {"auth_string": "user:pass"}, BASIC),
    ],
)
def test_the_server_is_told_who_asks(replica, server, ready, monkeypatch, environment, options, header, log):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ends(server, "COMPLETED", ready)
    replica(prefect=options).run()
    assert set(server.headers) == {header}
    assert "user:pass" not in log.text


def test_a_password_in_the_address_is_shown_nowhere(replica, server, rows, log, monkeypatch):
    server.answer = lambda path: (404, b"{}")
    replica(prefect={"api_url": server.url.replace("//", "//user:hunter2@")}).run()
    assert server.headers[0].startswith("Basic")
    assert "hunter2" not in outcome(rows) + log.text


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
