"""A replica that did not find its node ready tells Prefect so, and neither waits for that nor fails by it."""

from __future__ import annotations

import socket
import time

import pytest

from llm_prefetch.serve.fallback_event import EVENT, Fallback, post_fallback
from llm_prefetch.serve.options import PrefectOptions
from tests.serve.conftest import refused, until

FALLBACK = Fallback(
    "llama", "MISSING", "cannot read https://me:hunter2@host/x?sig=hunter2", "ray", "replica-7"
)


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level("DEBUG", logger="ray.serve.llm_prefetch")
    return caplog


@pytest.mark.parametrize("last", ["ray", "fail"])
def test_a_start_that_is_no_hit_is_an_event(make, server, store, last):
    start = make(on_miss=["wait", last])
    refused(start, "MISSING") if last == "fail" else start.run()
    until(lambda: server.events)
    [event] = server.events
    assert event["event"] == EVENT
    assert event["resource"]["prefect.resource.id"] == "llm-prefetch.deployment.llama"
    assert event["payload"] == {
        "deployment": "llama",
        "verdict": "MISSING",
        "reason": "nothing is live on this node",
        "rung": last,
        "replica": "",
        "node": socket.gethostname(),
    }


def test_a_hit_is_none(make, server, staged):
    make().run()
    time.sleep(0.3)
    assert server.asked == []


def test_without_a_server_nobody_is_told():
    assert post_fallback(FALLBACK, PrefectOptions(), {}) is None


def test_who_tells_it_is_said_as_for_a_run_and_no_secret_is_told(server):
    thread = post_fallback(FALLBACK, PrefectOptions(api_key="key"))
    thread.join(10)
    assert server.headers == ["Bearer key"]
    assert "hunter2" not in str(server.events)
    assert server.events[0]["payload"]["replica"] == "replica-7"


def test_a_server_that_is_in_trouble_is_a_line_for_those_who_look_for_one(make, server, store, log):
    server.answer = lambda path: (500, b"") if "events" in path else None
    start = make(on_miss=["ray"])
    start.run()
    assert start.by_ray
    until(lambda: f"{EVENT} was not told to Prefect: HTTPStatusError" in log.text)
    [line] = [record for record in log.records if "was not told" in record.getMessage()]
    assert line.levelname == "DEBUG"


def test_a_start_does_not_wait_for_a_server_that_is_silent(make, store, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/api")
        start = make(on_miss=["ray"])
        start.run()  # it would take fifteen seconds, and nothing here does
        asked, _ = silent.accept()
        assert start.by_ray
        assert asked.recv(4).startswith(b"POST")
        asked.close()
