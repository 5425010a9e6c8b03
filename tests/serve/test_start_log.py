"""Where a start spent its time, from what Ray and vLLM write: a real start on the CPU engine, and a GPU's strings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_prefetch.serve.start_log import Files, process_began, read_lines, startup_phases
from llm_prefetch.serve.start_phases import Line, cut_phases

REPOSITORY = Path(__file__).parents[2]
# What `tests/engine/test_replica.py` left on one host (the controller's log on another), trimmed to what matters here.
SAMPLE = Path(__file__).parent / "samples" / "cpu-start.txt"
WORKER = "worker-87934323da52a8123e9a4a5ba3ae5a1373cfc1d7571ebb72cfe9b9f5-02000000-168"
SERVE_LOG = "serve/replica_tiny-llama_LLMServer_tiny-llama_w6y70m00.log"

# vLLM 0.29 on GPUs, which this machine has not; each string with the file that logs it.
GPU_RANK = """\
(RayWorkerProc pid=9) INFO 11-21 05:13:20 [gpu_model_runner.py:5380] Starting to load model /store/live/m/w...
(RayWorkerProc pid=9) INFO 11-21 05:14:10 [default_loader.py:431] Loading weights took 48.91 seconds
(RayWorkerProc pid=9) INFO 11-21 05:14:12 [gpu_model_runner.py:5472] Model loading took 15.27 GiB memory and 50.902114 seconds
(RayWorkerProc pid=9) INFO 11-21 05:14:14 [decorators.py:314] Directly load AOT compilation from path /root/.cache/vllm/x
(RayWorkerProc pid=9) INFO 11-21 05:14:40 [monitor.py:20] torch.compile took 26.50 s in total
(RayWorkerProc pid=9) INFO 11-21 05:14:42 [monitor.py:82] Initial profiling/warmup run took 1.75 s
(RayWorkerProc pid=9) INFO 11-21 05:14:43 [gpu_worker.py:626] Available KV cache memory: 55.1 GiB
(RayWorkerProc pid=9) INFO 11-21 05:15:03 [gpu_model_runner.py:7002] Graph capturing finished in 18 secs, took 0.61 GiB
"""
GPU_CORE = """\
(EngineCore pid=7) INFO 11-21 05:13:05 [core.py:124] Initializing a V1 LLM engine (v0.29.0) with config: model='/store'
(EngineCore pid=7) INFO 11-21 05:15:05 [core.py:362] init engine (profile, create kv cache, warmup model) took 52.80 s (compilation: 26.50 s)
"""


# A start on the CPU engine without `enforce_eager`, of the same model; it states no time of torch.compile.
CPU_COMPILE = """\
(EngineCore pid=282) INFO 11-21 05:13:15 [core.py:123] Initializing a V1 LLM engine (v0.29.0) with config: model='/tmp'
(Worker pid=298) INFO 11-21 05:13:20 [cpu_model_runner.py:131] Starting to load model /tmp/root/live/tiny-llama/weights...
(Worker pid=298) INFO 11-21 05:13:20 [default_loader.py:430] Loading weights took 0.02 seconds
(Worker pid=298) INFO 11-21 05:13:20 [cpu_model_runner.py:150] Warming up model for the compilation...
(Worker pid=298) INFO 11-21 05:14:23 [decorators.py:719] saved AOT compiled function to /tmp/home/.cache/vllm/x/model
(Worker pid=298) INFO 11-21 05:14:23 [monitor.py:81] Initial profiling/warmup run took 0.11 s
(Worker pid=298) INFO 11-21 05:14:30 [cpu_model_runner.py:154] Warming up done.
(EngineCore pid=282) INFO 11-21 05:14:31 [core.py:368] init engine (profile, create kv cache, warmup model) took 71.03 s
"""


@pytest.fixture(autouse=True)
def utc(monkeypatch):
    """The time zone that the samples were written in."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def at(clock: str, day: str = "2026-11-21") -> float:
    """The wall clock at HH:MM:SS.mmm."""
    whole, _, fraction = clock.partition(".")
    return time.mktime(time.strptime(f"{day} {whole}", "%Y-%m-%d %H:%M:%S")) + float(f"0.{fraction or 0}")


