"""The Prefect server and its workers are real, run flows, and leave nothing."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real import processes
from tests.real.prefect_server import PrefectServer, prefect_server

_FLOW = """
import os, sys
from pathlib import Path
from prefect import flow

@flow
def leave_a_note(path: str) -> None:
    Path(path).write_text(os.environ["NOTE"])

if __name__ == "__main__":
    from prefect.deployments import run_deployment
    leave_a_note.from_source(str(Path(__file__).parent), "note.py:leave_a_note").deploy(
        "here", work_pool_name="pool", print_next_steps=False
    )
    run = run_deployment("leave-a-note/here", parameters={"path": sys.argv[1]}, timeout=90)
    print(run.state_name)
"""


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


@pytest.mark.prefect
def test_a_worker_runs_a_deployed_flow(prefect: PrefectServer, tmp_path: Path) -> None:
    (tmp_path / "note.py").write_text(_FLOW)
    with prefect.worker("pool", cwd=tmp_path, env={"NOTE": "from the worker"}) as worker:
        argv = [sys.executable, "note.py", str(tmp_path / "note.txt")]
        done = processes.run(argv, env=os.environ | prefect.env, cwd=tmp_path)
        assert "Completed" in done.stdout, worker.tail()
    assert (tmp_path / "note.txt").read_text() == "from the worker"
    assert worker.popen.poll() is not None
