"""The flow `scale-up` on a real Ray Serve: both ways to scale, what it waits for, and what it never touches."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.flows.conftest import Flows, call
from tests.real import tiny_app
from tests.real.hosts import Host, HostSpec
from tests.real.processes import Process, wait_until
from tests.real.world import Prefect

pytestmark = [pytest.mark.prefect, pytest.mark.ray, pytest.mark.timeout(600)]

BUCKET = "flow-scale-up"
APPLICATIONS = "/api/serve/applications/"
SPEC = {
    "deployment": BUCKET,
    "artifacts": [{"name": "weights", "uri": f"s3://{BUCKET}/weights"}],
    "nodes": {"resources": {"slot": 1}},
}

# Every request to the autoscaler that stands, as it changes; Ray keeps it in its GCS.
_WATCH = """
import time
from ray._raylet import GcsClient
gcs, last = GcsClient(address={address!r}), None
while True:
    now = gcs.internal_kv_get(b"autoscaler_resource_request", namespace=None) or b"[]"
    if now != last:
        print(now.decode(), flush=True)
    last = now
    time.sleep(0.1)
"""


@dataclass(frozen=True)
class Served:
    """Three applications in Ray Serve, each with one replica, and a host with room for three."""

    flows: Flows
    host: Host
    watch: Process
    size: int
    """Bytes of what a replica needs."""

    @property
    def details(self) -> dict[str, Any]:
        """What Serve tells of its applications."""
        url = self.flows.world.cluster.dashboard_url + APPLICATIONS
        with urllib.request.urlopen(url, timeout=60) as answer:
            return dict(json.load(answer)["applications"])

    def running(self) -> bool:
        """Whether all applications run."""
        return [app["status"] for app in self.details.values()] == ["RUNNING"] * 3

    def replicas(self, application: str) -> dict[str, str]:
        """The replicas that run, by id: where."""
        found = self.details[application]["deployments"][tiny_app.NAME]["replicas"]
        return {one["replica_id"]: one["node_ip"] for one in found if one["state"] == "RUNNING"}

    @property
    def requests(self) -> list[list[dict[str, float]]]:
        """What the autoscaler was asked for, in order."""
        return [json.loads(line) for line in self.watch.log.read_text().splitlines()]

    def scale(self, *targets: dict[str, Any]) -> list[Any]:
        """Run the flow once for each target, in one process; the runs."""
        deployment = {"deployment": tiny_app.NAME}
        calls = [{"spec": SPEC, "target": deployment | target} for target in targets]
        return [self.flows.run(one["run"]) for one in self.flows.call("scale-up", *calls)]


def application(name: str, *, external: bool, **args: Any) -> dict[str, Any]:
    """One with variables of its own, which Serve merges into those of a deployment once it is listed."""
    return {
        "name": name,
        "route_prefix": f"/{name}",
        "import_path": "tests.real.tiny_app:build",
        "args": {"live": BUCKET, "resources": {"slot": 1}, **args},
        "runtime_env": {"env_vars": {"OF_THE_APPLICATION": name}},
        "external_scaler_enabled": external,
    }


@pytest.fixture(scope="module")
def served(prefect: Prefect, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve with its applications, once for all tests; the hosts that joined leave with them."""
    prefect.around.wipe()
    flows = Flows(prefect, tmp_path_factory.mktemp("scale-up"))
    cluster, known = flows.world.cluster, list(flows.world.cluster.hosts)
    host = cluster.add_host(HostSpec(num_cpus=0, resources={"slot": 3}))
    size = flows.publish(BUCKET, "weights")
    watch = flows.world.head.popen(
        [sys.executable, "-c", _WATCH.format(address=cluster.address)], name="watch"
    )
    found = Served(flows, host, watch, size)
    try:
        apps = [
            application("outside", external=True),
            application("listed", external=False),
            application("rolls", external=False, env={"OF_THE_DEPLOYMENT": "1"}, resources={}),
        ]
        config = {"proxy_location": "Disabled", "applications": apps}
        ask(cluster.dashboard_url, "PUT", config)
        wait_until(found.running, 120, "all applications run")
        wait_until(lambda: found.requests == [[]], 60, "the requests are watched")
        yield found
    finally:
        ask(cluster.dashboard_url, "DELETE")
        watch.stop()
        for joined in cluster.hosts:
            if joined not in known and joined.running:
                joined.stop()


def ask(dashboard: str, method: str, body: Any = None) -> None:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        dashboard + APPLICATIONS, data, {"Content-Type": "application/json"}, method=method
    )
    urllib.request.urlopen(request, timeout=120).close()


def copies(read: int, size: int) -> int:
    """How many copies were read; the manifest that comes with each is small."""
    return read // size


