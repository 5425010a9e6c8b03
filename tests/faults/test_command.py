"""What a person and a program are told by the command: one line, its exit code, and JSON; and then it works."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.faults.conftest import FILES, WEIGHTS
from tests.real.faults import first, flip, reset, stall, status

pytestmark = pytest.mark.cloud
REPOSITORY = Path(__file__).parents[2]
PATH = next(path for path in FILES if WEIGHTS in path)


def _command(origin, folder, *options):
    spec = origin.write_spec(folder)
    argv = [sys.executable, "-m", "llm_prefetch.cli", "stage", spec, "--root", origin.store.root, *options]
    return subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("fault", "exit_code", "code"),
    [
        (lambda origin: reset(), 3, "origin-unavailable"),
        (lambda origin: stall(100), 3, "origin-unavailable"),
        (lambda origin: status(503, {"Retry-After": "0"}), 3, "origin-unavailable"),
        (lambda origin: status(403, store_code="AccessDenied"), 3, "origin-access"),
        (lambda origin: first(lambda: origin.delete(PATH)), 3, "origin-not-found"),
        (lambda origin: first(lambda: origin.put(PATH, b"shorter")), 3, "origin-changed"),
        (lambda origin: flip(), 5, "digest"),
    ],
    ids=["reset", "stall", "503", "403", "404", "changed", "flipped"],
)
def test_each_fault_has_its_exit_code(published, quick, tmp_path, fault, exit_code, code):
    rule = published.proxy.inject(fault(published), WEIGHTS, ranges=True, times=None)
    running = _command(published, tmp_path, "--json")
    out, err = running.communicate(timeout=60)
    assert running.returncode == exit_code, err
    assert rule.hits >= 1
    *talk, line = err.splitlines()
    assert line.startswith(f"llm-prefetch: {code}: ")
    assert not any(other.startswith(("llm-prefetch:", "Traceback")) for other in talk), err
    error = json.loads(out)["error"]
    assert error["code"] == code
    assert WEIGHTS in error["message"]
    assert error["where"] == published.uri
    assert error["hint"]
    published.assert_nothing_committed()
    published.put(PATH, FILES[PATH])
    published.proxy.mend()
    again = _command(published, tmp_path)
    _, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    published.assert_right()


def test_eight_at_once_on_a_bad_line_fetch_it_once(published, settings, tmp_path):
    settings.setenv("LLM_PREFETCH_ATTEMPTS", "10")
    lock, count = threading.Lock(), [0]

    def every_fifth(exchange):
        with lock:
            count[0] += 1
            bad = count[0] % 5 == 0
        if bad:
            reset()(exchange)
        else:
            exchange.send(exchange.forward())

    rule = published.proxy.inject(every_fifth, ranges=True, times=None)
    running = [_command(published, tmp_path) for _ in range(8)]
    for one in running:
        _, err = one.communicate(timeout=100)
        assert one.returncode == 0, err
    assert rule.hits >= 5
    asked = [(request.path, request.range) for request in published.proxy.requests if request.range]
    assert len(asked) - len(set(asked)) <= count[0] // 5  # nothing but what had failed was asked for twice
    published.assert_right()
