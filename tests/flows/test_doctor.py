"""`llm-prefetch doctor` on the head of a real cluster, against a real Prefect server and worker."""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

import pytest

from tests.flows.conftest import Flows, call

pytestmark = [pytest.mark.prefect, pytest.mark.ray]


def patch(api: str, path: str, body: Any) -> None:
    data = json.dumps(body).encode()
    request = urllib.request.Request(api + path, data, {"Content-Type": "application/json"}, method="PATCH")
    urllib.request.urlopen(request, timeout=30).close()


def doctor(flows: Flows, *argv: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code, and the findings by what they are about."""
    host = flows.world.head
    command = [sys.executable, "-m", "llm_prefetch.cli", "doctor", "--json", *argv]
    done = host.run(command, env=flows.prefect.server.env, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, {one["about"]: one for one in json.loads(done.stdout)["findings"]}


def test_healthy_surroundings_are_healthy_and_every_trouble_has_its_line(flows: Flows) -> None:
    code, found = doctor(flows)
    assert {about: one for about, one in found.items() if one["outcome"] == "failed"} == {}
    assert code == 0
    hosts = [host for host in flows.world.cluster.hosts if host.running]
    assert found["ray"]["says"] == f"{len(hosts)} nodes"
    for host in hosts:
        assert found[f"clock of {host.ip}"]["outcome"] == "ok"
        assert host.env()["LLM_PREFETCH_ROOT"] in found[f"store on {host.ip}"]["says"]
    assert found["worker of llm-prefetch"]["says"].startswith("1 online")
    assert found["deployment stage/tiny-llama"]["outcome"] == "ok"

    deployment = call(flows.api, "/deployments/name/stage/tiny-llama")
    patch(flows.api, "/work_pools/llm-prefetch", {"is_paused": True})
    patch(flows.api, f"/deployments/{deployment['id']}", {"description": "mine", "paused": False})
    broken = hosts[-1]
    (broken.disk / "LAYOUT").write_text("99\n")
    try:
        code, found = doctor(flows)
    finally:
        patch(flows.api, "/work_pools/llm-prefetch", {"is_paused": False})
        patch(flows.api, f"/deployments/{deployment['id']}", {"description": deployment["description"]})
        (broken.disk / "LAYOUT").unlink()
    assert code == 1
    assert found["work pool llm-prefetch"]["mend"] == "prefect work-pool resume llm-prefetch"
    assert found["deployment stage/tiny-llama"]["says"] == "stale: description differ from prefect.yaml"
    assert "layout '99'" in found[f"store on {broken.ip}"]["says"]
    assert found[f"store on {hosts[0].ip}"]["outcome"] != "failed"
