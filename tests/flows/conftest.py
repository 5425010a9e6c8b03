"""What the tests of the flow ask Prefect's REST API."""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.real.processes import wait_until
from tests.real.warm import give_database
from tests.real.world import Prefect, World


@dataclass(frozen=True)
class Run:
    """A flow run, as the server knows it."""

    api: str
    id: str

    @property
    def state(self) -> tuple[str, str]:
        """Its state's name and message."""
        state = call(self.api, f"/flow_runs/{self.id}")["state"]
        return state["name"], state["message"] or ""

    @property
    def attempts(self) -> dict[str, int]:
        """How often each task run was tried, by name."""
        return {run["name"]: run["run_count"] for run in self._tasks()}

    def tried(self, expected: dict[str, int]) -> None:
        """Wait until these are its task runs and tries: the server learns of them by events, some time later."""
        wait_until(lambda: self.attempts == expected, 60, f"the task runs are {expected}")

    @property
    def task_states(self) -> dict[str, str]:
        """The state of each task run, by name."""
        return {run["name"]: run["state_name"] for run in self._tasks()}

    @property
    def logs(self) -> list[dict[str, Any]]:
        """What the run logged."""
        found = call(self.api, "/logs/filter", {"logs": {"flow_run_id": {"any_": [self.id]}}})
        return list(found)

    def artifact(self, kind: str) -> Any:
        """The data of the one artifact of that type."""
        return self.described(kind)[0]

    def described(self, kind: str) -> tuple[Any, str]:
        """The data of the one artifact of that type, and its description."""
        (one,) = self._artifacts(kind)
        return one["data"], one["description"]

    @property
    def markdowns(self) -> list[str]:
        """All its pages of Markdown."""
        return [artifact["data"] for artifact in self._artifacts("markdown")]

    def events(self, count: int) -> list[dict[str, Any]]:
        """Our `count` events of this run; they arrive some time after it has ended."""
        found: list[dict[str, Any]] = []

        def arrived() -> bool:
            related = {"id": [f"prefect.flow-run.{self.id}"]}
            asked = {"filter": {"event": {"prefix": ["llm-prefetch."]}, "any_resource": related}}
            found[:] = call(self.api, "/events/filter", asked)["events"]
            return len(found) >= count

        wait_until(arrived, 60, f"{count} events of the run have arrived")
        return found

    @property
    def table(self) -> dict[str, dict[str, Any]]:
        """The table artifact: its rows by node."""
        return {row["node"]: row for row in json.loads(self.artifact("table"))}

    def wait_for(self, *names: str) -> None:
        """Wait until the run or one of its task runs is in one of these states."""
        wait_until(
            lambda: not {self.state[0], *self.task_states.values()}.isdisjoint(names),
            120,
            f"a run is {names}",
        )

    def _artifacts(self, kind: str) -> list[dict[str, Any]]:
        found = call(self.api, "/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [self.id]}}})
        return [artifact for artifact in found if artifact["type"] == kind]

    def _tasks(self) -> list[dict[str, Any]]:
        return list(call(self.api, "/task_runs/filter", {"flow_runs": {"id": {"any_": [self.id]}}}))


@dataclass(frozen=True)
class Flows:
    """The surroundings with empty node stores, and Prefect."""

    prefect: Prefect
    folder: Path

    @property
    def world(self) -> World:
        return self.prefect.around

    @property
    def api(self) -> str:
        return self.prefect.server.api_url

    def run(self, run_id: str) -> Run:
        return Run(self.api, run_id)

    def run_in(self, output: str) -> Run:
        """The run that `prefect deployment run` says it made."""
        found = re.search(r"UUID: ([0-9a-f-]{36})", output)
        assert found, output
        return self.run(found[1])

    def publish(self, bucket: str, name: str, files: int = 1, kilobytes: int = 256) -> int:
        """Bring random files to `s3://bucket/name`, with a manifest; how many bytes."""
        s3 = self.world.s3
        if bucket not in {each["Name"] for each in s3.client.list_buckets()["Buckets"]}:
            s3.create_bucket(bucket)
        folder = self.folder / name
        folder.mkdir()
        for number in range(files):
            (folder / f"part-{number}.bin").write_bytes(os.urandom(kilobytes * 1024))
        self.world.cli(self.world.head, "publish", folder, f"s3://{bucket}/{name}")
        s3.forget()
        return files * kilobytes * 1024

    def bytes_read(self, bucket: str) -> int:
        """Bytes of this bucket's objects that were read since they were published."""
        return sum(request.sent for request in self.world.s3.requests("read") if request.bucket == bucket)

    def direct(self, *specs: dict[str, Any], server: bool = True) -> list[dict[str, Any]]:
        """Run the flow `stage` for each spec in one process on the head, with the server or without any."""
        return self.call("stage", *({"spec": spec} for spec in specs), server=server)

    def call(self, flow: str, *calls: dict[str, Any], server: bool = True) -> list[dict[str, Any]]:
        """Run a flow once for each set of parameters, in one process on the head."""
        argv = [sys.executable, "-m", "tests.flows.driver", flow, json.dumps(calls)]
        home = self.folder / "prefect"
        env = self.prefect.server.env if server else {"PREFECT_HOME": str(home)}
        if not (server or home.exists()):
            give_database(home / "prefect.db")
        done = self.world.head.run(argv, env=env, timeout=240)
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"run"')]
        return [json.loads(line) for line in lines]


def call(api: str, path: str, body: Any = None) -> Any:
    """GET, or POST with a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(api + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def spec(bucket: str, *names: str, **rest: Any) -> dict[str, Any]:
    """A spec of the artifacts of these names."""
    artifacts: Sequence[Any] = [{"name": name, "uri": f"s3://{bucket}/{name}"} for name in names]
    return {"deployment": bucket, "artifacts": artifacts, **rest}


@pytest.fixture
def flows(prefect: Prefect, tmp_path: Path) -> Flows:
    """Empty node stores, and Prefect."""
    prefect.around.wipe()
    return Flows(prefect, tmp_path)
