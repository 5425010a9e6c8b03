"""Publishing over a bad line: all of it and its manifest, or no manifest; and it ends when it is told to."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from llm_prefetch import manifest as manifests
from llm_prefetch.errors import OriginAccessError, OriginUnavailableError, PrefetchError
from llm_prefetch.manifest import CHUNK_BYTES
from llm_prefetch.publish import publish
from llm_prefetch.sealing import seal_prefix
from llm_prefetch.stage import stage
from tests.faults.conftest import FILES, WEIGHTS
from tests.faults.doors import BUCKET
from tests.real.faults import reset, silence, status
from tests.samples import make_folder, make_manifest, make_spec, raises, tree

pytestmark = pytest.mark.cloud
REPOSITORY = Path(__file__).parents[2]
VERSION = make_manifest(FILES, CHUNK_BYTES).version


@pytest.fixture
def source(tmp_path):
    return make_folder(tmp_path / "source", FILES)


@pytest.fixture
def uri(listed):
    """Where nothing is yet."""
    return f"{listed.uri}-new"


def _keys(listed):
    return listed.server.keys(BUCKET, f"{listed.prefix}-new/")


def _command(*arguments):
    argv = [sys.executable, "-m", "llm_prefetch.cli", "publish", *map(str, arguments)]
    return subprocess.Popen(
        argv, cwd=REPOSITORY, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )


def _until_asked(rule, process):
    while not rule.hits:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)


@pytest.mark.parametrize(
    "fault", [reset, lambda: status(500), lambda: status(503)], ids=["reset", "500", "503"]
)
@pytest.mark.parametrize("what", [WEIGHTS, r"manifest\.json"])
def test_a_fault_that_passes_costs_a_retry(listed, source, uri, store, fault, what):
    rule = listed.proxy.inject(fault(), what, method="PUT")
    assert publish(source, uri).version == VERSION
    assert rule.hits == 1
    stage(make_spec(uri, version=VERSION), store)
    assert tree(store.engine_path("llama", "weights").resolve()) == FILES


def test_a_fault_that_stays_leaves_no_manifest(listed, source, uri):
    rule = listed.proxy.inject(status(503), WEIGHTS, method="PUT", times=None)
    with raises(OriginUnavailableError, 3, uri):
        publish(source, uri)
    assert rule.hits >= 2
    assert not any(manifests.FOLDER in key for key in _keys(listed))


@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_what_fails_ends_the_others_though_nobody_answers_them(listed, source, uri, method, settings):
    """While it is published, and while it is sealed."""
    settings.setenv("LLM_PREFETCH_STALL_SECONDS", "200")
    stalled = listed.proxy.inject(silence(), WEIGHTS, method=method, times=None)
    asked = threading.Event()

    def refuse(exchange):
        asked.wait(20)
        status(403, store_code="AccessDenied")(exchange)

    listed.proxy.inject(refuse, "config", method=method, times=None)
    errors = []

    def work():
        try:
            publish(source, uri) if method == "PUT" else seal_prefix(listed.uri)
        except PrefetchError as error:
            errors.append(error)

    working = threading.Thread(target=work, daemon=True)
    working.start()
    while not stalled.hits:
        assert working.is_alive()
        working.join(0.05)
    asked.set()
    working.join(20)
    assert not working.is_alive()
    assert type(errors[0]) is OriginAccessError
    assert not any(manifests.FOLDER in key for key in listed.server.keys(BUCKET, listed.prefix))


def test_one_that_is_killed_leaves_no_manifest_and_the_next_one_does_the_rest(listed, source, uri, store):
    rule = listed.proxy.inject(silence(), WEIGHTS, method="PUT", times=None)
    with _command(source, uri) as process:
        _until_asked(rule, process)
        process.kill()
    assert not any(manifests.FOLDER in key for key in _keys(listed))
    listed.proxy.mend()
    with _command(source, uri) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert stage(make_spec(uri, version=VERSION), store).artifacts[0].version == VERSION


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_it_though_nobody_answers(listed, source, uri, number):
    rule = listed.proxy.inject(silence(), WEIGHTS, method="PUT", times=None)
    with _command(source, uri) as process:
        _until_asked(rule, process)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert err.splitlines()[-1].startswith("llm-prefetch: interrupted")
    assert "Traceback" not in err
    assert not any(manifests.FOLDER in key for key in _keys(listed))
