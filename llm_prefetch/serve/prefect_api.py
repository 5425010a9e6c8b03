"""The rung `prefect`: let the staging flow make this node ready, over Prefect's REST API and without Prefect.

Replicas that start together cause one run: each joins a run that is in progress, or asks for one with an
idempotency key made of the deployment and of its last run that ended. So a run that failed can be repeated, and fifty
questions at once get one run. What the state of a run says is a hint; the check of the node decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from llm_prefetch.errors import FallbackError
from llm_prefetch.redact import redact_text
from llm_prefetch.serve.ladder import Note
from llm_prefetch.serve.prefect_client import REQUEST_SECONDS, connect

if TYPE_CHECKING:
    import httpx

    from llm_prefetch.serve.options import PrefectOptions

_POLL_SECONDS = (0.5, 5.0)
_BACKOFF_SECONDS = 0.5
_FIRST_TRIES, _TRIES = 3, 6
_SOON = timedelta(minutes=1)
_ACTIVE = ("RUNNING", "PENDING", "SCHEDULED")
_ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
_NOT_FOUND, _TOO_MANY, _SERVER_ERROR = 404, 429, 500
_DETAIL_CHARACTERS = 300
_HINTS = {
    401: "set PREFECT_API_AUTH_STRING (a server with basic authentication) or PREFECT_API_KEY (Prefect Cloud)",
    403: "this user may not run the deployment",
    404: "deploy it first, or mend its name in the Serve YAML",
    409: "the parameters of the deployment do not fit its flow; deploy it again",
}


async def stage_by_prefect(
    deployment: str,
    options: PrefectOptions,
    note: Note,
    ready: Callable[[], bool],
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Join or start a run of `deployment` and watch it until it ends or the node is ready; what happened.

    Raises:
        FallbackError: the server cannot be asked, the run ended otherwise, or it did not make this node ready.
    """
    note.describe = lambda: "asks Prefect"
    run: _Run | None = None
    async with await connect(options, environment) as client:
        api = _Api(client)
        deployment_id = await api.find(deployment)
        while run is None or run.joined:
            # A run that was joined may have chosen its nodes before this one was there: then one that begins now.
            run = await _join_or_start(api, deployment_id, ready, but=run.id if run else "")
            if run is not None:
                run = await _watch(api, run, note, ready)
            if run is None or ready():
                return (
                    f"flow run {run.name} has made the node ready" if run else "the node is ready meanwhile"
                )
            if run.state != "COMPLETED":
                raise FallbackError(
                    f"flow run {run.name} ended {run.state}", where=run.id, hint="see its log in Prefect"
                )
    raise FallbackError(
        f"flow run {run.name} is COMPLETED, but this node is not ready",
        where=run.id,
        hint="does its spec select this node, and do both use one LLM_PREFETCH_ROOT?",
    )


class _PassingError(FallbackError):
    """A trouble that may pass; never raised out of this module without a last try."""


class _NotFoundError(FallbackError):
    """It is not there."""


@dataclass(frozen=True, slots=True)
class _Run:
    id: str
    name: str
    state: str
    joined: bool = True
    """Somebody else has started it."""


async def _join_or_start(api: _Api, deployment_id: str, ready: Callable[[], bool], but: str) -> _Run | None:
    """A run in progress, or one that is asked for now; none when the node is ready by now."""
    for run in await api.active(deployment_id):
        if run.id != but:
            return run
    last = await api.last_ended(deployment_id)
    if ready():  # the last one to ask finds that the others' run has ended
        return None
    key = hashlib.sha256(f"llm-prefetch {deployment_id} after {last}".encode()).hexdigest()
    return replace(await api.start(deployment_id, key), joined=False)


async def _watch(api: _Api, run: _Run, note: Note, ready: Callable[[], bool]) -> _Run:
    """Wait until the run ends, or has made this node ready, which may be long before; the run as it is then."""
    wait, longest = _POLL_SECONDS
    how = "joined" if run.joined else "started"
    while run.state not in _ENDED and not ready():
        note.describe = partial(str, f"{how} flow run {run.name}, which is {run.state}")
        await asyncio.sleep(wait)
        wait = min(wait * 1.5, longest)
        run = replace(await api.read(run.id), joined=run.joined)
    return run


