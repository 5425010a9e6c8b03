"""Of Prefect's REST API the few calls that a replica makes, with every way to misbehave."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

DEPLOYMENT_ID = "5a7c3b8e-0d0f-4d5b-9f3e-2f6f8f1b2c3d"
FLOW_ID = "11111111-0d0f-4d5b-9f3e-2f6f8f1b2c3d"
_ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@dataclass
class Run:
    id: str
    key: str
    state: str
    due: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def body(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": f"run-{self.id}",
            "state_type": self.state,
            "expected_start_time": self.due.isoformat(),
        }


@dataclass
class Server:
    """A server with one deployment, `stage/llama`."""

    url: str = ""
    runs: list[Run] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    """That were posted."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of each request."""
    headers: list[str] = field(default_factory=list)
    """`Authorization` of each request."""
    answer: Callable[[str], tuple[int, bytes] | None] = lambda path: None
    """May answer a path in its own way."""
    on_read: Callable[[Run], None] = lambda run: None
    """Called when a run is looked at."""
    drip: float = 0.0
    """Seconds between two bytes of an answer."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, state: str, due_in: float = 0.0) -> Run:
        run = Run(str(len(self.runs) + 1), "", state, datetime.now(UTC) + timedelta(seconds=due_in))
        self.runs.append(run)
        return run

    @property
    def started(self) -> list[Run]:
        return [run for run in self.runs if run.key]

    def reply(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        match method, path.strip("/").split("/"):
            case "GET", ["api", "deployments", "name", "stage", "llama"]:
                return 200, {"id": DEPLOYMENT_ID}
            case "GET", ["api", "deployments", id_] if id_ == DEPLOYMENT_ID:
                return 200, {"id": DEPLOYMENT_ID, "name": "llama"}
            case "GET", ["api", "flows", id_] if id_ == FLOW_ID:
                return 200, {"id": FLOW_ID, "name": "stage"}
            case "POST", ["api", "events"]:
                assert isinstance(body, list)
                self.events += body
                return 204, b""
            case "POST", ["api", "flow_runs", "filter"]:
                return 200, [run.body for run in self._filtered(body)]
            case "POST", ["api", "deployments", id_, "create_flow_run"] if id_ == DEPLOYMENT_ID:
                return self._start(body["idempotency_key"])
            case "GET", ["api", "flow_runs", id_]:
                for run in self.runs:
                    if run.id == id_:
                        self.on_read(run)
                        return 200, run.body
        return 404, {"detail": "not found"}

    def _filtered(self, body: dict[str, Any]) -> list[Run]:
        assert body["deployments"] == {"id": {"any_": [DEPLOYMENT_ID]}}
        states = body["flow_runs"]["state"]["type"]["any_"]
        found = [run for run in self.runs if run.state in states]
        return found[::-1][: body["limit"]] if body["sort"] == "END_TIME_DESC" else found[: body["limit"]]

    def _start(self, key: str) -> tuple[int, Any]:
        for run in self.runs:
            if run.key == key:
                return 200, run.body
        run = self.add("SCHEDULED")
        run.key = key
        return 201, run.body


def ends(server: Server, state: str, ready: Callable[[], object] = lambda: None) -> None:
    """Every run that is looked at makes the node ready, perhaps, and ends."""

    def end(run: Run) -> None:
        if run.state not in _ENDED:
            ready()
            run.state = state

    server.on_read = end


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Serves the stand-in, at the address that replicas are given."""
    with prefect_stand_in() as server:
        monkeypatch.setenv("PREFECT_API_URL", server.url)
        yield server


@contextlib.contextmanager
def prefect_stand_in() -> Iterator[Server]:
    """Serve on loopback."""
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}")
            with server.lock:
                server.asked.append((self.command, self.path))
                server.headers.append(self.headers.get("Authorization") or "")
                status, answer = server.answer(self.path) or server.reply(self.command, self.path, body)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(OSError):
                if server.drip:
                    for byte in data:
                        self.wfile.write(bytes([byte]))
                        self.wfile.flush()
                        time.sleep(server.drip)
                else:
                    self.wfile.write(data)

        do_POST = do_GET  # noqa: N815 (the name that http.server looks for)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        http.block_on_close = False
        server.url = f"http://127.0.0.1:{http.server_port}/api"
        thread = threading.Thread(target=http.serve_forever, args=[0.05], daemon=True)
        thread.start()
        yield server
        http.shutdown()
        thread.join()
