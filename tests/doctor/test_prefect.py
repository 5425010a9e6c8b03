"""Servers that are away, refuse us, or are none. What a real one says is in tests/flows/test_doctor.py."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from llm_prefetch.doctor import Finding, prefect_findings


@contextlib.contextmanager
def answering(answer: Callable[[str], tuple[int, object]]) -> Iterator[str]:
    """A server that gives `answer(path)`: a status and JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path)
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET  # noqa: N815 (the name that http.server looks for)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/api"
        finally:
            server.shutdown()
            thread.join()


def findings(url: str, prefect_file: Path | None = None) -> list[Finding]:
    return prefect_findings({"PREFECT_API_URL": url, "PREFECT_HOME": "/nonexistent"}, prefect_file)


def test_without_an_address_prefect_is_skipped() -> None:
    [finding] = prefect_findings({"PREFECT_HOME": "/nonexistent"}, None)
    assert (str(finding.outcome), finding.says) == ("skipped", "PREFECT_API_URL is not set")
    assert "prefect config set" in finding.mend


def test_a_server_that_is_away_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    [finding] = findings(f"http://127.0.0.1:{port}/api")
    assert str(finding.outcome) == "failed"
    assert f"http://127.0.0.1:{port}/api does not answer" in finding.says
    assert "prefect server start" in finding.mend


def test_an_address_without_api_is_told_how_it_ends() -> None:
    with answering(lambda _path: (404, {"detail": "Not Found"})) as url:
        [finding] = findings(url)
    assert "answers 404" in finding.says
    assert "ends in /api" in finding.mend


@pytest.mark.parametrize("status", [401, 403])
def test_refused_credentials_name_the_settings(status: int) -> None:
    with answering(lambda path: (200, True) if path.endswith("health") else (status, {})) as url:
        server, credentials = findings(url)
    assert str(server.outcome) == "ok"
    assert (str(credentials.outcome), credentials.says) == ("failed", f"refused ({status})")
    assert "PREFECT_API_AUTH_STRING" in credentials.mend


@pytest.mark.parametrize("nonsense", [{"a": 1}, [], 3, None, "text"])
def test_something_else_that_answers_is_nonsense_and_no_traceback(nonsense: object) -> None:
    with answering(lambda _path: (200, nonsense)) as url:
        found = findings(url)
    assert any(str(finding.outcome) == "failed" and "nonsense" in finding.says for finding in found)


def test_a_prefect_file_that_is_none_does_not_hide_the_server(tmp_path: Path) -> None:
    with answering(lambda path: (200, True) if path.endswith("health") else (401, {})) as url:
        found = findings(url, tmp_path / "none.yaml")
    assert [finding.about for finding in found] == ["deployments", "prefect server", "prefect credentials"]


def test_an_address_that_is_none_is_said() -> None:
    [finding] = findings("localhost:4200")
    assert (finding.about, str(finding.outcome)) == ("prefect server", "failed")
