"""The whole surroundings that the product runs in, as one block: an S3 API, a Ray cluster, a Prefect server and worker.

The demo and the tests of flows and engine use the same, so what the demo shows is what the tests assert.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.real.hosts import Cluster, Host, HostSpec, hosts
from tests.real.prefect_server import PrefectServer, prefect_server
from tests.real.s3 import S3Server, s3_server

POOL = "llm-prefetch"
_CLI = (sys.executable, "-m", "llm_prefetch.cli")
_PREFECT = (sys.executable, "-m", "prefect")


@dataclass(frozen=True)
class World:
    """A Ray cluster with an S3 API that all its hosts, and this process, reach."""

    cluster: Cluster
    s3: S3Server

    @property
    def head(self) -> Host:
        """The host that drivers and workers run on."""
        return self.cluster.head

    def cli(
        self,
        host: Host,
        *argv: str | Path,
        check: bool = True,
        stdin: str | None = None,
        timeout: float = 120.0,
    ) -> tuple[int, str, str]:
        """Run `llm-prefetch` on a host: exit code, stdout, stderr."""
        done = host.run([*_CLI, *argv], check=check, stdin=stdin, timeout=timeout)
        return done.returncode, done.stdout, done.stderr

    def ask(self, host: Host, *argv: str | Path, check: bool = True) -> Any:
        """Run `llm-prefetch ... --json` on a host and read its answer."""
        return json.loads(self.cli(host, *argv, "--json", check=check)[1])

    def ledger(self, host: Host) -> list[dict[str, Any]]:
        """The rows of a host's ledger."""
        path = host.disk / "ledger" / "ledger.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wipe(self) -> None:
        """Empty the node stores, as new hosts have them."""
        self.cluster.wait_alive()  # one that an earlier test has ended may still be a node to Ray
        for host in self.cluster.hosts:
            for entry in host.disk.iterdir():
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


@contextlib.contextmanager
def world(
    n: int = 3, *, spec: HostSpec | None = None, each: Mapping[int, HostSpec] | None = None
) -> Iterator[World]:
    """Start `n` hosts in one Ray cluster, and an S3 API that they are configured for."""
    with contextlib.ExitStack() as stack:
        servers: list[S3Server] = []

        def with_s3(gateway: str) -> Mapping[str, str]:
            servers.append(stack.enter_context(s3_server(gateway)))
            return servers[0].env

        cluster = stack.enter_context(hosts(n, spec=spec, each=each, env=with_s3))
        yield World(cluster, servers[0])


@contextlib.contextmanager
def orchestrated(around: World) -> Iterator[Prefect]:
    """Start a Prefect server, deploy `prefect.yaml` as it is, and run a worker on the head."""
    with prefect_server(around.cluster.gateway_ip) as server:
        prefect = Prefect(server, around)
        prefect.cli("work-pool", "create", POOL, "--type", "process")
        prefect.cli("deploy", "--all")
        with server.worker(POOL, host=around.head):
            yield prefect


@dataclass(frozen=True)
class Prefect:
    """A server with our deployments and a worker on the head of `around`."""

    server: PrefectServer
    around: World

    def cli(self, *argv: str, check: bool = True, timeout: float = 180.0) -> str:
        """Run `prefect` on the head, as a person would; both outputs."""
        done = self.around.head.run(
            [*_PREFECT, "--no-prompt", *argv], env=self.server.env, check=check, timeout=timeout
        )
        return str(done.stdout + done.stderr)

    def run(self, deployment: str, *, params: Mapping[str, Any] | None = None, check: bool = True) -> str:
        """`prefect deployment run` and wait for its end; what it prints."""
        extra: Sequence[str] = ("--params", json.dumps(params)) if params else ()
        return self.cli("deployment", "run", deployment, "--watch", *extra, check=check, timeout=600)
