"""Prefect as its REST API shows it: the server, the credentials, the work pools with their workers, the deployments."""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_prefetch.doctor.deployments import Declared, deployment_findings, read_declared
from llm_prefetch.doctor.findings import Finding
from llm_prefetch.doctor.nodes import clock_finding
from llm_prefetch.errors import PrefetchError
from llm_prefetch.prefect_access import prefect_access, prefect_settings
from llm_prefetch.redact import redact_text

if TYPE_CHECKING:
    import httpx

_REQUEST_SECONDS = 10.0
_PAGE = 200
_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND = 401, 403, 404
_START = "start one with `prefect server start`, or correct the address with `prefect config set PREFECT_API_URL=...`"


def prefect_findings(environment: Mapping[str, str], prefect_file: Path | None) -> list[Finding]:
    """Look at the server that `environment` or the active profile names, against `prefect_file` if there is one."""
    declared: list[Declared] = []
    found: list[Finding] = []
    if prefect_file is not None:
        try:
            declared = read_declared(prefect_file)
        except PrefetchError as error:
            found.append(Finding.of("deployments", error))
    try:
        access = prefect_access(prefect_settings(environment))
    except PrefetchError as error:
        return [*found, Finding.of("prefect server", error)]
    if access is None:
        return [
            *found,
            Finding.skipped(
                "prefect server",
                "PREFECT_API_URL is not set",
                f"to have it looked at, {_START.partition(', or ')[2]}",
            ),
        ]
    import httpx

    with httpx.Client(
        base_url=f"{access.url}/", headers=dict(access.headers), timeout=_REQUEST_SECONDS
    ) as client:
        return found + _Server(client, access.url).findings(declared)


class _Server:
    """One server; what it answers wrongly is a finding, never an exception."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self._client, self._url = client, url

    def findings(self, declared: list[Declared]) -> list[Finding]:
        asked = time.time()
        try:
            health = self._client.get("health")
        except Exception as error:  # noqa: BLE001 (whatever httpx makes of a wrong address or a dead server)
            says = f"{self._url} does not answer: {redact_text(str(error)) or type(error).__name__}"
            return [Finding.failed("prefect server", says, _START)]
        answered = time.time()
        if health.status_code != 200:  # noqa: PLR2004 (HTTP's own number)
            says = f"{self._url}/health answers {health.status_code}"
            mend = (
                "the address ends in /api, as in http://prefect:4200/api"
                if health.status_code == _NOT_FOUND
                else _START
            )
            return [Finding.failed("prefect server", says, mend)]
        try:
            found = [self._version(), self._clock(health, asked, answered)]
            pools = sorted({one.pool for one in declared if one.pool}) or ["llm-prefetch"]
            for pool in pools:
                found += self._pool(pool)
            found += deployment_findings(declared, self._deployments({one.name for one in declared}))
        except _RefusedError as refused:
            return [Finding.ok("prefect server", self._url), refused.finding]
        except Exception as error:  # noqa: BLE001 (an answer that no Prefect gives)
            says = f"{self._url} answers nonsense: {type(error).__name__}"
            return [Finding.failed("prefect server", says, "is that the address of Prefect's API?")]
        return found

    def _version(self) -> Finding:
        """The first question that needs credentials."""
        server = self._ask("GET", "admin/version")
        if not isinstance(server, str):
            raise TypeError(server)
        try:
            here = metadata.version("prefect")
        except metadata.PackageNotFoundError:
            return Finding.ok("prefect server", f"{self._url}, version {server}")
        says = f"{self._url}, version {server}, here {here}"
        if _numbers(here)[:2] > _numbers(server)[:2]:
            mend = "update the server first: a client newer than its server gets refusals"
            return Finding.warning("prefect server", says, mend)
        return Finding.ok("prefect server", says)

    def _clock(self, answer: httpx.Response, asked: float, answered: float) -> Finding:
        stated = answer.headers.get("Date", "")
        if not stated:
            return Finding.skipped("clock of the prefect server", "it does not state the time")
        return clock_finding(
            "the prefect server", parsedate_to_datetime(stated).timestamp(), asked - 1, answered
        )

    def _pool(self, name: str) -> list[Finding]:
        about = f"work pool {name}"
        pool = self._ask("GET", f"work_pools/{name}", missing_ok=True)
        if pool is None:
            return [Finding.failed(about, "missing", f"prefect work-pool create {name} --type process")]
        if pool["is_paused"]:
            return [Finding.failed(about, "paused", f"prefect work-pool resume {name}")]
        workers = self._ask("POST", f"work_pools/{name}/workers/filter", {})
        online = [worker["name"] for worker in workers if worker["status"] == "ONLINE"]
        if not online:
            says = f"no worker is online ({len(workers)} were)" if workers else "no worker"
            mend = f"prefect worker start --pool {name}     on a node of the Ray cluster"
            return [
                Finding.ok(about, f"type {pool['type']}"),
                Finding.failed(f"worker of {name}", says, mend),
            ]
        return [
            Finding.ok(about, f"type {pool['type']}"),
            Finding.ok(f"worker of {name}", f"{len(online)} online: {', '.join(sorted(online)[:3])}"),
        ]

    def _deployments(self, names: set[str]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        flows: dict[str, str] = {}
        while names:
            body = {"deployments": {"name": {"any_": sorted(names)}}, "limit": _PAGE, "offset": len(found)}
            page = self._ask("POST", "deployments/filter", body)
            for deployment in page:
                flow = deployment["flow_id"]
                if flow not in flows:
                    flows[flow] = self._ask("GET", f"flows/{flow}")["name"]
                found.append({**deployment, "flow": flows[flow]})
            if len(page) < _PAGE:
                break
        return found

    def _ask(self, method: str, path: str, body: object = None, *, missing_ok: bool = False) -> Any:  # noqa: ANN401 (JSON)
        answer = self._client.request(method, path, json=body)
        if answer.status_code in (_UNAUTHORIZED, _FORBIDDEN):
            raise _RefusedError(answer.status_code)
        if answer.status_code == _NOT_FOUND and missing_ok:
            return None
        answer.raise_for_status()
        return answer.json()


class _RefusedError(Exception):
    """The server does not accept our credentials, or wants some."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.finding = Finding.failed(
            "prefect credentials",
            f"refused ({status})",
            "set PREFECT_API_AUTH_STRING (a server with basic authentication) or PREFECT_API_KEY (Prefect Cloud); "
            "where both are set the first one counts",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