def test_replicas_come_up_warm_both_ways_and_nothing_else_moves(served: Served) -> None:
    cluster, s3 = served.flows.world.cluster, served.flows.world.s3
    size, since = served.size, len(served.requests)
    outside, listed = served.replicas("outside"), served.replicas("listed")
    assert len(outside) == len(listed) == 1

    more, again, too_many, refused = served.scale(
        {"application": "outside", "replicas": 2},
        {"application": "outside", "replicas": 2},
        {"application": "outside", "replicas": 9, "node_seconds": 4},
        {"application": "rolls", "replicas": 2},
    )
    # By the number alone, where an external scaler is allowed.
    assert more.state[0] == "Completed", more.state
    rows = {row["replica"]: row for row in json.loads(more.artifact("table"))}
    assert set(rows) == set(served.replicas("outside")) > set(outside)
    (new,) = [row for row in rows.values() if row["new"]]
    assert (new["node"], new["state"], new["staged"], new["start"]) == (
        served.host.ip,
        "RUNNING",
        True,
        "HIT",
    )
    assert "1 to 2 replicas" in more.markdowns[-1]
    assert copies(s3.bytes_read(), size) == 1
    assert served.flows.world.ask(served.host, "verify", BUCKET, "--full")["ready"]
    # Again, it does nothing.
    assert again.state[0] == "Completed", again.state
    assert not [row for row in json.loads(again.artifact("table")) if row["new"]]
    assert copies(s3.bytes_read(), size) == 1
    # Where nobody adds nodes the wait ends, and Serve is as it was.
    name, message = too_many.state
    assert name == "Failed"
    assert "no room for 7 more of {'slot': 1" in message
    assert "within 4 s; Serve is as it was" in message
    assert set(served.replicas("outside")) == set(rows)
    # What Serve would do more than it is asked for is refused.
    assert refused.state[0] == "Failed"
    assert "Serve would replace all its replicas; Serve is as it was" in refused.state[1]
    # The whole cluster and what is missing was asked for; the second run had nothing to ask for. All of it is cleared.
    full = [[{"slot": 3}], [], [{"slot": 3}, *[{"slot": 1}] * 7], []]
    wait_until(
        lambda: served.requests[since:] == full, 20, f"{full} was asked for, not {served.requests[since:]}"
    )

    # By the list of deployments, which other applications must survive; and a host joins while it waits.
    before, rolls = served.details, served.replicas("rolls")
    with ThreadPoolExecutor(1) as pool:
        scaling = pool.submit(served.scale, {"application": "listed", "add": 1})
        wait_until(lambda: served.requests[-1] == [{"slot": 3}, {"slot": 1}], 120, "a node is asked for")
        time.sleep(3)  # it waits
        assert not scaling.done()
        joined = cluster.add_host(HostSpec(num_cpus=0, resources={"slot": 1}))
        (run,) = scaling.result()
    assert run.state[0] == "Completed", run.state
    (new,) = [row for row in json.loads(run.artifact("table")) if row["new"]]
    assert (new["node"], new["staged"], new["start"]) == (joined.ip, True, "HIT")
    assert copies(s3.bytes_read(), size) == 2  # the new host's, and no more
    assert "waiting for room for 1 more" in " ".join(line["message"] for line in run.logs)
    now = served.replicas("listed")
    assert set(now) == {*listed, new["replica"]}  # nothing was rolled
    assert set(served.replicas("outside")) == set(rows)  # nor what an external scaler had set, lowered
    assert served.replicas("rolls") == rolls
    config = served.details["listed"]["deployed_app_config"]
    assert config.pop("deployments") == [{"name": tiny_app.NAME, "num_replicas": 2}]
    assert config == before["listed"]["deployed_app_config"]
    assert served.details["outside"]["deployed_app_config"] == before["outside"]["deployed_app_config"]
    wait_until(lambda: served.requests[-1] == [], 20, "the request for nodes is cleared")


def test_a_run_that_is_cancelled_while_it_waits_leaves_no_request_for_nodes(served: Served) -> None:
    before, since = served.replicas("outside"), len(served.requests)
    target = {"application": "outside", "deployment": tiny_app.NAME, "replicas": 9}
    params = json.dumps({"spec": SPEC, "target": target})
    output = served.flows.prefect.cli("deployment", "run", "scale-up/llama-3-8b", "--params", params)
    run = served.flows.run_in(output)
    wait_until(lambda: len(served.requests) == since + 1, 120, "nodes are asked for")
    assert len(served.requests[since]) >= 7
    cancelling = {"state": {"type": "CANCELLING"}}  # as the UI does
    call(served.flows.api, f"/flow_runs/{run.id}/set_state", cancelling)
    wait_until(lambda: served.requests[since + 1 :] == [[]], 60, "the request is cleared")
    run.wait_for("Cancelled")
    assert served.replicas("outside") == before
