"""What a start leaves in the logs of Ray and vLLM: a real one on the CPU engine, and a GPU's strings."""

from __future__ import annotations

import calendar
import os
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from llm_prefetch.serve.start_log import Files, read_lines
from llm_prefetch.serve.start_phases import Step, cut_phases

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


def at(clock: str, day: str = "2026-11-21") -> float:
    """The wall clock at HH:MM:SS.mmm in the time zone of the samples."""
    whole, _, fraction = clock.partition(".")
    return calendar.timegm(time.strptime(f"{day} {whole}", "%Y-%m-%d %H:%M:%S")) + float(f"0.{fraction or 0}")


PROCESS = at("05:11:40.900")
"""When the process of the real start began."""
BEGAN = at("05:12:31.103")
"""When our callback was called."""
ENDED = at("05:13:33.550")
"""When the engine was ready."""
GPU_ENDED = at("05:15:08.25")
STEPS = (("verify", BEGAN, 0.0011),)


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The time zone that the samples were written in."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def logs(utc: None, tmp_path: Path) -> Path:
    """The session's folder of logs as the real start left it."""
    folder = tmp_path / "logs"
    for part in SAMPLE.read_text().split("==> ")[1:]:
        name, _, text = part.partition(" <==\n")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    touch(folder)
    return folder


@pytest.fixture
def gpu(logs: Path) -> Path:
    """The same start with vLLM's workers as actors of Ray: what they log is in files of their own."""
    (logs / f"{WORKER}.out").write_text(GPU_CORE)
    rank = logs / "worker-aaaa-03000000-900.out"
    rank.write_text(":job_id:03000000\n:actor_name:RayWorkerProc\n" + GPU_RANK)
    # The other rank is faster in all.
    slower = GPU_RANK.replace("26.50", "25.00").replace("05:14:12", "05:14:11").replace("in 18", "in 17")
    (logs / "worker-bbbb-03000000-901.out").write_text(":actor_name:RayWorkerProc\n" + slower)
    touch(logs)
    return logs


def touch(folder: Path) -> None:
    """Let everything there be written last when the start ended."""
    for path in folder.rglob("*"):
        os.utime(path, (ENDED, ENDED))


def cut(
    logs: Path,
    *,
    began: float = BEGAN,
    ended: float = ENDED,
    process: float | None = PROCESS,
    steps: tuple[Step, ...] = STEPS,
) -> list[dict[str, Any]]:
    """The phases that the folder tells."""
    files = Files((logs / f"{WORKER}.out", logs / f"{WORKER}.err"), logs / SERVE_LOG)
    phases: list[dict[str, Any]] = cut_phases(
        process, list(read_lines(files, began, began)), began, steps, ended
    )["phases"]
    meet(phases)
    return phases


def meet(phases: list[dict[str, Any]]) -> None:
    """Each phase begins where the one before ends."""
    for before, after in pairwise(phases):
        assert before["at"] + before["seconds"] == pytest.approx(after["at"], abs=0.002)


def seconds(phases: list[dict[str, Any]]) -> dict[str, float]:
    """How long each phase took, all its parts together."""
    sums: dict[str, float] = {}
    for phase in phases:
        sums[phase["phase"]] = sums.get(phase["phase"], 0) + phase["seconds"]
    return sums


def names(phases: list[dict[str, Any]]) -> list[str]:
    """The phases in their order."""
    return [phase["phase"] for phase in phases]
