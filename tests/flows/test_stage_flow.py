"""The flow `stage` from end to end: what it stages, what a person sees in Prefect, and how it fails."""

from __future__ import annotations

import copy
import json
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from llm_prefetch.names import resolve_name
from llm_prefetch.store import NodeStore
from tests.flows.conftest import Flows, call, spec
from tests.ray.conftest import actors
from tests.real.processes import wait_until

pytestmark = [pytest.mark.prefect, pytest.mark.ray]


def test_a_deployed_run_stages_on_every_node_and_shows_it(flows: Flows) -> None:
    size = flows.publish("models", "tiny-llama", files=3)
    run = flows.run_in(flows.prefect.run("stage/tiny-llama"))
    addresses = {host.ip for host in flows.world.cluster.hosts if host.running}
    assert run.state[0] == "Completed"
    run.tried({f"stage-{address}": 1 for address in addresses})
    percent, said = run.described("progress")
    assert percent == 100.0
    assert said.startswith(f"`tiny-llama` on {len(addresses)} nodes: ")
    assert "(100%), " in said
    assert set(run.table) == addresses
    for row in run.table.values():
        assert (row["verdict"], row["fetched_bytes"], row["reused_bytes"], row["error"]) == (
            "HIT",
            size,
            0,
            "",
        )
        assert row["seconds"] > 0
        assert row["root"] == str(flows.world.cluster.root)
    ready = f"tiny-llama is ready on {len(addresses)} of {len(addresses)} nodes"
    wait_until(lambda: any(ready in line["message"] for line in run.logs), 60, "its logs have arrived")
    logged = {(line["name"], line["message"].partition(",")[0]) for line in run.logs}
    assert ("prefect.flow_runs", ready) in logged
    for address in addresses:
        assert ("llm_prefetch.cluster.staging", f"{address}: HIT") in logged
    page = run.artifact("markdown")
    assert page.startswith(f"## `tiny-llama`: staged: {len(addresses)} of {len(addresses)} nodes ready")
    assert "`s3://models/tiny-llama/.llm-prefetch/manifest.json`" in page
    told = {(event["event"], event["resource"]["prefect.resource.id"]): event for event in run.events(4)}
    running = [host for host in flows.world.cluster.hosts if host.running]
    assert set(told) == {
        ("llm-prefetch.bundle.staged", "llm-prefetch.bundle.tiny-llama"),
        *(("llm-prefetch.node.ready", f"llm-prefetch.node.{host.name}") for host in running),
    }
    bundle = told["llm-prefetch.bundle.staged", "llm-prefetch.bundle.tiny-llama"]
    assert (bundle["payload"]["ready"], bundle["payload"]["fetched_bytes"]) == (
        len(running),
        len(running) * size,
    )
    assert all(len(event["related"]) <= 8 for event in told.values()), told  # most of them are Prefect's own
    for host in running:
        assert flows.world.ask(host, "verify", "tiny-llama", "--full")["ready"]
        # A replica that names the deployment by its UUID needs no network.
        uuid = call(flows.api, "/deployments/name/stage/tiny-llama")["id"]
        assert resolve_name(NodeStore(host.disk), uuid) == "tiny-llama"


def test_too_few_nodes_fail_the_run_with_our_line_and_the_table_says_who(flows: Flows) -> None:
    flows.publish("flow-few", "weights")
    broken, *well = [host.ip for host in flows.world.cluster.hosts[:3]]
    (flows.world.head.disk / "artifacts").write_text("not a folder")
    hosts = {"nodes": {"ids": ["host0", "host1", "host2"]}}
    nowhere = spec("flow-no-such-bucket", "weights", nodes={"ids": ["host1"]})
    some, enough, missing, again = flows.direct(
        spec("flow-few", "weights", **hosts),
        spec("flow-few", "weights", **hosts, policy={"min_ready": "60%"}),
        nowhere,
        spec("flow-few", "weights", nodes={"ids": ["host1"]}),
    )

    run = flows.run(some["run"])
    name, message = run.state
    assert name == "Failed"
    assert "2 of 3 nodes are ready, 3 are needed" in message
    assert "Error:" in message  # the class of what happened on the node
    assert run.table[broken]["verdict"] == "MISSING"
    assert run.table[broken]["error"]
    assert f"; {broken}: " in message  # and which node
    assert "**What next**" in run.artifact("markdown")
    assert {event["event"] for event in run.events(3)} == {
        "llm-prefetch.bundle.stage-failed",
        "llm-prefetch.node.ready",
    }
    assert {run.table[address]["verdict"] for address in well} == {"HIT"}
    assert run.artifact("progress") < 100
    run.tried({f"stage-{address}": 1 for address in (broken, *well)})

    run = flows.run(enough["run"])
    assert run.state[0] == "Completed"
    assert run.table[broken]["error"]

    run = flows.run(missing["run"])
    name, message = run.state
    assert name == "Failed"
    assert "OriginNotFoundError" in message
    assert "no such bucket" in message
    wait_until(lambda: set(run.attempts.values()) == {1}, 60, "its tasks are known")  # no retry would help

    run = flows.run(again["run"])
    assert run.artifact("progress") == 100.0  # although there was no byte to count
    assert "llm_prefetch.cluster.staging" in {line["name"] for line in run.logs}


