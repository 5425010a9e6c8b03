"""Ray Serve as its REST API on the dashboard tells of it: one deployment, its replicas, and how to have more of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from llm_prefetch.errors import ClusterError
from llm_prefetch.redact import redact_text
from llm_prefetch.scaling.autoscaler import Shape
from llm_prefetch.scaling.serve_config import config_with

_APPLICATIONS = "/api/serve/applications/"
_REQUEST_SECONDS = 30.0
_PASSING = frozenset({500, 502, 503, 504})
_SHOWN_CHARACTERS = 300
_HINTS = {
    400: "compare the config with `serve config`: this Ray does not take what it has given",
    401: "the cluster wants a token: set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH for the worker",
    403: "the token is not that of the cluster: compare RAY_AUTH_TOKEN with `ray get-auth-token` on its head",
    404: "name an application and a deployment that `serve status` shows",
    412: "it is being deleted, or its application was deployed anew without external_scaler_enabled: run this again",
    501: "install ray[serve] on the head",
}
_UNKNOWN_HINT = "is that Ray's dashboard? See its log, dashboard.log, on the head"


class UnansweredError(ClusterError):
    """Serve could not be asked, or has not said whether it did what it was asked for; that may pass."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica. `name` is that of its actor, by which it signs in the ledger; `node` is empty until it has one."""

    id: str
    name: str
    state: str
    node: str
    address: str

    @property
    def running(self) -> bool:
        """Whether it takes requests."""
        return self.state == "RUNNING"


@dataclass(frozen=True, slots=True)
class Served:
    """A deployment as Serve has it. `shapes` is what one replica takes, `target` how many Serve is asked for."""

    target: int
    replicas: tuple[Replica, ...]
    shapes: tuple[Shape, ...]
    healthy: bool = True
    """Whether Serve has no more to do about it."""
    failure: str = ""
    """Why Serve has given up; what it still tries is not a failure."""
    message: str = ""
    """What Serve says about its trouble."""

    @property
    def placed(self) -> int:
        """Replicas that have their place on a node, running or not."""
        return sum(bool(replica.node) and replica.state != "STOPPING" for replica in self.replicas)