class _Api:
    """The few calls of Prefect's REST API that are needed."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._tries = _FIRST_TRIES
        """More once the server has answered: it is there, and perhaps has many replicas at once."""

    async def find(self, deployment: str) -> str:
        """The id of a deployment that is named as flow/deployment, or by its id.

        Raises:
            FallbackError: there is none; an id of something else is called what it is.
        """
        try:
            given = str(uuid.UUID(deployment))
        except ValueError:
            flow, _, name = deployment.partition("/")
            found = await self._ask("GET", f"deployments/name/{quote(flow, safe='')}/{quote(name, safe='')}")
        else:
            try:
                found = await self._ask("GET", f"deployments/{given}")
            except _NotFoundError:
                await self._name_what_it_is(given)
                raise
        return str(self._field(found, "id"))

    async def _name_what_it_is(self, given: str) -> None:
        """People mix up the three ids that Prefect's pages show.

        Raises:
            FallbackError: it is the id of a flow or of a flow run.
        """
        for kind, path in (("flow", "flows"), ("flow run", "flow_runs")):
            with contextlib.suppress(_NotFoundError):
                found = await self._ask("GET", f"{path}/{given}")
                raise FallbackError(
                    f"{given} is the id of the {kind} {self._field(found, 'name')}, not of a deployment",
                    where=self._where(path),
                    hint="write flow/deployment, or the id that is on the page of the deployment",
                )

    async def active(self, deployment_id: str) -> list[_Run]:
        """Runs in progress, and those that are about to begin; a schedule makes others days ahead."""
        by_state = {"state": {"type": {"any_": _ACTIVE}}}
        found = await self._runs(deployment_id, by_state, "EXPECTED_START_TIME_ASC", limit=50)
        soon = datetime.now(UTC) + _SOON
        return [self._run(run) for run in found if run.get("state_type") != "SCHEDULED" or _due(run, soon)]

    async def last_ended(self, deployment_id: str) -> str:
        """The id of the run that ended last, or an empty text."""
        by_end = {"state": {"type": {"any_": _ENDED}}, "end_time": {"is_null_": False}}
        found = await self._runs(deployment_id, by_end, "END_TIME_DESC", limit=1)
        return str(self._field(found[0], "id")) if found else ""

    async def start(self, deployment_id: str, idempotency_key: str) -> _Run:
        """A new run, or the one that this key has made already."""
        body = {"idempotency_key": idempotency_key, "tags": ["llm-prefetch"]}
        return self._run(await self._ask("POST", f"deployments/{deployment_id}/create_flow_run", body))

    async def read(self, run_id: str) -> _Run:
        """A run as it is now."""
        return self._run(await self._ask("GET", f"flow_runs/{run_id}"))

    async def _runs(
        self, deployment_id: str, which: dict[str, Any], sort: str, limit: int
    ) -> list[dict[str, Any]]:
        body = {
            "deployments": {"id": {"any_": [deployment_id]}},
            "flow_runs": which,
            "sort": sort,
            "limit": limit,
        }
        found = await self._ask("POST", "flow_runs/filter", body)
        if not isinstance(found, list) or not all(isinstance(run, dict) for run in found):
            raise self._nonsense("flow_runs/filter", found)
        return found

    async def _ask(self, method: str, path: str, body: object = None) -> Any:  # noqa: ANN401 (JSON)
        """The answer; what may pass, such as a server that is restarted, is tried again."""
        tried = 0
        while True:
            try:
                answer = await self._ask_once(method, path, body)
            except _PassingError:
                tried += 1
                if tried >= self._tries:
                    raise
            else:
                self._tries = _TRIES
                return answer
            # Not all of fifty replicas again at the same moment: SQLite takes one writer at a time.
            await asyncio.sleep(_BACKOFF_SECONDS * 2 ** (tried - 1) * random.uniform(0.5, 1.5))  # noqa: S311

    async def _ask_once(self, method: str, path: str, body: object) -> Any:  # noqa: ANN401 (JSON)
        import httpx

        try:
            async with asyncio.timeout(
                REQUEST_SECONDS
            ):  # httpx would wait so long for each piece of an answer
                answer = await self._client.request(method, path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise self._unavailable(
                f"{type(error).__name__} {redact_text(str(error))}".strip(), path
            ) from error
        if answer.status_code >= _SERVER_ERROR or answer.status_code == _TOO_MANY:
            raise self._unavailable(f"it answered {answer.status_code}", path)
        if not answer.is_success:
            kind = _NotFoundError if answer.status_code == _NOT_FOUND else FallbackError
            raise kind(
                f"Prefect answered {answer.status_code}{_detail(answer)}",
                where=self._where(path),
                hint=_HINTS.get(answer.status_code, "is that the address of its API? It ends in /api"),
            )
        try:
            return answer.json()
        except ValueError as error:
            raise self._nonsense(path, answer.text) from error

    def _run(self, found: object) -> _Run:
        run_id, name, state = (str(self._field(found, field)) for field in ("id", "name", "state_type"))
        return _Run(run_id, name, state)

    def _field(self, found: object, name: str) -> object:
        if not isinstance(found, dict) or not isinstance(found.get(name), str):
            raise self._nonsense(name, found)
        return found[name]

    def _nonsense(self, path: str, found: object) -> FallbackError:
        return FallbackError(
            f"Prefect's API does not speak so: {' '.join(str(found).split())[:80]!r}",
            where=self._where(path),
            hint="is that the address of its API? It ends in /api",
        )

    def _unavailable(self, what: str, path: str) -> _PassingError:
        return _PassingError(
            f"Prefect cannot be asked: {what}", where=self._where(path), hint="is the server up?"
        )

    def _where(self, path: str) -> str:
        return str(self._client.base_url.join(path))


def _due(run: dict[str, Any], soon: datetime) -> bool:
    try:
        return datetime.fromisoformat(str(run.get("expected_start_time"))) <= soon
    except (ValueError, TypeError):
        return False


def _detail(answer: httpx.Response) -> str:
    """What the server says about it, if it says something in JSON."""
    try:
        detail = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        return ""
    return f": {str(detail)[:_DETAIL_CHARACTERS]}"
