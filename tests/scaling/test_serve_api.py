"""What is read from Serve's REST API, what is asked of it, and what becomes of each answer that is no success."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from llm_prefetch.errors import ClusterError
from llm_prefetch.scaling.serve_api import ServeDeployment, UnansweredError, token_headers

APP, DEPLOYMENT = "llm", "LLMServer:llama/3"
SCALE = "/api/v1/applications/llm/deployments/LLMServer%3Allama%2F3/scale"
APPLICATIONS = "/api/serve/applications/"


def served(replicas: int = 1, **config: Any) -> dict[str, Any]:
    """A deployment as Serve tells of it."""
    one = {"node_id": "n1", "node_ip": "10.0.0.1", "state": "RUNNING"}
    return {
        "name": DEPLOYMENT,
        "status": "HEALTHY",
        "status_trigger": "CONFIG_UPDATE_COMPLETED",
        "message": "",
        "deployment_config": {"name": DEPLOYMENT, "num_replicas": replicas, **config},
        "target_num_replicas": replicas,
        "required_resources": {"GPU": 1, "CPU": 0},
        "replicas": [
            {**one, "replica_id": f"r{n}", "actor_name": f"SERVE_REPLICA::llm#{DEPLOYMENT}#r{n}"}
            for n in range(replicas)
        ],
    }


def details(*, external: bool = False, **more: Any) -> dict[str, Any]:
    """What GET answers: two applications by config and one from Python."""
    args = {"llm_configs": [{"deployment_config": {"num_replicas": 1}, "odd": [1.5e-7, None, "ü"]}]}
    return {
        "proxy_location": "Disabled",
        "http_options": {"port": 9001},
        "grpc_options": {"port": 9000},
        "target_capacity": None,
        "controller_info": {"node_id": "x"},
        "applications": {
            APP: {
                "status": "RUNNING",
                "message": "",
                "source": "declarative",
                "external_scaler_enabled": external,
                "deployed_app_config": {"name": APP, "import_path": "a:b", "args": args},
                "deployments": {DEPLOYMENT: served(), "Ingress": served()},
            },
            "other": {
                "status": "RUNNING",
                "source": "declarative",
                "deployed_app_config": {
                    "name": "other",
                    "runtime_env": {"env_vars": {"A": "1"}},
                    "deployments": [{"name": "D", "num_replicas": 7}],
                },
                "deployments": {},
            },
            "script": {"status": "RUNNING", "source": "imperative", "deployed_app_config": None},
        },
        **more,
    }


class Dashboard:
    """Answers with `details`, and to what changes something with `status` and `text`; remembers all of it."""

    def __init__(self) -> None:
        self.details: Any = details()
        self.status, self.text, self.url = 200, "", ""
        self.asked: list[tuple[str, str, Any]] = []
        self.headers: list[str | None] = []
        self.obeys = False
        """Whether a scaling takes effect, whatever is answered."""

    @property
    def changes(self) -> list[tuple[str, str, Any]]:
        return [asked for asked in self.asked if asked[0] != "GET"]

    def answer(self, method: str, path: str, body: Any) -> tuple[int, str]:
        self.asked.append((method, path, body))
        if method == "GET":
            text = self.details if isinstance(self.details, str) else json.dumps(self.details)
            return (200, text) if self.status not in (401, 403) else (self.status, self.text)
        if self.obeys:
            self.details["applications"][APP]["deployments"][DEPLOYMENT]["target_num_replicas"] = 3
        return self.status, self.text


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    stand_in = Dashboard()

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            stand_in.headers.append(self.headers.get("Authorization"))
            status, text = stand_in.answer(self.command, self.path, body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PUT = do_POST = handle_any  # noqa: N815 (http.server's names)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        stand_in.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield stand_in
        server.shutdown()
        thread.join()


def serve(dashboard: Any, application: str = APP, deployment: str = DEPLOYMENT) -> ServeDeployment:
    return ServeDeployment(
        dashboard.url + "/", application, deployment, headers={"Authorization": "Bearer t"}
    )


def test_a_deployment_is_read_with_its_replicas_and_what_one_of_them_takes(dashboard: Any) -> None:
    found = serve(dashboard).read()
    assert (found.target, found.placed, found.healthy, found.failure) == (1, 1, True, "")
    (replica,) = found.replicas
    assert (replica.id, replica.node, replica.address, replica.running) == ("r0", "n1", "10.0.0.1", True)
    assert replica.name == f"SERVE_REPLICA::llm#{DEPLOYMENT}#r0"
    assert found.shapes == ({"GPU": 1},)
    assert dashboard.asked == [("GET", APPLICATIONS, None)]
    assert dashboard.headers == ["Bearer t"]


@pytest.mark.parametrize(
    ("strategy", "shapes"),
    [("PACK", ({"GPU": 1, "CPU": 1}, {"GPU": 1})), ("STRICT_PACK", ({"GPU": 2, "CPU": 1},))],
)
def test_a_replica_with_a_placement_group_takes_its_bundles(
    dashboard: Any, strategy: str, shapes: Any
) -> None:
    bundles = [{"GPU": 1, "CPU": 1}, {"GPU": 1, "CPU": 0}]
    config = {"placement_group_bundles": bundles, "placement_group_strategy": strategy}
    dashboard.details["applications"][APP]["deployments"][DEPLOYMENT] = served(**config)
    assert serve(dashboard).read().shapes == shapes


def test_replicas_without_a_node_and_those_that_stop_have_no_place(dashboard: Any) -> None:
    found = served(3)
    found["replicas"][0]["node_id"] = None
    found["replicas"][1]["state"] = "STOPPING"
    dashboard.details["applications"][APP]["deployments"][DEPLOYMENT] = found
    assert serve(dashboard).read().placed == 1


def test_an_external_scaler_asks_for_the_number_alone(dashboard: Any) -> None:
    dashboard.details = details(external=True)
    serve(dashboard).scale(3)
    assert dashboard.changes == [("POST", SCALE, {"target_num_replicas": 3})]


@pytest.mark.parametrize("listed", [None, [{"name": "Ingress", "num_replicas": 2}, {"name": DEPLOYMENT}]])
def test_otherwise_one_number_of_the_config_changes_and_nothing_else(dashboard: Any, listed: Any) -> None:
    if listed is not None:
        dashboard.details["applications"][APP]["deployed_app_config"]["deployments"] = listed
    before = copy.deepcopy(dashboard.details)
    serve(dashboard).scale(3)
    ((method, path, config),) = dashboard.changes
    assert (method, path) == ("PUT", APPLICATIONS)
    assert set(config) == {"proxy_location", "http_options", "grpc_options", "applications"}
    assert all(config[name] == before[name] for name in ("proxy_location", "http_options", "grpc_options"))
    own, other = config["applications"]
    applications = before["applications"]
    assert other == applications["other"]["deployed_app_config"]
    expected = applications[APP]["deployed_app_config"]
    deployments = own.pop("deployments")
    assert own == {name: value for name, value in expected.items() if name != "deployments"}
    assert deployments == [*(listed or [])[:1], {"name": DEPLOYMENT, "num_replicas": 3}]


def spoil(place: str, value: Any) -> Any:
    """Change the details at a dotted place below the application, or at the top."""

    def change(found: dict[str, Any]) -> None:
        target: Any = found if place.startswith("target_") else found["applications"][APP]
        *way, last = place.split(".")
        for step in way:
            target = target[DEPLOYMENT if step == "it" else step]
        target[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "said", "hint"),
    [
        (spoil("target_capacity", 50.0), "target_capacity of 50 %", "external_scaler_enabled"),
        (spoil("source", "imperative"), "deployed from Python", "serve.run"),
        (spoil("deployed_app_config", None), "does not tell the config", "deploy it again"),
        (
            spoil("deployed_app_config.runtime_env", {"env_vars": {"KEY": "<redacted>"}}),
            "hides values",
            "not by a proxy",
        ),
        (
            spoil("deployments.it.deployment_config.autoscaling_config", {"min_replicas": 1}),
            "own autoscaler decides",
            "num_replicas",
        ),
        (
            spoil("deployments.it.deployment_config.ray_actor_options", {"runtime_env": {"pip": ["x"]}}),
            "would replace all its replicas",
            "external_scaler_enabled",
        ),
        (spoil("deployments.it.status_trigger", "DELETING"), "deleting it", "deploy it again"),
        (spoil("status", "DELETING"), "deleting it", "deploy it again"),
    ],
)
def test_what_would_do_harm_is_refused_before_anything_is_done(
    dashboard: Any, change: Any, said: str, hint: str
) -> None:
    change(dashboard.details)
    for act in (serve(dashboard).read, lambda: serve(dashboard).scale(3)):
        with pytest.raises(ClusterError, match=said) as raised:
            act()
        assert hint in raised.value.hint
    assert dashboard.changes == []


def test_the_runtime_env_of_the_application_does_no_harm_where_the_deployment_has_it_already(
    dashboard: Any,
) -> None:
    app = dashboard.details["applications"][APP]
    app["deployed_app_config"]["runtime_env"] = {"env_vars": {"A": "1"}}
    both = {"env_vars": {"A": "1", "B": "2"}}
    app["deployments"][DEPLOYMENT]["deployment_config"]["ray_actor_options"] = {"runtime_env": both}
    serve(dashboard).scale(3)
    assert len(dashboard.changes) == 1
    both["env_vars"].pop("A")
    with pytest.raises(ClusterError, match="would replace all its replicas"):
        serve(dashboard).scale(4)


def test_an_application_or_deployment_that_is_not_there_is_told_with_those_that_are(dashboard: Any) -> None:
    with pytest.raises(ClusterError, match="no application 'lm'; it runs llm, other, script"):
        serve(dashboard, application="lm").read()
    with pytest.raises(ClusterError, match=r"no deployment 'LLMServer'; it has Ingress, LLMServer:llama/3"):
        serve(dashboard, deployment="LLMServer").read()


@pytest.mark.parametrize(
    ("status", "hint"),
    [
        (400, "serve config"),
        (401, "RAY_AUTH_TOKEN"),
        (403, "ray get-auth-token"),
        (404, "serve status"),
        (412, "external_scaler_enabled"),
        (418, "Ray's dashboard"),
    ],
)
def test_a_refusal_is_an_error_with_its_remedy(dashboard: Any, status: int, hint: str) -> None:
    dashboard.details = details(external=True)
    dashboard.status, dashboard.text = status, '{"error": "because   of that"}'
    with pytest.raises(ClusterError, match=f"{status}.*because of that") as raised:
        serve(dashboard).scale(3)
    assert not isinstance(raised.value, UnansweredError)
    assert hint in raised.value.hint


@pytest.mark.parametrize("status", [500, 503])
def test_an_unclear_answer_is_settled_by_what_serve_is_asked_for_then(dashboard: Any, status: int) -> None:
    dashboard.details = details(external=True)
    dashboard.status, dashboard.text = status, "Internal Server Error"
    with pytest.raises(UnansweredError, match=str(status)) as raised:
        serve(dashboard).scale(3)
    assert "serve status" in raised.value.hint
    dashboard.obeys = True
    serve(dashboard).scale(3)


def test_a_dashboard_that_does_not_answer_is_named_without_secrets() -> None:
    with pytest.raises(UnansweredError, match="does not answer") as raised:
        ServeDeployment("http://me:s3cret@127.0.0.1:1", APP, DEPLOYMENT).read()
    assert "127.0.0.1:1" in raised.value.where
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize("nonsense", ["<html>hello</html>", "[]", "{}", '{"applications": 3}'])
def test_what_is_not_serves_api_is_said(dashboard: Any, nonsense: str) -> None:
    dashboard.details = nonsense
    with pytest.raises(ClusterError, match="not what Serve's API says"):
        serve(dashboard).read()


def test_a_cluster_without_serve_runs_no_application(dashboard: Any) -> None:
    dashboard.details = {"controller_info": {}, "proxies": {}, "applications": {}, "target_capacity": None}
    with pytest.raises(ClusterError, match="it runs none"):
        serve(dashboard).read()


def test_a_deployment_that_serve_has_given_up_says_why(dashboard: Any) -> None:
    found = dashboard.details["applications"][APP]["deployments"][DEPLOYMENT]
    found.update(status="DEPLOY_FAILED", message="the constructor raised\nValueError")
    assert serve(dashboard).read().failure == "the constructor raised ValueError"


def test_the_token_is_found_as_rays_own_clients_find_it(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("of-the-file\n")
    home = Path.home() / ".ray"
    assert token_headers({}) == {}
    home.mkdir(parents=True)
    (home / "auth_token").write_text("of-the-home")
    assert token_headers({}) == {"Authorization": "Bearer of-the-home"}
    by_path = {"RAY_AUTH_TOKEN_PATH": str(file)}
    assert token_headers(by_path) == {"Authorization": "Bearer of-the-file"}
    assert token_headers({**by_path, "RAY_AUTH_TOKEN": "set"}) == {"Authorization": "Bearer set"}
    assert token_headers({"RAY_AUTH_TOKEN": "set", "RAY_AUTH_MODE": "disabled"}) == {}