BEGAN = at("05:12:31.103")
ENDED = at("05:13:33.550")
PROCESS = at("05:11:40.900")
STEPS = [("verify", BEGAN, 0.0011)]


@pytest.fixture
def logs(tmp_path) -> Path:
    """The session's folder of logs as the real start left it."""
    folder = tmp_path / "logs"
    for part in SAMPLE.read_text().split("==> ")[1:]:
        name, _, text = part.partition(" <==\n")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    touch(folder)
    return folder


def touch(folder: Path) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (ENDED, ENDED))


def files(logs: Path) -> Files:
    return Files((logs / f"{WORKER}.out", logs / f"{WORKER}.err"), logs / SERVE_LOG)


@pytest.fixture
def cut(logs) -> Callable[..., list[dict[str, Any]]]:
    """The phases that the folder tells."""

    def cut(*, began: float = BEGAN, ended: float = ENDED, process: float | None = PROCESS, steps=STEPS):
        lines = list(read_lines(files(logs), began, began))
        phases = cut_phases(process, lines, began, steps, ended)["phases"]
        meet(phases)
        return phases

    return cut


def meet(phases: list[dict[str, Any]]) -> None:
    """Each phase begins where the one before ends."""
    for before, after in pairwise(phases):
        assert before["at"] + before["seconds"] == pytest.approx(after["at"], abs=0.002)