class ServeDeployment:
    """One deployment of the Serve at `dashboard`."""

    def __init__(
        self, dashboard: str, application: str, deployment: str, *, headers: Mapping[str, str] | None = None
    ) -> None:
        """Nothing is asked yet."""
        self._dashboard = dashboard.rstrip("/")
        self._application, self._deployment = application, deployment
        self._headers = dict(headers or {})

    def read(self) -> Served:
        """The deployment as it is.

        Raises:
            UnansweredError: the dashboard does not answer.
            ClusterError: there is no such deployment, or it cannot be scaled from outside.
        """
        details = self._details()
        self._request_for(details, replicas=1)  # what would be refused is refused before anything is done
        app, served = self._find(details)
        config = served.get("deployment_config") or {}
        status, app_status = served.get("status", ""), app.get("status", "")
        replicas = tuple(
            Replica(
                str(found["replica_id"]),
                str(found.get("actor_name") or ""),
                str(found["state"]),
                str(found.get("node_id") or ""),
                str(found.get("node_ip") or ""),
            )
            for found in served.get("replicas", ())
        )
        message = " ".join(filter(None, (served.get("message", ""), app.get("message", ""))))
        return Served(
            target=int(served["target_num_replicas"]),
            replicas=replicas,
            shapes=_shapes(config, served.get("required_resources") or {}),
            healthy=status == "HEALTHY",
            failure=_short(message) or "it says no more" if "DEPLOY_FAILED" in (status, app_status) else "",
            message=_short(message),
        )

    def scale(self, replicas: int) -> None:
        """Ask for so many replicas; they start after this has returned.

        Raises:
            UnansweredError: it is not known whether Serve was asked.
            ClusterError: Serve refuses.
        """
        method, path, body = self._request_for(self._details(), replicas)
        try:
            self._ask(method, path, body)
        except UnansweredError:
            if self.read().target != replicas:
                raise

    def _request_for(self, details: dict[str, Any], replicas: int) -> tuple[str, str, dict[str, Any]]:
        """The request that asks for so many replicas: for this one deployment, or the config with one number changed."""
        app, served = self._find(details)
        if (served.get("deployment_config") or {}).get("autoscaling_config"):
            raise ClusterError(
                "Serve's own autoscaler decides how many replicas this deployment has, and would undo the scaling",
                where=self._where,
                hint="set its num_replicas to a number (for Ray Serve LLM in deployment_config), "
                "or raise min_replicas of its autoscaling_config instead",
            )
        if app.get("external_scaler_enabled"):
            parts = (quote(part, safe="") for part in (self._application, self._deployment))
            path = "/api/v1/applications/{}/deployments/{}/scale".format(*parts)
            return "POST", path, {"target_num_replicas": replicas}
        return "PUT", _APPLICATIONS, config_with(details, self._application, self._deployment, replicas)

    def _find(self, details: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        applications = details["applications"]
        app = applications.get(self._application)
        if app is None:
            raise ClusterError(
                f"Serve runs no application {self._application!r}; it runs {_names(applications)}",
                where=self._dashboard,
                hint=_HINTS[404],
            )
        served = app.get("deployments", {}).get(self._deployment)
        if app.get("status") == "DELETING" or (served or {}).get("status_trigger") == "DELETING":
            raise ClusterError(
                "Serve is deleting it", where=self._where, hint="deploy it again, then scale it"
            )
        if served is None:
            raise ClusterError(
                f"the application has no deployment {self._deployment!r}; it has {_names(app.get('deployments', {}))}",
                where=self._application,
                hint=_HINTS[404],
            )
        return app, served

    def _details(self) -> dict[str, Any]:
        answer = self._ask("GET", _APPLICATIONS)
        try:
            details = answer.json()
            details["applications"].items()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ClusterError(
                f"that is not what Serve's API says: {_short(answer.text)!r}",
                where=self._dashboard,
                hint=_UNKNOWN_HINT,
            ) from error
        return dict(details)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        where = f"{method} {self._dashboard}{path}"
        try:
            answer = httpx.request(
                method, self._dashboard + path, json=body, headers=self._headers, timeout=_REQUEST_SECONDS
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnansweredError(
                f"Ray's dashboard does not answer: {type(error).__name__} {error}".strip(),
                where=where,
                hint="is it up, and reachable from here? Name it in the target's dashboard or RAY_DASHBOARD_ADDRESS",
            ) from error
        if answer.is_success:
            return answer
        said = f"Serve answered {answer.status_code}: {_short(answer.text)}"
        if answer.status_code in _PASSING:
            raise UnansweredError(
                said, where=where, hint="is Serve's controller up? See `serve status`; then run this again"
            )
        raise ClusterError(said, where=where, hint=_HINTS.get(answer.status_code, _UNKNOWN_HINT))

    @property
    def _where(self) -> str:
        return f"{self._application}/{self._deployment}"


def token_headers(environment: Mapping[str, str]) -> dict[str, str]:
    """Ray's token as its own clients find it: in a variable, in a file, in the home; none where that is switched off."""
    mode = environment.get("RAY_AUTH_MODE", "token")
    if mode.lower() != "token":
        return {}
    token = environment.get("RAY_AUTH_TOKEN", "").strip()
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or os.path.expanduser("~/.ray/auth_token"))  # noqa: PTH111
    try:
        token = token or path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return {}
    return {"Authorization": f"Bearer {token}"} if token else {}


def _shapes(config: Mapping[str, Any], resources: Shape) -> tuple[Shape, ...]:
    """What one replica takes: its placement group where it has one, which then holds its actor too."""
    bundles = config.get("placement_group_bundles") or [resources]
    if config.get("placement_group_strategy") == "STRICT_PACK":  # all of it on one node
        names = {name for bundle in bundles for name in bundle}
        bundles = [{name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}]
    shapes = ({name: amount for name, amount in bundle.items() if amount} for bundle in bundles)
    return tuple(shape for shape in shapes if shape)


def _names(found: Mapping[str, Any]) -> str:
    return ", ".join(sorted(found)) or "none"


def _short(text: str) -> str:
    text = redact_text(" ".join(text.split()))
    return text if len(text) <= _SHOWN_CHARACTERS else f"...{text[-_SHOWN_CHARACTERS:]}"
