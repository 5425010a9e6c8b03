"""The how-to for newcomers: every command of it is run, from an empty Prefect server on."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.flows.conftest import Run, call
from tests.real.prefect_server import prefect_server
from tests.real.processes import wait_until
from tests.real.world import World

pytestmark = [pytest.mark.prefect, pytest.mark.ray, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "from-empty-server-to-warm-scale-up.md"
MODEL = "my-llama"


def commands(page: Path) -> Iterator[str]:
    """The commands of its console blocks, with the lines that belong to each: here documents."""
    for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
        for command in re.split(r"(?m)^\$ ", block)[1:]:
            yield command.rstrip("\n")


def script(page: Path, settings: dict[str, str]) -> str:
    """What a person types, one after the other until one fails; the page's `export`s get the values of `settings`."""
    lines, left = ["set -euo pipefail", "trap 'kill -KILL $(jobs -p)' EXIT"], dict(settings)
    for command in commands(page):
        lines.append(f"echo {shlex.quote('$ ' + command)}")
        name = re.match(r"export (\w+)=", command)
        lines.append(f"export {name[1]}={shlex.quote(left.pop(name[1]))}" if name else command)
    assert left == {}, "the page exports no such variable"
    assert len(lines) > 40
    return "\n".join([*lines, "echo all is done", "wait"])


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What a newcomer has cloned, to be changed; with the model's files."""
    shutil.copytree(ROOT / "deployments", tmp_path / "deployments")
    (tmp_path / "prefect.yaml").symlink_to("deployments/prefect.yaml")
    (tmp_path / "model").mkdir()
    for number in range(3):
        (tmp_path / "model" / f"part-{number}.bin").write_bytes(os.urandom(256 * 1024))
    return tmp_path


def test_every_command_works_from_an_empty_server_to_a_warm_scale_up(
    surroundings: World, checkout: Path
) -> None:
    surroundings.wipe()
    surroundings.s3.forget()
    surroundings.s3.create_bucket("how-to")
    cluster, head = surroundings.cluster, surroundings.head
    app: dict[str, Any] = {
        "name": "llm",
        "import_path": "tests.flows.how_to_app:build",
        "route_prefix": "/llm",
    }
    app |= {"external_scaler_enabled": True, "args": {"live": MODEL, "resources": {"fast_disk": 1}}}
    served = checkout / "serve.yaml"
    served.write_text(yaml.safe_dump({"proxy_location": "Disabled", "applications": [app]}))
    with prefect_server(cluster.gateway_ip) as server:
        settings = {
            "PREFECT_API_URL": server.api_url,
            "RAY_DASHBOARD_ADDRESS": cluster.dashboard_url,
            "MODEL": MODEL,
            "FILES": str(checkout / "model"),
            "ORIGIN": f"s3://how-to/{MODEL}",
            "SERVE_YAML": str(served),
        }
        (checkout / "typed.sh").write_text(script(PAGE, settings))
        env = {**server.env, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        person = head.popen(["bash", "typed.sh"], env=env, cwd=checkout, name="person")
        try:
            wait_until(
                lambda: "\nall is done\n" in person.log.read_text(),
                500,
                "all commands end well",
                watch=person,
            )
            # What the events asked for is done in the background.
            for flow, times in {"stage": 1, "verify": 1, "scale-up": 2, "reconcile": 1, "collect": 1}.items():
                wait_for(server.api_url, flow, times)
        finally:
            head.run(["serve", "shutdown", "--yes", "--address", cluster.dashboard_url], env=env)
            person.stop()

        schedules = call(server.api_url, f"/deployments/name/stage/{MODEL}")["schedules"]
        assert [(each["slug"], each["active"]) for each in schedules] == [("before-the-day", True)]
        scaled = runs(server.api_url, "scale-up")
        new = [row for run in scaled for row in json.loads(run.artifact("table")) if row["new"]]
        assert [(row["staged"], row["start"]) for row in new] == [(True, "HIT")]
    for host in (host for host in cluster.hosts if host.running):
        assert surroundings.ask(host, "verify", MODEL, "--full")["ready"]
    assert surroundings.s3.bytes_read() < 4 * 3 * 256 * 1024  # a copy for each node, and manifests


def wait_for(api: str, flow: str, times: int) -> None:
    """Until so many runs of the flow are Completed; the first that ends otherwise is shown."""

    def ended() -> bool:
        states = [run.state for run in runs(api, flow)]
        bad = [state for state in states if state[0] in ("Failed", "Crashed", "Cancelled")]
        assert not bad, f"{flow}: {bad}"
        return [name for name, _ in states].count("Completed") >= times

    wait_until(ended, 150, f"{times} runs of {flow} have ended well")


def runs(api: str, flow: str) -> list[Run]:
    """All of this flow."""
    found = call(api, "/flow_runs/filter", {"flows": {"name": {"any_": [flow]}}})
    return [Run(api, run["id"]) for run in found]
