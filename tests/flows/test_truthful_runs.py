"""Runs that meet with an accident or with bad input: what they say is true, nothing is lost, and the next run finishes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from llm_prefetch.serve.ladder import Note
from llm_prefetch.serve.options import PrefectOptions
from llm_prefetch.serve.prefect_api import stage_by_prefect
from tests.flows.conftest import Flows, Run, call, spec
from tests.ray.conftest import actors
from tests.real import processes
from tests.real.ports import free_port
from tests.real.prefect_server import PrefectServer
from tests.real.processes import kill_marked, scratch, wait_until
from tests.real.warm import give_database

pytestmark = [pytest.mark.prefect, pytest.mark.ray]

SLOWLY = {"bandwidth": "400KB/s"}


def deploy(flows: Flows, name: str, pool: str, parameters: dict[str, Any]) -> str:
    """Another deployment of the flow `stage`, on a work pool of its own; its id."""
    there = call(flows.api, "/deployments/name/stage/tiny-llama")
    same = ("flow_id", "entrypoint", "path", "pull_steps", "parameter_openapi_schema", "job_variables")
    body = {key: there[key] for key in same}
    body |= {"name": name, "work_pool_name": pool, "parameters": parameters, "enforce_parameter_schema": True}
    return str(call(flows.api, "/deployments/", body)["id"])


async def trigger(flows: Flows, deployment_id: str, times: int) -> list[str]:
    """Ask for the deployment so often at once, as replicas do that start; the runs that are there then."""

    async def ask() -> None:
        options = PrefectOptions(api_url=flows.api)
        await stage_by_prefect(deployment_id, options, Note(), lambda: False, {})

    asking = [asyncio.create_task(ask()) for _ in range(times)]
    notes = "/flow_runs/filter", {"deployments": {"id": {"any_": [deployment_id]}}}
    runs = list[dict[str, Any]]()
    while not runs or {run["state_type"] for run in runs} == {"SCHEDULED"}:
        await asyncio.sleep(0.5)
        runs = await asyncio.to_thread(call, flows.api, *notes)
    await asyncio.sleep(2)  # whoever has not asked yet
    for task in asking:
        task.cancel()
    ended = await asyncio.gather(*asking, return_exceptions=True)
    assert {type(error) for error in ended} == {asyncio.CancelledError}, ended
    runs = await asyncio.to_thread(call, flows.api, *notes)
    return [run["id"] for run in runs]


def test_fifty_triggers_are_one_run_and_the_next_run_finishes_what_a_killed_worker_left(flows: Flows) -> None:
    size = flows.publish("flow-killed", "weights", files=160, kilobytes=128)
    host = flows.world.cluster.hosts[2]
    slow = spec("flow-killed", "weights", policy=SLOWLY, nodes={"ids": [host.name]})
    marker = flows.folder / "victims"
    server, head = flows.prefect.server, flows.world.head
    with server.worker("victims", host=head, env={"LPF_VICTIM": str(marker)}):
        deployment = deploy(flows, "killed", "victims", {"spec": slow})
        (run_id,) = asyncio.run(trigger(flows, deployment, 50))
        wait_until(lambda: flows.bytes_read("flow-killed") > 2**21, 120, "the node reads from the origin")
        kill_marked(marker, variable="LPF_VICTIM")  # the worker and the process of the run
    wait_until(lambda: not actors(flows.world), 120, "no actor of ours is alive")
    assert flows.run(run_id).state[0] == "Running"  # nobody was left to say otherwise
    assert not (host.disk / "live" / "flow-killed").is_symlink()

    finished, again = flows.direct(slow | {"policy": {}}, slow | {"policy": {}})
    row = flows.run(finished["run"]).table[host.ip]
    assert (row["verdict"], row["fetched_bytes"] + row["reused_bytes"]) == ("HIT", size)
    assert row["reused_bytes"] > 0
    row = flows.run(again["run"]).table[host.ip]
    assert (row["verdict"], row["fetched_bytes"], row["reused_bytes"]) == ("HIT", 0, size)
    assert [event["event"] for event in flows.run(again["run"]).events(1)] == ["llm-prefetch.bundle.staged"]


@contextmanager
def serving(server: PrefectServer) -> Iterator[None]:
    """Run `server` for the length of the block; its database outlives it."""
    host, _, port = server.api_url.removeprefix("http://").removesuffix("/api").partition(":")
    argv = [sys.executable, "-m", "prefect", "server", "start", "--host", host, "--port", port]
    with processes.process(
        argv, area=server.area, name="server", env=server.env, ready=server.healthy, deadline=180, grace=0
    ):
        yield


def test_a_run_goes_on_while_its_server_is_restarted_and_ends_truthfully(flows: Flows) -> None:
    size = flows.publish("flow-restart", "weights", files=96, kilobytes=128)
    slow = spec("flow-restart", "weights", policy=SLOWLY, nodes={"ids": ["host1"]})
    gateway, read = flows.world.cluster.gateway_ip, partial(flows.bytes_read, "flow-restart")
    with scratch("restart") as area, ThreadPoolExecutor(1) as pool:
        server = PrefectServer(f"http://{gateway}:{free_port(gateway)}/api", area)
        give_database(area.path / "home" / "prefect.db")
        argv = [sys.executable, "-m", "tests.flows.driver", "stage", json.dumps([{"spec": slow}])]
        with serving(server):
            running = pool.submit(flows.world.head.run, argv, env=server.env, timeout=240)
            wait_until(lambda: running.done() or read() > 2**21, 120, "the node reads from the origin")
        before = read()
        wait_until(lambda: read() > before + 2**20, 120, "the node goes on without a server")
        with serving(server):
            (line,) = [line for line in running.result().stdout.splitlines() if line.startswith('{"run"')]
            run = Run(server.api_url, json.loads(line)["run"])
            assert run.state[0] == "Completed"
            row = run.table[flows.world.cluster.hosts[1].ip]
            assert (row["verdict"], row["fetched_bytes"]) == ("HIT", size)
            assert run.artifact("progress") == 100.0
            assert run.artifact("markdown").startswith("## `flow-restart`: staged: 1 of 1 node ready")
    assert flows.world.ask(flows.world.cluster.hosts[1], "verify", "flow-restart", "--full")["ready"]


def test_bad_input_is_one_clear_error_on_the_page_and_a_dry_run_shows_the_plan(flows: Flows) -> None:
    size = flows.publish("flow-input", "weights")
    host = flows.world.cluster.hosts[1]
    good = spec("flow-input", "weights", nodes={"ids": ["host1", "host2"]})
    private = good | {"artifacts": [{"name": "weights", "uri": "s3://anonymous@flow-input/weights"}]}
    nowhere = good | {"nodes": {"labels": {"disk": "tape"}}}
    planned, *refused = (
        flows.run(result["run"])
        for result in flows.call(
            "stage",
            {"spec": good, "dry_run": True},
            {"spec": good, "plan": "plan-000000000000"},
            {"spec": nowhere},
            {"spec": private},
            {"spec": private, "dry_run": True},
            {"spec": good, "address": f"{flows.world.head.ip}:1"},
        )
    )
    assert planned.state[0] == "Completed"
    assert {row["fetch_bytes"] for row in planned.table.values()} == {size}
    page, said = planned.artifact("markdown"), planned.described("table")[1]
    plan = said.partition("`plan-")[2].partition("`")[0]
    assert f"`plan: plan-{plan}`" in page
    assert "nothing was staged" in said
    assert planned.attempts == {}

    expected = {
        "another plan": ("SpecError", "has changed since it was planned", f"now plan-{plan}"),
        "no node": ("ClusterError", "no node of the cluster matches", "disk=nvme"),
        "denied": ("OriginAccessError", f"{host.ip} (and 1 more)", "must be allowed to read there"),
        "denied, planned": (
            "OriginAccessError",
            f"2 of 2 nodes could not plan; {host.ip}",
            "s3://anonymous@",
        ),
        "no cluster": ("ClusterError", "no Ray cluster answers", "RAY_ADDRESS"),
    }
    for (case, fragments), run in zip(expected.items(), refused, strict=True):
        name, message = run.state
        assert name == "Failed", case
        pages = run.markdowns
        for fragment in fragments[:2]:
            assert fragment in message, case
        assert any(fragments[2] in page and "**What next**" in page for page in pages), (case, pages)
    assert [event["event"] for event in refused[0].events(1)] == ["llm-prefetch.bundle.stage-failed"]
    refused[2].tried({f"stage-{host.ip}": 1, f"stage-{flows.world.cluster.hosts[2].ip}": 1})
    assert not list(host.disk.glob("artifacts/*/*"))

    changed = good | {"policy": {"min_ready": "1"}}
    applied, late = (
        flows.run(result["run"])
        for result in flows.call(
            "stage",
            {"spec": good, "plan": f"plan-{plan}"},
            {"spec": changed, "plan": f"plan-{plan}"},
        )
    )
    assert applied.state[0] == "Completed"
    assert {row["fetched_bytes"] for row in applied.table.values()} == {size}
    assert late.state[0] == "Failed"
    assert "has changed since it was planned" in late.state[1]
