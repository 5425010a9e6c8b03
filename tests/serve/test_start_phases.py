"""Where a start spent its time: phases that meet, each with who measured it and how far it may be off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_prefetch.serve.start_phases import Line, cut_phases
from tests.serve.start_samples import (
    ENDED,
    GPU_ENDED,
    PROCESS,
    SERVE_LOG,
    WORKER,
    at,
    cut,
    meet,
    names,
    seconds,
    touch,
)

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


def test_a_real_start_on_the_cpu_engine_is_told_from_the_order_for_a_replica_until_the_engine_is_ready(logs):
    phases = cut(logs)
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


def test_the_first_moment_of_the_process_is_zero_and_what_was_before_is_negative(logs):
    phases = cut(logs)
    assert [phase["at"] for phase in phases[:2]] == [pytest.approx(-2.265), 0]


def test_each_phase_says_who_measured_it_and_how_far_it_may_be_off(logs):
    told = {phase["phase"]: (phase["source"], phase["within"]) for phase in cut(logs)}
    assert told["verify"] == ("clock", 0)
    assert told["imports"] == ("ray log", pytest.approx(0.001))
    assert told["engine workers"] == ("vllm log", 1.0)
    assert told["ready"] == ("vllm log", 0.5)


def test_what_took_less_than_a_time_stamp_shows_is_there_and_says_so(logs):
    [weights] = [phase for phase in cut(logs) if phase["phase"] == "weights"]
    assert (weights["seconds"], weights["within"]) == (0, 1.0)


def test_without_the_controllers_log_the_time_to_be_scheduled_is_left_out(logs):
    (logs / "serve" / "controller_563.log").unlink()
    assert names(cut(logs))[:2] == ["process", "imports"]


def test_a_process_that_had_waited_for_work_is_no_part_of_the_start(logs):
    phases = cut(logs, process=PROCESS - 3600)
    assert names(phases)[:2] == ["schedule", "imports"]
    assert phases[0]["seconds"] == pytest.approx(4.975)
    (logs / "serve" / "controller_563.log").unlink()
    phases = cut(logs, process=PROCESS - 3600)
    assert (phases[0]["phase"], phases[0]["at"]) == ("imports", 0)


def test_a_start_that_fails_ends_in_the_phase_that_it_had_come_to(logs):
    out = logs / f"{WORKER}.out"
    out.write_text(out.read_text().partition("(Worker pid=306) INFO 11-21 05:13:31 [default_loader.py")[0])
    phases = cut(logs, ended=at("05:14:00"))
    assert phases[-1]["phase"] == "weights"
    assert phases[-1]["seconds"] == pytest.approx(28.5)


def test_phases_that_no_line_tells_apart_are_joined_and_never_given_as_nothing(logs):
    out = logs / f"{WORKER}.out"
    kept = [line for line in out.read_text().splitlines(keepends=True) if "oad" not in line]
    out.write_text("".join(kept))
    touch(logs)
    took = seconds(cut(logs))
    assert took["engine workers + weights + warm-up"] == pytest.approx(17)
    assert "weights" not in took


def test_an_engine_that_logs_nothing_is_told_by_rays_lines_and_our_clock_alone(logs):
    (logs / f"{WORKER}.out").write_text("")
    (logs / f"{WORKER}.err").unlink()
    phases = cut(logs)
    assert names(phases)[-1] == "engine process"
    (logs / SERVE_LOG).unlink()
    assert names(cut(logs, steps=()))[-1] == "verify + engine config"


def test_on_gpus_what_vllm_measures_itself_is_taken_as_it_says(gpu):
    phases = cut(gpu, ended=GPU_ENDED)
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


def test_the_phases_of_a_gpu_start_are_in_their_order(gpu):
    phases = names(cut(gpu, ended=GPU_ENDED))
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
def test_on_cpus_the_time_to_compile_or_to_load_what_was_compiled_is_between_two_lines(logs, line):
    text = CPU_COMPILE.replace("saved AOT compiled function to /tmp", line)
    (logs / f"{WORKER}.out").write_text(text)
    touch(logs)
    phases = cut(logs, ended=at("05:14:33"))
    took = seconds(phases)
    assert took["compile"] == pytest.approx(63 - 0.11)  # the profiling run ends in the same second
    assert took["profiling"] == pytest.approx(0.11)
    assert took["warm-up"] == pytest.approx(8)
    assert {phase["within"] for phase in phases if phase["phase"] == "compile"} == {1.0}


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