def seconds(phases: list[dict[str, Any]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for phase in phases:
        sums[phase["phase"]] = sums.get(phase["phase"], 0) + phase["seconds"]
    return sums


def names(phases: list[dict[str, Any]]) -> list[str]:
    return [phase["phase"] for phase in phases]


def test_a_real_start_on_the_cpu_engine_is_told_from_the_order_for_a_replica_until_the_engine_is_ready(cut):
    phases = cut()
    assert names(phases) == [
        "schedule", "process", "imports", "replica", "verify", "engine config", "engine process", "engine workers",
        "weights", "warm-up", "ready",
    ]  # fmt: skip
    took = seconds(phases)
    assert took["schedule"] == pytest.approx(2.265)  # the controller's `Starting Replica` at 05:11:38.635
    assert took["process"] == pytest.approx(2.71)  # `Creating actor` at 05:11:43.610
    assert took["imports"] == pytest.approx(45.281)  # `Started initializing replica.` at 05:12:28.891
    assert took["verify"] == pytest.approx(0.0011, abs=1e-5)
    assert took["engine config"] == pytest.approx(22.977, abs=0.002)  # `Using executor class` at 05:12:54.081
    assert took["engine process"] == pytest.approx(
        21.419, abs=0.001
    )  # 05:13:15, which is half a second later
    assert took["engine workers"] == pytest.approx(16)
    assert sum(took.values()) == pytest.approx(ENDED - at("05:11:38.635"), abs=0.01)


def test_the_first_moment_of_the_process_is_zero_and_what_was_before_is_negative(cut):
    phases = cut()
    assert [phase["at"] for phase in phases[:2]] == [pytest.approx(-2.265), 0]


def test_each_phase_says_who_measured_it_and_how_far_it_may_be_off(cut):
    told = {phase["phase"]: (phase["source"], phase["within"]) for phase in cut()}
    assert told["verify"] == ("clock", 0)
    assert told["imports"] == ("ray log", pytest.approx(0.001))
    assert told["engine workers"] == ("vllm log", 1.0)
    assert told["ready"] == ("vllm log", 0.5)


def test_what_took_less_than_a_time_stamp_shows_is_there_and_says_so(cut):
    [weights] = [phase for phase in cut() if phase["phase"] == "weights"]
    assert (weights["seconds"], weights["within"]) == (0, 1.0)


def test_without_the_controllers_log_the_time_to_be_scheduled_is_left_out(cut, logs):
    (logs / "serve" / "controller_563.log").unlink()
    assert names(cut())[:2] == ["process", "imports"]


def test_a_process_that_had_waited_for_work_is_no_part_of_the_start(cut, logs):
    phases = cut(process=PROCESS - 3600)
    assert names(phases)[:2] == ["schedule", "imports"]
    assert phases[0]["seconds"] == pytest.approx(4.975)
    (logs / "serve" / "controller_563.log").unlink()
    phases = cut(process=PROCESS - 3600)
    assert (phases[0]["phase"], phases[0]["at"]) == ("imports", 0)


def test_a_start_that_fails_ends_in_the_phase_that_it_had_come_to(cut, logs):
    out = logs / f"{WORKER}.out"
    out.write_text(out.read_text().partition("(Worker pid=306) INFO 11-21 05:13:31 [default_loader.py")[0])
    phases = cut(ended=at("05:14:00"))
    assert phases[-1]["phase"] == "weights"
    assert phases[-1]["seconds"] == pytest.approx(28.5)


def test_phases_that_no_line_tells_apart_are_joined_and_never_given_as_nothing(cut, logs):
    out = logs / f"{WORKER}.out"
    kept = [line for line in out.read_text().splitlines(keepends=True) if "oad" not in line]
    out.write_text("".join(kept))
    touch(logs)
    took = seconds(cut())
    assert took["engine workers + weights + warm-up"] == pytest.approx(17)
    assert "weights" not in took


def test_an_engine_that_logs_nothing_is_told_by_rays_lines_and_our_clock_alone(cut, logs):
    (logs / f"{WORKER}.out").write_text("")
    (logs / f"{WORKER}.err").unlink()
    phases = cut()
    assert names(phases)[-1] == "engine process"
    (logs / SERVE_LOG).unlink()
    assert names(cut(steps=()))[-1] == "verify + engine config"


def test_lines_of_an_earlier_start_in_the_same_files_do_not_count(cut, logs):
    out = logs / f"{WORKER}.out"
    out.write_text(
        "(EngineCore pid=1) INFO 11-21 04:00:00 [core.py:123] Initializing a V1 LLM engine (v0.29.0)\n"
        + out.read_text()
    )
    assert seconds(cut())["engine workers"] == pytest.approx(16)


@pytest.fixture
def gpu(logs) -> Path:
    """The same start with vLLM's workers as actors of Ray: what they log is in files of their own."""
    (logs / f"{WORKER}.out").write_text(GPU_CORE)
    rank = logs / "worker-aaaa-03000000-900.out"
    rank.write_text(":job_id:03000000\n:actor_name:RayWorkerProc\n" + GPU_RANK)
    # The other rank is faster in all.
    slower = GPU_RANK.replace("26.50", "25.00").replace("05:14:12", "05:14:11").replace("in 18", "in 17")
    (logs / "worker-bbbb-03000000-901.out").write_text(":actor_name:RayWorkerProc\n" + slower)
    touch(logs)
    return logs


GPU_ENDED = at("05:15:08.25")


def test_on_gpus_what_vllm_measures_itself_is_taken_as_it_says(cut, gpu):
    phases = cut(ended=GPU_ENDED)
    took = seconds(phases)
    assert took["engine workers"] == pytest.approx(15)
    assert took["weights"] == pytest.approx(52)
    assert took["compile"] == pytest.approx(26.5)
    assert took["profiling"] == pytest.approx(1.75)
    assert took["graph capture"] == pytest.approx(18)
    assert took["warm-up"] == pytest.approx(53 - 26.5 - 1.75 - 18)
    assert took["ready"] == pytest.approx(2.75)
    exact = {phase["phase"]: phase["within"] for phase in phases}
    assert exact["compile"] == exact["profiling"] == exact["graph capture"] == 0


def test_the_phases_of_a_gpu_start_are_in_their_order(cut, gpu):
    phases = names(cut(ended=GPU_ENDED))
    # Between compile and profiling there is a quarter of a second, which time stamps of a second cannot show.
    assert phases[phases.index("weights") :] == [
        "weights", "warm-up", "compile", "profiling", "warm-up", "graph capture", "warm-up", "ready",
    ]  # fmt: skip


def test_a_duration_that_does_not_fit_its_phase_takes_no_time_from_the_next():
    chain = [("executor", 0.0), ("core", 1.0), ("load", 2.0), ("loaded", 10.0), ("init", 20.0)]
    lines = [Line(what, wall, 1.0, None, "vllm log") for what, wall in chain]
    phases = cut_phases(-5.0, [*lines, Line("compile", 12.0, 1.0, 6.0, "vllm log")], -1.0, (), 21.0)["phases"]
    meet(phases)
    assert seconds(phases)["compile"] == 4
    assert seconds(phases)["warm-up"] == 10


@pytest.mark.parametrize(
    "line", ["saved AOT compiled function to /tmp", "Directly load AOT compilation from path /tmp"]
)
def test_on_cpus_the_time_to_compile_or_to_load_what_was_compiled_is_between_two_lines(cut, logs, line):
    text = CPU_COMPILE.replace("saved AOT compiled function to /tmp", line)
    (logs / f"{WORKER}.out").write_text(text)
    touch(logs)
    phases = cut(ended=at("05:14:33"))
    took = seconds(phases)
    assert took["compile"] == pytest.approx(63 - 0.11)  # the profiling run ends in the same second
    assert took["profiling"] == pytest.approx(0.11)
    assert took["warm-up"] == pytest.approx(8)
    assert {phase["within"] for phase in phases if phase["phase"] == "compile"} == {1.0}


def test_tags_and_colours_before_a_line_do_not_hide_it(cut, gpu):
    for path in gpu.glob("worker-*-90?.out"):
        text = path.read_text().replace("torch.compile took", "[backbone] torch.compile took")
        text = text.replace("INFO 11-21 05:14:40", "\x1b[32mINFO\x1b[0m \x1b[90m11-21 05:14:40\x1b[0m")
        path.write_text(text)
    touch(gpu)
    assert seconds(cut(ended=GPU_ENDED))["compile"] == pytest.approx(26.5)


def test_serves_log_may_be_json(cut, logs):
    (logs / f"{WORKER}.err").unlink()
    log = logs / SERVE_LOG
    log.write_text(
        '{"levelname": "INFO", "message": "Started initializing replica.", "asctime": "2026-11-21 05:12:28,891"}\n'
        '{"levelname": "INFO", "message": "Using executor class: x", "asctime": "2026-11-21 05:12:54,081"}\n'
    )
    took = seconds(cut())
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


def test_another_replica_that_starts_at_the_same_time_keeps_its_workers_to_itself(cut, gpu):
    another_replica(gpu, "05:13:00")
    took = seconds(cut(ended=GPU_ENDED))
    assert took["engine workers + weights + warm-up"] == pytest.approx(120)
    assert "compile" not in took


def test_another_replica_that_had_started_before_does_not_stand_in_the_way(cut, gpu):
    another_replica(gpu, "05:10:00")
    took = seconds(cut(ended=GPU_ENDED))
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


KINDS = ("starting", "creating", "replica", "executor", "core", "load", "weights", "loaded", "init",
         "compile", "profiling", "graph capture")  # fmt: skip
LINES = st.builds(
    Line,
    st.sampled_from(KINDS),
    st.floats(-50, 150),
    st.sampled_from([0.001, 1.0]),
    st.none() | st.floats(0, 60),
    st.just("vllm log"),
)


@given(
    st.lists(LINES, max_size=20),
    st.lists(st.tuples(st.sampled_from(["wait", "stage"]), st.floats(0, 100), st.floats(0, 50)), max_size=3),
    st.none() | st.floats(-50, 0),
)
def test_whatever_the_lines_say_the_phases_meet_and_no_second_counts_twice(lines, steps, process):
    phases = cut_phases(process, lines, 0.0, steps, 100.0)["phases"]
    meet(phases)
    assert all(phase["seconds"] >= 0 for phase in phases)
    assert all(phase["within"] >= 0 for phase in phases)
    if phases:
        whole = phases[-1]["at"] + phases[-1]["seconds"] - phases[0]["at"]
        assert sum(phase["seconds"] for phase in phases) == pytest.approx(whole, abs=0.03)
