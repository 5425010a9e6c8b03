"""What Prefect does by itself: the automations that the script makes, and the trigger of a deployment."""

from __future__ import annotations

import json
import sys
import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.flows.conftest import Flows, call
from tests.real.processes import wait_until

pytestmark = [pytest.mark.prefect, pytest.mark.ray, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[2] / "deployments" / "automations.py"
SILENT = "llm-prefetch: a silent run is Crashed"
TELL = "llm-prefetch: tell of a failed staging"
JOINED = "llm-prefetch: reconcile when a node joined"


def test_automations_are_made_once_act_and_are_deleted(flows: Flows) -> None:
    assert done(flows, "--dry-run") == {
        SILENT: "would be created",
        TELL: "skipped",
        JOINED: "would be created",
    }
    assert there(flows) == {}

    with notification_block(flows) as told:
        made = done(flows, "--silence", "10", "--notify", "custom-webhook/ops")
        assert made == dict.fromkeys((SILENT, TELL, JOINED), "created")
        run = silent_run(flows)
        failed = {"message": "the bucket is gone", "ready": 2, "nodes": 3}
        post(
            flows, "llm-prefetch.bundle.stage-failed", "llm-prefetch.bundle.tiny-llama", "tiny-llama", failed
        )
        wait_until(lambda: bool(told), 60, "somebody is told")
        assert "llm-prefetch: tiny-llama is not staged" in told[0]
        assert "the bucket is gone" in told[0]
        assert "2 of 3 nodes are ready." in told[0]
        flows.run(run).wait_for("Crashed")
        assert "no sign of life for 10 s" in flows.run(run).state[1]

    before = there(flows)
    patch(flows, before[SILENT]["id"], {"enabled": False})  # as the switch in the UI does
    assert done(flows) == {SILENT: "updated", TELL: "left as it is", JOINED: "unchanged"}
    after = there(flows)
    assert {name: each["id"] for name, each in after.items()} == {n: each["id"] for n, each in before.items()}
    assert after[SILENT]["trigger"]["within"] == 540
    assert after[SILENT]["enabled"] is False
    assert done(flows) == {SILENT: "unchanged", TELL: "left as it is", JOINED: "unchanged"}

    size = flows.publish("models", "tiny-llama")
    post(flows, "llm-prefetch.node.joined", "llm-prefetch.node.host1", "host1")
    run = run_of(flows, "reconcile/tiny-llama", lambda run: run["state_type"] == "COMPLETED")["id"]
    assert {row["fetched_bytes"] for row in flows.run(run).table.values()} == {size}

    assert done(flows, "--delete") == dict.fromkeys((SILENT, TELL, JOINED), "deleted")
    assert there(flows) == {}


def test_an_event_starts_a_scale_up_with_the_number_that_it_names(flows: Flows) -> None:
    post(flows, "llm.serve.scale-up.requested", "llm.serve.app.tiny-llama", "tiny-llama", {"replicas": 3})
    run = run_of(flows, "scale-up/tiny-llama", lambda _run: True)
    call(flows.api, f"/flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLED"}, "force": True})
    wanted = {"application": "llm", "deployment": "LLMServer:tiny-llama", "replicas": 3}
    assert run["parameters"]["target"] == wanted
    assert run["parameters"]["spec"]["deployment"] == "tiny-llama"


