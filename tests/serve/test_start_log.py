"""Which lines of Ray's and vLLM's logs tell of this replica's start: its own files alone, and only what is new in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llm_prefetch.serve.start_log import Files, process_began, read_lines, startup_phases
from tests.serve.conftest import REPOSITORY
from tests.serve.start_samples import (
    BEGAN,
    GPU_ENDED,
    SERVE_LOG,
    WORKER,
    at,
    cut,
    meet,
    names,
    seconds,
    touch,
)

pytestmark = pytest.mark.usefixtures("utc")


def test_lines_of_an_earlier_start_in_the_same_files_do_not_count(logs):
    out = logs / f"{WORKER}.out"
    out.write_text(
        "(EngineCore pid=1) INFO 11-21 04:00:00 [core.py:123] Initializing a V1 LLM engine (v0.29.0)\n"
        + out.read_text()
    )
    assert seconds(cut(logs))["engine workers"] == pytest.approx(16)


def test_tags_and_colours_before_a_line_do_not_hide_it(gpu):
    for path in gpu.glob("worker-*-90?.out"):
        text = path.read_text().replace("torch.compile took", "[backbone] torch.compile took")
        text = text.replace("INFO 11-21 05:14:40", "\x1b[32mINFO\x1b[0m \x1b[90m11-21 05:14:40\x1b[0m")
        path.write_text(text)
    touch(gpu)
    assert seconds(cut(gpu, ended=GPU_ENDED))["compile"] == pytest.approx(26.5)


def test_serves_log_may_be_json(logs):
    (logs / f"{WORKER}.err").unlink()
    log = logs / SERVE_LOG
    log.write_text(
        '{"levelname": "INFO", "message": "Started initializing replica.", "asctime": "2026-11-21 05:12:28,891"}\n'
        '{"levelname": "INFO", "message": "Using executor class: x", "asctime": "2026-11-21 05:12:54,081"}\n'
    )
    took = seconds(cut(logs))
    assert (took["imports"], took["engine config"]) == (
        pytest.approx(45.281),
        pytest.approx(22.977, abs=0.002),
    )


def another_replica(folder: Path, clock: str) -> None:
    """It has started its engine at `clock`, and what its EngineCore has logged since is in its own files."""
    log = folder / "serve" / "replica_other_LLMServer_other_x.log"
    log.write_text(f"INFO 2026-11-21 {clock},000 other x -- Using executor class: <class 'RayExecutorV2'>\n")
    worker = folder / "worker-cccc-02000000-500.out"
    worker.write_text(
        ":job_id:02000000\n:actor_name:ServeReplica:other:LLMServer:other\n"
        "INFO 11-21 05:13:08 [gpu_model_runner.py:5380] Starting to load model /store/live/other/w...\n"
    )
    touch(folder)


def test_another_replica_that_starts_at_the_same_time_keeps_its_workers_to_itself(gpu):
    another_replica(gpu, "05:13:00")
    took = seconds(cut(gpu, ended=GPU_ENDED))
    assert took["engine workers + weights + warm-up"] == pytest.approx(120)
    assert "compile" not in took


def test_another_replica_that_had_started_before_does_not_stand_in_the_way(gpu):
    another_replica(gpu, "05:10:00")
    took = seconds(cut(gpu, ended=GPU_ENDED))
    assert took["engine workers"] == pytest.approx(15)
    assert took["compile"] == pytest.approx(26.5)


def test_a_start_may_begin_in_one_year_and_end_in_the_next(tmp_path):
    out = tmp_path / "out"
    out.write_text(
        "INFO 12-31 23:59:58 [core.py:123] Initializing a V1 LLM engine (v0.29.0)\n"
        "INFO 01-01 00:00:03 [cpu_model_runner.py:131] Starting to load model x...\n"
    )
    began = at("23:59:50", "2026-12-31")
    core, load = read_lines(Files((out,), None), began, began)
    assert core.wall - began == pytest.approx(8.5)
    assert load.wall - core.wall == pytest.approx(5)


def test_of_a_long_log_only_the_end_is_read(tmp_path):
    out = tmp_path / "out"
    early = "INFO 11-21 05:13:00 [core.py:123] Initializing a V1 LLM engine (v0.29.0)\n"
    with out.open("w") as file:
        file.write(early)
        file.truncate(200_000_000)
        file.seek(0, os.SEEK_END)
        file.write(f"\n{early.replace('05:13:00', '05:13:30')}")
    [line] = read_lines(Files((out,), None), BEGAN, BEGAN)
    assert line.wall == at("05:13:30") + 0.5


def test_files_that_are_not_there_or_hold_anything_are_nothing_to_stumble_over(tmp_path):
    garbage = tmp_path / "worker-a-b-1.out"
    garbage.write_bytes(b"\xff\x00Loading weights took never\n99-99 99:99:99 torch.compile took \n" * 1000)
    found = list(read_lines(Files((garbage, tmp_path / "gone"), tmp_path / "serve" / "replica_x.log"), 0, 0))
    assert all(line.seconds is None for line in found)


STARTING_PROCESS = """
import json, os, sys, time
folder = sys.argv[1]
from llm_prefetch.serve.start_log import startup_phases
log = open(f"{folder}/serve/replica_app_LLMServer_abc.log", "a")

