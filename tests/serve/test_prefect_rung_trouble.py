"""The rung `prefect`: whatever its server does, or is, the next rung is tried in time, and no secret is shown."""

from __future__ import annotations

import socket

import pytest

from tests.serve.conftest import outcome
from tests.serve.prefect_stand_in import ends


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level("DEBUG")
    return caplog


ANSWERS = {
    "401": (401, b'{"detail": "Unauthorized"}', "Prefect answered 401: Unauthorized", "PREFECT_API_AUTH_STRING"),
    "403": (403, b"{}", "Prefect answered 403", "may not run"),
    "404": (404, b'{"detail": "Deployment not found"}', "Prefect answered 404: Deployment", "deploy it first"),
    "409": (409, b'{"detail": "no such parameter"}', "Prefect answered 409: no such", "do not fit its flow"),
    "500": (500, b"Internal Server Error", "Prefect cannot be asked: it answered 500", "is the server up?"),
    "302": (302, b"", "Prefect answered 302", "ends in /api"),
    "HTML": (200, b"<!doctype html><title>Prefect</title>", "does not speak so: '<!doctype", "ends in /api"),
    "other JSON": (200, b'[{"id": 5}, 7]', "does not speak so", "ends in /api"),
    "nothing": (200, b"", "does not speak so", "ends in /api"),
}  # fmt: skip
CALLS = ("/api/deployments/name/", "/api/flow_runs/filter", "/create_flow_run", "/api/flow_runs/1")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("status", "body", "reason", "hint"), ANSWERS.values(), ids=ANSWERS)
def test_whatever_the_server_answers_the_next_rung_is_tried(
    replica, server, rows, monkeypatch, call, status, body, reason, hint
):
    monkeypatch.setattr("llm_prefetch.serve.prefect_api._BACKOFF_SECONDS", 0.01)
    server.answer = lambda path: (status, body) if call in path else None
    start = replica()
    start.run()
    assert start.by_ray
    assert reason in outcome(rows)
    assert hint in outcome(rows)


def test_a_trouble_that_passes_is_waited_out(replica, server, ready, monkeypatch):
    monkeypatch.setattr("llm_prefetch.serve.prefect_api._BACKOFF_SECONDS", 0.01)
    answers = [(503, b""), (500, b"")] * 20
    seen = []

    def answer(path):
        seen.append(path)
        return answers.pop() if seen.count(path) <= 2 else None

    server.answer = answer
    ends(server, "COMPLETED", ready)
    start = replica()
    start.run()
    assert not start.by_ray


def test_a_server_that_is_down_is_a_reason(replica, rows, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = replica(prefect={"api_url": f"http://127.0.0.1:{port}/api"})
    start.run()
    assert start.by_ray
    assert "Prefect cannot be asked: ConnectError" in outcome(rows)


def test_a_server_that_never_answers_is_given_up_at_the_deadline(replica, rows):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        start = replica(prefect={"api_url": url}, deadlines={"prefect": 0.5})
        start.run()
    assert start.by_ray
    assert outcome(rows) == "gave up after 0.5 s: asks Prefect"


def test_a_server_whose_answer_drips_is_given_up_at_the_deadline(replica, server, rows):
    server.drip = 0.1
    start = replica(deadlines={"prefect": 0.5})
    start.run()
    assert start.by_ray
    assert outcome(rows) == "gave up after 0.5 s: asks Prefect"


def test_a_run_that_does_not_end_is_given_up_at_the_deadline(replica, server, rows):
    start = replica(deadlines={"prefect": 5})
    start.run()
    assert start.by_ray
    assert outcome(rows) == "gave up after 5 s: started flow run run-1, which is SCHEDULED"


def test_without_an_address_it_is_a_reason(replica, rows):
    start = replica()
    start.run()
    assert start.by_ray
    assert "PREFECT_API_URL" in outcome(rows)


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:99999/api", "http://\x7f/api"])
def test_an_address_that_is_none_is_a_reason(replica, rows, monkeypatch, url):
    monkeypatch.setenv("PREFECT_API_URL", url)
    start = replica()
    start.run()
    assert start.by_ray
    assert outcome(rows).startswith("failed: ")


BASIC = "Basic " + "dXNlcjpwYXNz"


@pytest.mark.parametrize(
    ("environment", "options", "header"),
    [
        ({}, {}, ""),
        ({"PREFECT_API_KEY": "key"}, {}, "Bearer key"),
        ({"PREFECT_API_AUTH_STRING": "user:pass"}, {}, BASIC),
        ({"PREFECT_API_AUTH_STRING": "user:pass", "PREFECT_API_KEY": "key"}, {}, BASIC),
        ({"PREFECT_API_AUTH_STRING": "user:pass"}, {"api_key": "mine"}, "Bearer mine"),
        ({"PREFECT_API_KEY": "key"}, {"auth_string": "user:pass"}, BASIC),
    ],
)
def test_the_server_is_told_who_asks(replica, server, ready, monkeypatch, environment, options, header, log):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ends(server, "COMPLETED", ready)
    replica(prefect=options).run()
    assert set(server.headers) == {header}
    assert "user:pass" not in log.text


def test_a_password_in_the_address_is_shown_nowhere(replica, server, rows, log, monkeypatch):
    server.answer = lambda path: (404, b"{}")
    replica(prefect={"api_url": server.url.replace("//", "//user:hunter2@")}).run()
    assert server.headers[0].startswith("Basic")
    assert "hunter2" not in outcome(rows) + log.text
