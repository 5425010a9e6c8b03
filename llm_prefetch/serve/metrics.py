"""What Ray's metrics say of starts: how checks ended, which rung replicas start by, and how long that takes.

Ray exports them with its own, for Prometheus. Without a running Ray nothing is counted.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

from llm_prefetch.serve.ladder import told

_log = logging.getLogger("ray.serve.llm_prefetch")

VERDICTS = "llm_prefetch_verdicts"
RUNGS = "llm_prefetch_rungs"
VERIFY_SECONDS = "llm_prefetch_verify_seconds"
START_SECONDS = "llm_prefetch_start_seconds"

_VERIFY_BOUNDARIES = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0]
_START_BOUNDARIES = [5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 1200.0, 3600.0]


def count_start(
    verdict: str, rung: str, verify_seconds: float, start_seconds: float | None, deployment: str
) -> None:
    """Count one start; never raises.

    Args:
        verdict: What the first check of the node said.
        rung: What the replica started by: `hit`, a rung of `on_miss`, or `fail`.
        verify_seconds: How long the check took.
        start_seconds: From when the callback was called until the engine was ready; `None` if it never was.
        deployment: The live name.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return
    try:
        metrics = _metrics()
        metrics[VERDICTS].inc(tags={"deployment": deployment, "verdict": str(verdict)})
        metrics[RUNGS].inc(tags={"deployment": deployment, "rung": rung})
        metrics[VERIFY_SECONDS].observe(verify_seconds, tags={"deployment": deployment})
        if start_seconds is not None:
            metrics[START_SECONDS].observe(start_seconds, tags={"deployment": deployment, "rung": rung})
    except Exception as error:  # noqa: BLE001 (a start must not fail by what is told of it)
        _log.warning("llm-prefetch: this start is not in Ray's metrics: %s", told(error))


@functools.cache
def _metrics() -> dict[str, Any]:
    """Made once in a process, as Ray wants it."""
    from ray.util.metrics import Counter, Histogram

    return {
        VERDICTS: Counter(
            VERDICTS, "Starts of replicas by what the first check said.", ("deployment", "verdict")
        ),
        RUNGS: Counter(RUNGS, "Starts of replicas by the rung that they took.", ("deployment", "rung")),
        VERIFY_SECONDS: Histogram(
            VERIFY_SECONDS, "Seconds of the check of a node.", _VERIFY_BOUNDARIES, ("deployment",)
        ),
        START_SECONDS: Histogram(
            START_SECONDS,
            "Seconds from the callback's call until the engine is ready.",
            _START_BOUNDARIES,
            ("deployment", "rung"),
        ),
    }