def ray(text):
    now = time.time()
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now)) + f",{int(now % 1 * 1000):03}"
    print(f"INFO {stamp} app abc -- {text}", file=log, flush=True)

def vllm(text):
    print(f"INFO {time.strftime('%m-%d %H:%M:%S')} [core.py:123] {text}", flush=True)

ray("Started initializing replica.")
began = time.time()
time.sleep(0.05)
ray("Using executor class: x")
vllm("Initializing a V1 LLM engine (v0.29.0) with config")
vllm("init engine (profile, create kv cache, warmup model) took 0.10 s")
facts = startup_phases(began, began, [("verify", began, 0.01)])
open(f"{folder}/facts.json", "w").write(json.dumps([facts, time.time()]))
"""


def test_a_process_finds_its_own_files_and_its_own_beginning(tmp_path):
    (tmp_path / "serve").mkdir()
    before = time.time()
    with (
        (tmp_path / "worker-ab-01-7.out").open("w") as out,
        (tmp_path / "worker-ab-01-7.err").open("w") as err,
    ):
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, "-c", STARTING_PROCESS, str(tmp_path)]
        subprocess.run(command, stdout=out, stderr=err, env=environment, check=True)
    assert (tmp_path / "worker-ab-01-7.err").read_text() == ""
    facts, ended = json.loads((tmp_path / "facts.json").read_text())
    assert before - 0.02 <= facts["began"] <= ended
    assert names(facts["phases"])[:4] == ["imports", "replica", "verify", "engine config"]
    # A line of vLLM stands for its whole second, and here all that is left is shorter.
    assert set(names(facts["phases"])[4:]) <= {
        "engine process",
        "engine workers + weights + warm-up",
        "ready",
    }
    meet(facts["phases"])
    last = facts["phases"][-1]
    assert 0 < last["at"] + last["seconds"] <= ended - facts["began"] + 0.001


def test_where_the_output_is_a_pipe_there_is_our_own_clock():
    code = (
        "import json, time; from llm_prefetch.serve.start_log import startup_phases as f; n = time.time();"
        "print(json.dumps(f(n, n, [('verify', n, 0.5)])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert names(json.loads(done.stdout)["phases"])[:1] == ["imports"]
    assert done.stderr == ""


def test_whatever_goes_wrong_nothing_is_raised(caplog):
    assert startup_phases(0.0, 0.0, [("no", None, "step")]) == {}  # type: ignore[list-item]
    assert "cannot be told" in caplog.text


def test_the_beginning_of_a_process_is_known_to_a_hundredth_of_a_second():
    before = time.time()
    done = subprocess.run(
        [sys.executable, "-c", "from llm_prefetch.serve.start_log import process_began as f; print(f())"],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert before - 0.03 <= float(done.stdout) <= time.time()
    assert (process_began() or 0) < before
