"""A real Prefect server with its own SQLite database, and process workers for it.

A server takes 15 s to start from a cold disk, so a test session shares one; a worker takes about 5 s.
"""

from __future__ import annotations

import contextlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.real import processes
from tests.real.ports import free_port
from tests.real.processes import MARK, Process, Scratch, wait_until
from tests.real.warm import give_database, keep_database

if TYPE_CHECKING:
    from tests.real.hosts import Host

_REPOSITORY = Path(__file__).parents[2]
_PREFECT = [sys.executable, "-m", "prefect"]


@contextlib.contextmanager
def prefect_server(host: str = "127.0.0.1", deadline: float = 180.0) -> Iterator[PrefectServer]:
    """Run a server with an empty database on a free port of `host`; `cluster.gateway_ip` lets hosts reach it.

    Raises:
        RuntimeError: it did not answer within `deadline` seconds; the message shows its log.
    """
    with processes.scratch("prefect") as area:
        server = PrefectServer(f"http://{host}:{free_port(host)}/api", area)
        database = server.area.path / "home" / "prefect.db"
        migrated = give_database(database)
        port = server.api_url.rpartition(":")[2].partition("/")[0]
        argv = [
            sys.executable,
            "-m",
            "tests.real.prefect_main",
            "server",
            "start",
            "--host",
            host,
            "--port",
            port,
        ]
        with processes.process(
            argv,
            area=area,
            name="server",
            env=server.env,
            ready=server.healthy,
            deadline=deadline,
            cwd=_REPOSITORY,
        ):
            if not migrated:
                keep_database(database)
            yield server


@dataclass(frozen=True)
class PrefectServer:
    """A running server."""

    api_url: str
    area: Scratch

    @property
    def env(self) -> dict[str, str]:
        """What a process needs in its environment to be a client of this server and of no other."""
        return {
            "PREFECT_API_URL": self.api_url,
            "PREFECT_HOME": str(
                self.area.path / "home"
            ),  # the database, profiles, results and nothing of the user's
            "PREFECT_PROFILES_PATH": str(self.area.path / "home" / "profiles.toml"),
            "PREFECT_API_KEY": "",
            "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            "PREFECT_CLI_PROMPT": "false",
            "PREFECT_CLI_COLORS": "false",
        }

    def healthy(self) -> bool:
        """Whether the server answers."""
        try:
            with urllib.request.urlopen(f"{self.api_url}/health", timeout=5) as answer:
                return bool(json.load(answer))
        except OSError:
            return False

    @contextlib.contextmanager
    def worker(
        self,
        pool: str,
        cwd: str | Path = _REPOSITORY,
        env: Mapping[str, str] | None = None,
        host: Host | None = None,
        deadline: float = 180.0,
    ) -> Iterator[Process]:
        """Run a process worker on the pool `pool`, which it makes where there is none, here or on `host`.

        Args:
            pool: the work pool's name.
            cwd: where the worker, and flows with a relative entrypoint, run.
            env: for the worker and for the flow runs it starts.
            host: on which host of a cluster it runs. The server must listen on `cluster.gateway_ip` then.
            deadline: seconds until it must have reported to the server.

        Raises:
            RuntimeError: it ended or did not report in time; the message shows its log.
        """
        online = len(self._online(pool))
        argv = [
            *_PREFECT,
            "worker",
            "start",
            "--pool",
            pool,
            "--type",
            "process",
            "--name",
            f"{pool}-{online}",
        ]
        name = f"worker-{pool}-{online}"
        overlay = {**self.env, **(env or {})}
        if host is None:
            worker = processes.start(argv, area=self.area, name=name, env=overlay, cwd=cwd)
        else:
            worker = host.popen(argv, env={**overlay, MARK: str(self.area.path)}, cwd=cwd, name=name)
        try:
            wait_until(lambda: len(self._online(pool)) > online, deadline, f"{name} reported", watch=worker)
            yield worker
        finally:
            worker.stop()

    def _online(self, pool: str) -> list[str]:
        try:
            workers = self._post(f"/work_pools/{pool}/workers/filter", {})
        except urllib.error.HTTPError as error:
            with error:  # it holds the connection
                if error.code == 404:  # no such pool yet
                    return []
                raise
        return [worker["name"] for worker in workers if worker["status"] == "ONLINE"]

    def _post(self, path: str, body: object) -> list[dict[str, str]]:
        request = urllib.request.Request(
            self.api_url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return list(json.load(answer))
