"""The Prefect server is real and leaves nothing; its workers are what all tests of flows run by."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.prefect_server import PrefectServer, prefect_server


@pytest.fixture(scope="module")
def prefect() -> Iterator[PrefectServer]:
    with prefect_server() as server:
        assert _deployments(server) == 0  # here and not in a test: tests run in any order
        yield server
    assert not server.area.path.exists()
    assert not any(str(server.area.path).encode() in _environ(p) for p in Path("/proc").glob("[0-9]*"))


def _deployments(server: PrefectServer) -> int:
    request = urllib.request.Request(f"{server.api_url}/deployments/count", method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return int(json.load(answer))


def _environ(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


@pytest.mark.prefect
def test_a_server_keeps_its_database_to_itself(prefect: PrefectServer) -> None:
    assert prefect.healthy()
    assert prefect.env["PREFECT_HOME"].startswith(str(prefect.area.path))
    assert Path(prefect.env["PREFECT_HOME"], "prefect.db").exists()
