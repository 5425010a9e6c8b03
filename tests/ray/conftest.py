"""What the tests of the cluster do all the time."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.real.hosts import Host
from tests.real.processes import wait_until
from tests.real.s3 import Request
from tests.real.world import World


@dataclass(frozen=True)
class Staging:
    """The surroundings with empty node stores, a bucket of the test's own, and the commands that it needs."""

    world: World
    bucket: str
    folder: Path

    @property
    def hosts(self) -> list[Host]:
        """The hosts that every test has; one may add others, and lose them."""
        return self.world.cluster.hosts[:3]

    def spec(self, *names: str, deployment: str = "", **rest: Any) -> dict[str, Any]:
        """A spec of the artifacts of these names, each at the prefix of the same name."""
        artifacts = [{"name": name, "uri": f"s3://{self.bucket}/{name}"} for name in names]
        return {"deployment": deployment or self.bucket, "artifacts": artifacts, **rest}

    def put(self, name: str, files: int = 4, kilobytes: int = 256, *, publish: bool = True) -> int:
        """Bring random files to the origin, with their manifest or without; how many bytes."""
        folder = self.folder / name
        folder.mkdir()
        for number in range(files):
            (folder / f"part-{number}.bin").write_bytes(os.urandom(kilobytes * 1024))
            if not publish:
                data = (folder / f"part-{number}.bin").read_bytes()
                self.world.s3.put(self.bucket, f"{name}/part-{number}.bin", data)
        if publish:
            self.world.cli(self.world.head, "publish", folder, f"s3://{self.bucket}/{name}")
        self.world.s3.forget()
        return files * kilobytes * 1024

    def bytes_read(self) -> int:
        """Bytes of this test's objects that were read since the last `forget`; manifests do not count."""
        return sum(request.sent for request in self.reads())

    def reads(self) -> list[Request]:
        """The requests that they were read by."""
        return [r for r in self.world.s3.requests("read") if self._counts(r.bucket, r.key)]

    def _counts(self, bucket: str, key: str) -> bool:
        return bucket == self.bucket and "/.llm-prefetch/" not in key

    def cli(self, command: str, spec: dict[str, Any], *argv: str) -> tuple[int, Any, str]:
        """`llm-prefetch <command> --cluster --json` on the head: exit code, answer, what it says."""
        code, out, err = self.world.cli(
            self.world.head, command, "--cluster", "-", "--json", *argv, stdin=json.dumps(spec), check=False
        )
        assert "Traceback" not in err, err
        return code, json.loads(out), err

    def driver(self, *calls: Sequence[Any]) -> list[Any]:
        """Run calls of the module `driver` on the head."""
        argv = [sys.executable, "-m", "tests.ray.driver", json.dumps(calls)]
        return list(json.loads(self.world.head.run(argv).stdout.splitlines()[-1]))

    def full_checks(self, hosts: Sequence[Host], deployment: str = "") -> set[str]:
        """The versions that lie on `hosts`, each byte proven."""
        found = set[str]()
        for host in hosts:
            answer = self.world.ask(host, "verify", deployment or self.bucket, "--full")
            assert answer["ready"], answer
            found |= {check["version"] for check in answer["checks"]}
        return found

    def chunks_done(self, host: Host) -> int:
        """How many chunks of stagings in progress are entered on a host's disk."""
        journals = [path.read_bytes() for path in host.disk.glob("partial/*/journal")]
        return sum((len(data) - data.find(b"\n") - 1) // 40 for data in journals)

    def wait_for_chunks(self, hosts: Sequence[Host], *, before: Sequence[int] | None = None) -> None:
        """Wait until each of `hosts` is in the middle of a staging: with more chunks than it had `before`."""
        had = list(zip(hosts, before or [0] * len(hosts), strict=True))
        wait_until(
            lambda: all(self.chunks_done(host) > chunks for host, chunks in had),
            90,
            "each host has fetched some chunks",
        )

    def wait_for_no_actor(self) -> None:
        """Wait until none is left."""
        wait_until(lambda: not actors(self.world), 60, "no actor of ours is alive")


def actors(world: World) -> list[str]:
    """The states of our actors that Ray takes to be alive, by the state API."""
    url = f"{world.cluster.dashboard_url}/api/v0/actors?limit=1000"
    with urllib.request.urlopen(url, timeout=30) as answer:
        found = json.load(answer)["data"]["result"]["result"]
    return [
        actor["state"] for actor in found if "NodeStager" in actor["class_name"] and actor["state"] != "DEAD"
    ]


@pytest.fixture
def staging(surroundings: World, tmp_path: Path, request: pytest.FixtureRequest) -> Staging:
    """Empty node stores and a bucket."""
    surroundings.wipe()
    words = request.node.name.replace("_", "-").removeprefix("test-")
    bucket = surroundings.s3.create_bucket(f"ray-{words}"[:60].rstrip("-"))
    return Staging(surroundings, bucket, tmp_path)