def test_an_origin_that_is_away_for_a_moment_is_tried_again(flows: Flows) -> None:
    size = flows.publish("flow-away", "weights")
    host = flows.world.cluster.hosts[1]
    flows.world.s3.fail("flow-away")
    try:
        with ThreadPoolExecutor(1) as pool:
            staging = pool.submit(flows.direct, spec("flow-away", "weights", nodes={"ids": ["host1"]}))
            try:
                wait_until(lambda: waits_for_retry(flows, host.ip), 120, "the task run waits for its retry")
            finally:
                flows.world.s3.mend("flow-away")
            (result,) = staging.result()
    finally:
        flows.world.s3.mend("flow-away")
    run = flows.run(result["run"])
    assert run.state[0] == "Completed"
    run.tried({f"stage-{host.ip}": 2})
    assert run.table[host.ip]["fetched_bytes"] == size


def waits_for_retry(flows: Flows, address: str) -> bool:
    wanted = {"name": {"any_": [f"stage-{address}"]}, "state": {"name": {"any_": ["AwaitingRetry"]}}}
    return bool(call(flows.api, "/task_runs/filter", {"task_runs": wanted}))


def test_a_cancelled_run_ends_its_actors_and_what_is_done_is_kept(flows: Flows) -> None:
    size = flows.publish("flow-cancel", "weights", files=160, kilobytes=128)
    slow = spec("flow-cancel", "weights", policy={"bandwidth": "400KB/s"}, nodes={"ids": ["host2"]})
    host = flows.world.cluster.hosts[2]
    argv = ("deployment", "run", "stage/tiny-llama", "--params", json.dumps({"spec": slow}))
    run = flows.run_in(flows.prefect.cli(*argv))
    wait_until(lambda: flows.bytes_read("flow-cancel") > 2**21 + 2**19, 120, "the node reads from the origin")
    call(flows.api, f"/flow_runs/{run.id}/set_state", {"state": {"type": "CANCELLING"}})  # as the UI does
    wait_until(lambda: not actors(flows.world), 120, "no actor of ours is alive")
    run.wait_for("Cancelled")
    assert not (host.disk / "live").exists() or not list((host.disk / "live").iterdir())

    (again,) = flows.direct(slow | {"policy": {}})
    row = flows.run(again["run"]).table[host.ip]
    assert row["verdict"] == "HIT"
    assert row["reused_bytes"] > 0
    assert row["fetched_bytes"] + row["reused_bytes"] == size


GOOD: dict[str, Any] = {
    "deployment": "llama",
    "artifacts": [{"name": "weights", "uri": "s3://b/m"}],
    "nodes": {"resources": {"GPU": 1}},
    "policy": {"bandwidth": "2GB/s", "min_ready": "80%"},
}


def test_bad_parameters_are_refused_at_submission_and_every_field_of_the_form_is_described(
    flows: Flows,
) -> None:
    deployment = call(flows.api, "/deployments/name/stage/tiny-llama")

    def submit(parameters: dict[str, Any]) -> int:
        later = {"type": "SCHEDULED", "state_details": {"scheduled_time": "2100-01-01T00:00:00Z"}}
        body = {"parameters": parameters, "state": later}
        try:
            call(flows.api, f"/deployments/{deployment['id']}/create_flow_run", body)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        return 201

    bad = {
        "no scheme": ("artifacts", 0, "uri", "/models/llama"),
        "unsafe name": ("artifacts", 0, "name", "../llama"),
        "unknown kind": ("artifacts", 0, "kind", "weights"),
        "version that is none": ("artifacts", 0, "version", "latest"),
        "misspelt field": ("artifacts", 0, "url", "s3://b/m"),
        "unsafe deployment": ("deployment", "a/b"),
        "no artifact": ("artifacts", []),
        "labels that are no mapping": ("nodes", "labels", ["disk"]),
        "bandwidth without a unit": ("policy", "bandwidth", "fast"),
        "too many percent": ("policy", "min_ready", "120%"),
    }
    assert submit({"spec": GOOD}) == 201
    assert submit({}) == 201  # the deployment's own
    answers = {case: submit({"spec": changed(*change)}) for case, change in bad.items()}
    assert answers == dict.fromkeys(bad, 409)

    schema = deployment["parameter_openapi_schema"]
    models = {"stage": schema, **schema["definitions"]}
    fields = {f"{m}.{f}": field for m, model in models.items() for f, field in model["properties"].items()}
    assert {
        "stage.spec",
        "stage.dry_run",
        "stage.plan",
        "stage.address",
        "stage.root",
        "Artifact.uri",
        "Policy.min_ready",
    } <= set(fields)
    assert [name for name, field in fields.items() if not field.get("description")] == []


def changed(*change: Any) -> dict[str, Any]:
    """`GOOD` with one value replaced."""
    found: Any = copy.deepcopy(GOOD)
    whole, (*path, last, value) = found, change
    for part in path:
        found = found[part]
    found[last] = value
    return dict(whole)


def test_without_a_server_prefect_starts_one_of_its_own(flows: Flows) -> None:
    flows.publish("flow-alone", "weights")
    (result,) = flows.direct(spec("flow-alone", "weights", nodes={"ids": ["host0"]}), server=False)
    assert (result["state"], result["patience"]) == ("Completed", 60)
    assert flows.world.ask(flows.world.head, "verify", "flow-alone", "--full")["ready"]
