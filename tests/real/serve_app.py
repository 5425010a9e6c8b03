"""Deploy a Serve YAML on a running Ray cluster, as an operator would: through the dashboard's REST API.

Nothing here joins the cluster, so it works the same whether the head runs in this process's network or in a namespace
of its own. There the head must be started with `--dashboard-host 0.0.0.0`, and `dashboard` and `host` name its address.
Logs are read from the session folders below `temp_dirs`: Ray's `--temp-dir`, one for each host that has its own.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

APPLICATIONS = "/api/serve/applications/"
_FAILED = {"DEPLOY_FAILED", "UNHEALTHY"}


class ServeError(RuntimeError):
    """The application did not come up; the message carries Serve's own and the tail of the replica's log."""


@dataclass(frozen=True)
class ServeApp:
    """An application that runs. `seconds` is the time from the PUT to RUNNING, `since` when the PUT was sent."""

    name: str
    base_url: str
    temp_dirs: tuple[Path, ...]
    since: float
    seconds: float

    def replica_log(self) -> str:
        return replica_log(self.temp_dirs, self.name, since=self.since)


@contextmanager
def serve_llm(
    yaml_path: Path,
    *,
    dashboard: str = "http://127.0.0.1:8265",
    host: str = "127.0.0.1",
    temp_dirs: Sequence[Path] = (Path("/tmp/ray"),),
    env: Mapping[str, str] | None = None,
    callback_kwargs: Mapping[str, Any] | None = None,
    deadline: float = 300.0,
) -> Iterator[ServeApp]:
    """Deploy the one application of `yaml_path`, yield it once it is RUNNING, and take it down at the end.

    `env` is added to every LLMConfig's `runtime_env.env_vars` (replica, EngineCore and download tasks see it), and
    `callback_kwargs` to its `callback_config`. Serve itself is shut down at the end: its HTTP options are fixed while
    it runs, and the next test may want others.
    """
    config = load_config(yaml_path, env=env, callback_kwargs=callback_kwargs)
    (application,) = config["applications"]
    name = str(application["name"])
    base_url = f"http://{host}:{config['http_options']['port']}{application['route_prefix'].rstrip('/')}"

    since, began = time.time(), time.monotonic()
    try:
        with _client(dashboard) as client:
            response = client.put(APPLICATIONS, json=config)
        if response.is_error:
            raise ServeError(f"Serve refused {yaml_path}: {response.text}")
        problem = _wait(dashboard, name, began + deadline)
        if problem:
            raise ServeError(problem + _log_extract(replica_log(temp_dirs, name, since=since)))
        yield ServeApp(name, base_url, tuple(temp_dirs), since, time.monotonic() - began)
    finally:
        # A cluster that died with the test must not hide why.
        with suppress(httpx.TransportError), _client(dashboard) as client:
            client.delete(APPLICATIONS)


def load_config(
    yaml_path: Path, *, env: Mapping[str, str] | None = None, callback_kwargs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(yaml_path.read_text(encoding="utf-8"))
    for application in config["applications"]:
        for llm in application["args"]["llm_configs"]:
            llm.setdefault("runtime_env", {}).setdefault("env_vars", {}).update(env or {})
            callback = llm.setdefault("callback_config", {})
            callback.setdefault("callback_kwargs", {}).update(callback_kwargs or {})
    return config


def chat(base_url: str, model: str, content: str, *, timeout: float = 60.0, **fields: Any) -> dict[str, Any]:
    """One chat completion, decoded greedily; `fields` are added to the request."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 64,
        **fields,
    }
    with httpx.Client(timeout=timeout, trust_env=False) as client:
        response = client.post(f"{base_url}/v1/chat/completions", json=body)
    if response.is_error:
        raise ServeError(f"{response.status_code} from {response.url}: {response.text}")
    completion: dict[str, Any] = response.json()
    return completion


def replica_log(temp_dirs: Sequence[Path], name: str, *, since: float = 0.0) -> str:
    """What the LLM replicas of application `name` have written since `since`: Serve's log, stdout and stderr.

    EngineCore and the vLLM workers are children of the replica and write to the same stdout and stderr.
    """
    mark = f":actor_name:ServeReplica:{name}:LLMServer".encode()
    files: dict[Path, bytes] = {}
    for temp_dir in temp_dirs:
        files |= dict.fromkeys(temp_dir.glob(f"session_2*/logs/serve/replica_{name}_LLMServer*.log"), b"")
        files |= dict.fromkeys(temp_dir.glob("session_2*/logs/worker-*"), mark)
    parts = []
    for file, needed in sorted(files.items(), key=lambda item: item[0].stat().st_mtime):
        if file.stat().st_mtime >= since and needed in (content := file.read_bytes()):
            parts.append(f"==> {file.name} <==\n{content.decode(errors='replace')}")
    return "\n".join(parts)


def _log_extract(log: str, lines: int = 60) -> str:
    """The lines that name an error, once each, and the tail: the root cause is often far above the end."""
    errors = {error.group(): None for error in re.finditer(r"\b[\w.]*(?:Error|Exception): \S.*", log)}
    tail = log.splitlines()[-lines:]
    return "\n".join(
        ["", f"{len(errors)} errors in the replica's log:", *errors, f"its last {len(tail)} lines:", *tail]
    )


def _wait(dashboard: str, name: str, until: float) -> str:
    """Wait for RUNNING; return why it did not come, or an empty string."""
    application: dict[str, Any] = {}
    status = "unknown"
    while time.monotonic() < until:
        application = _details(dashboard).get("applications", {}).get(name, application)
        status = application.get("status", status)
        if status == "RUNNING":
            return ""
        if status in _FAILED:
            break
        time.sleep(0.5)
    parts = application.get("deployments", {}).values()
    messages = [
        application.get("message", ""),
        *(f"{d['name']}: {d['status']} {d['message']}" for d in parts),
    ]
    return "\n".join([f"application {name} is {status}, not RUNNING", *filter(None, messages)])


def _details(dashboard: str) -> dict[str, Any]:
    try:
        with _client(dashboard) as client:
            response = client.get(APPLICATIONS)
    except httpx.TransportError:
        return {}
    details: dict[str, Any] = {} if response.is_error else response.json()
    return details


def _client(dashboard: str) -> httpx.Client:
    return httpx.Client(base_url=dashboard, timeout=60.0, trust_env=False)