@pytest.mark.parametrize(
    ("argv", "env", "code", "reason"),
    [
        (["--notify", "slack-webhook/nobody"], {}, 2, "no block slack-webhook/nobody on the server"),
        ([], {"PREFECT_API_URL": ""}, 2, "PREFECT_API_URL is not set"),
        ([], {"PREFECT_API_URL": "http://127.0.0.1:1/api"}, 3, "http://127.0.0.1:1/api"),
    ],
    ids=["no such block", "no server named", "no server there"],
)
def test_what_is_missing_is_named_in_one_line(
    flows: Flows, argv: list[str], env: dict[str, str], code: int, reason: str
) -> None:
    env = {**flows.prefect.server.env, "PREFECT_CLIENT_MAX_RETRIES": "0", **env}
    ended = flows.world.head.run([sys.executable, SCRIPT, "--dry-run", *argv], env=env, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (code, 1)
    assert ended.stderr.startswith("error: ")
    assert reason in ended.stderr


def done(flows: Flows, *argv: str) -> dict[str, str]:
    """Run the script: what it did with each automation, without the reason."""
    ended = flows.world.head.run([sys.executable, SCRIPT, *argv], env=flows.prefect.server.env)
    lines = [line.rpartition("llm-prefetch: ")[2] for line in ended.stdout.splitlines()]
    return {f"llm-prefetch: {line.split(': ')[0]}": line.split(": ")[1] for line in lines}


def there(flows: Flows) -> dict[str, dict[str, Any]]:
    """Our automations on the server, by name."""
    found = call(flows.api, "/automations/filter", {})
    return {each["name"]: each for each in found if each["name"].startswith("llm-prefetch: ")}


def patch(flows: Flows, automation: str, body: dict[str, Any]) -> None:
    headers = {"Content-Type": "application/json"}
    url = f"{flows.api}/automations/{automation}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="PATCH")
    urllib.request.urlopen(request, timeout=30).close()


def post(flows: Flows, event: str, resource: str, name: str, payload: object = None, **more: object) -> None:
    """Post an event, as `curl` does in the how-to."""
    body = {
        "id": str(uuid.uuid4()),
        "occurred": datetime.now(UTC).isoformat(),
        "event": event,
        "resource": {"prefect.resource.id": resource, "prefect.resource.name": name},
        "payload": payload or {},
        **more,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{flows.api}/events", json.dumps([body]).encode(), headers)
    urllib.request.urlopen(request, timeout=30).close()


def silent_run(flows: Flows) -> str:
    """A run of ours that said once that it lives, and never again."""
    deployment = call(flows.api, "/deployments/name/stage/tiny-llama")["id"]
    never = {"type": "SCHEDULED", "state_details": {"scheduled_time": "2100-01-01T00:00:00Z"}}
    run = str(call(flows.api, f"/deployments/{deployment}/create_flow_run", {"state": never})["id"])
    call(flows.api, f"/flow_runs/{run}/set_state", {"state": {"type": "RUNNING"}, "force": True})
    tag = {"prefect.resource.role": "tag", "prefect.resource.id": "prefect.tag.llm-prefetch"}
    post(flows, "prefect.flow-run.heartbeat", f"prefect.flow-run.{run}", "silent", related=[tag])
    return run


def run_of(flows: Flows, deployment: str, enough: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait for a run of this deployment that an automation made and that is as wanted."""
    name = call(flows.api, f"/deployments/name/{deployment}")["id"]
    found: list[dict[str, Any]] = []

    def made() -> bool:
        runs = call(flows.api, "/flow_runs/filter", {"deployments": {"id": {"any_": [name]}}})
        found[:] = [run for run in runs if (run["created_by"] or {})["type"] == "AUTOMATION" and enough(run)]
        return bool(found)

    wait_until(made, 120, f"there is a run of {deployment}")
    return found[0]


@contextmanager
def notification_block(flows: Flows) -> Iterator[list[str]]:
    """A block `custom-webhook/ops` on the server; what was told to it."""
    told: list[str] = []

    class Ear(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_args: object) -> None: ...

    ear = ThreadingHTTPServer((flows.world.cluster.gateway_ip, 0), Ear)
    threading.Thread(target=ear.serve_forever, daemon=True).start()
    make = f"""
from prefect.blocks.notifications import CustomWebhookNotificationBlock
said = {{"subject": "{{{{subject}}}}", "body": "{{{{body}}}}"}}
url = "http://{ear.server_address[0]}:{ear.server_port}/"
CustomWebhookNotificationBlock(name="ops", url=url, json_data=said).save("ops", overwrite=True)
"""
    try:
        flows.world.head.run([sys.executable, "-c", make], env=flows.prefect.server.env)
        yield told
    finally:
        ear.shutdown()
        ear.server_close()
