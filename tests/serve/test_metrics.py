"""Ray's metrics of starts, as Prometheus would read them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}

COUNT_AND_READ = """
import logging, socket, sys, time, urllib.request
import ray
log = logging.getLogger("ray.serve.llm_prefetch")
log.addHandler(logging.StreamHandler())
log.setLevel("INFO")
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
ray.init("local", num_cpus=1, include_dashboard=False, _metrics_export_port=port, logging_level="ERROR",
         _temp_dir=sys.argv[1], _system_config={"metrics_report_interval_ms": 500})
from llm_prefetch.serve.metrics import count_start
count_start("HIT", "hit", 0.0012, 33.0, "llama")
count_start("HIT", "hit", 0.0007, 12.0, "llama")
count_start("MISSING", "fail", 0.0030, None, "llama")
for _ in range(120):
    time.sleep(0.5)
    try:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    except OSError:
        continue
    if "start_seconds_sum" in text and 'verdict="MISSING"' in text:
        break
print(text)
ray.shutdown()
"""


@pytest.mark.ray
def test_starts_are_counted_by_verdict_and_rung_and_their_seconds_are_in_histograms():
    with tempfile.TemporaryDirectory(prefix="lpf-", dir="/tmp") as folder:  # a socket's path must be short
        done = subprocess.run(
            [sys.executable, "-c", COUNT_AND_READ, folder],
            env={name: value for name, value in ENVIRONMENT.items() if not name.startswith("RAY_")},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "not in Ray's metrics" not in done.stderr
    text = done.stdout
    assert value(text, "verdicts_total", verdict="HIT") == 2
    assert value(text, "verdicts_total", verdict="MISSING") == 1
    assert value(text, "rungs_total", rung="hit") == 2
    assert value(text, "rungs_total", rung="fail") == 1
    assert value(text, "verify_seconds_count") == 3
    assert value(text, "verify_seconds_bucket", le="0.001") == 1
    assert value(text, "verify_seconds_bucket", le="0.002") == 2
    # A start that has failed has no time until it was ready.
    assert value(text, "start_seconds_count", rung="hit") == 2
    assert value(text, "start_seconds_bucket", rung="hit", le="20.0") == 1
    assert value(text, "start_seconds_bucket", rung="hit", le="45.0") == 2


def value(text: str, name: str, **labels: str) -> float:
    lines = [line for line in text.splitlines() if line.startswith(f"ray_llm_prefetch_{name}{{")]
    wanted = {"deployment": "llama", **labels}
    [line] = [line for line in lines if wanted.items() <= dict(re.findall(r'(\w+)="([^"]*)"', line)).items()]
    return float(line.rpartition(" ")[2])


def test_without_a_running_ray_nothing_is_counted_and_ray_is_not_even_loaded():
    done = subprocess.run(
        [sys.executable, "-c",
         "import sys; from llm_prefetch.serve.metrics import count_start as c;"  # noqa: ISC004
         "c('HIT', 'hit', 0.1, 1.0, 'llama'); print('ray' in sys.modules);"
         "import ray; c('HIT', 'hit', 0.1, 1.0, 'llama'); print(ray.is_initialized())"],
        env=ENVIRONMENT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["False", "False"]
    assert done.stderr == ""
