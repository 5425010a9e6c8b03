"""Ctrl-C: the process ends soon with 130, whatever it waits for, and the next run continues.

Nothing here would end by itself within minutes, so that it ended is the proof.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import time

import pytest

from llm_prefetch.live import start_lock
from llm_prefetch.store import locked, open_store
from tests.samples import make_published

PATIENCE = 60
CHUNK = 2**14
TOTAL = 2**24


@pytest.fixture
def uri(tmp_path) -> str:
    """A file that takes minutes at the bandwidth used here, in chunks small enough to see some of them arrive."""
    return make_published(tmp_path / "origin", {"weights.bin": os.urandom(TOTAL)}, CHUNK)


@pytest.fixture
def slow(write_spec, uri):
    """A SPEC that takes minutes."""
    return write_spec(uri, policy={"bandwidth": "100KB/s"})


def _until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _has_begun(root):
    """Some chunks have been entered into the journal."""
    return any(len(path.read_bytes().splitlines()) > 3 for path in root.glob("partial/*/journal"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_transfer_ends_in_order_and_the_next_one_resumes(
    run, spawn, slow, uri, root, write_spec, number, code
):
    with spawn("stage", slow, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        _until(lambda: _has_begun(root))
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (code, b"")
    assert err.splitlines()[-1].startswith(b"llm-prefetch: interrupted; run the same again")
    assert b"Traceback" not in err
    rows = (root / "ledger" / "ledger.jsonl").read_text().splitlines()
    assert [json.loads(row)["outcome"] for row in rows] == ["interrupted"]
    assert run("verify").code == 1, "nothing of it counts yet"
    [artifact] = run("stage", write_spec(uri), "--json").json["artifacts"]
    assert 0 < artifact["fetched_bytes"] < TOTAL
    assert artifact["fetched_bytes"] + artifact["reused_bytes"] == TOTAL
    assert run("verify", "--full").code == 0


def test_a_terminal_gets_its_cursor_back(spawn, slow, root):
    ours, theirs = pty.openpty()
    with spawn("stage", slow, stdout=subprocess.DEVNULL, stderr=theirs, env={"TERM": "xterm"}) as process:
        os.close(theirs)
        _until(lambda: _has_begun(root))
        process.send_signal(signal.SIGINT)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 65536)
            except OSError:
                break
        process.wait(PATIENCE)
    os.close(ours)
    assert process.returncode == 130
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")


def test_waiting_for_a_replica_that_starts_ends(spawn, spec, root):
    lock = start_lock(open_store(root, create=True), "llama")
    with locked(lock, shared=True, seconds=0, waiting_for="nobody"):
        with spawn("stage", spec, stderr=subprocess.PIPE) as process:
            _until(lambda: list(root.glob("bundles/*.json")))
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=PATIENCE)
        assert process.returncode == 130
    assert not list((root / "live").iterdir())


@pytest.mark.parametrize(("command", "signals"), [("stage", 1), ("stage", 2), ("plan", 2), ("publish", 2)])
def test_an_origin_that_does_not_answer_cannot_hold_it(spawn, write_spec, model, command, signals):
    with socket.create_server(("127.0.0.1", 0)) as server:
        environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.getsockname()[1]}",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }
        arguments = (model, "s3://bucket/x") if command == "publish" else (write_spec("s3://bucket/x"),)
        with spawn(command, *arguments, stderr=subprocess.PIPE, env=environment) as process:
            connection, _ = server.accept()
            with connection:
                connection.recv(1)  # it has asked, and now it waits
                for _ in range(signals):
                    process.send_signal(signal.SIGINT)
                    time.sleep(0.1)  # two of a kind that are pending together would be one
                err = process.communicate(timeout=PATIENCE)[1]
        assert process.returncode == 130
        assert b"interrupted" in err.splitlines()[-1]
