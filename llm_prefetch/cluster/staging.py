"""Stage on every node, each with a report of its own, and all with the same versions."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from llm_prefetch.cluster.failures import lost
from llm_prefetch.cluster.reports import ClusterReport, Node, NodeReport
from llm_prefetch.cluster.run import Run
from llm_prefetch.cluster.stager import stager
from llm_prefetch.errors import ClusterError, PrefetchError
from llm_prefetch.plan import PlanSummary
from llm_prefetch.progress import Snapshot
from llm_prefetch.spec import Spec

_POLL_SECONDS = 1.0
_CANCEL_SECONDS = 5.0
_log = logging.getLogger(__name__)


class Running(Protocol):
    """A staging in progress on one node: a future of `concurrent.futures` or of Prefect."""

    def result(self) -> NodeReport:
        """Wait for the report."""


def stage_cluster(
    spec: Spec, nodes: Sequence[Node], start: Callable[[Node, Run], Running], *, stop: threading.Event
) -> ClusterReport:
    """Stage on all `nodes` at once; `start` begins one of them and says how to wait for it.

    No error of a node is raised: each is in its node's report. If this thread is interrupted, `stop` is set and the
    nodes are waited for, which takes seconds.
    """
    run = Run.of(spec)
    running: list[Running] = []
    try:
        running.extend(start(node, run) for node in nodes)
        reports = tuple(one.result() for one in running)
    except BaseException:
        stop.set()
        for one in running:
            with suppress(Exception):
                one.result()
        raise
    return ClusterReport(reports, spec.policy.needed(len(nodes)))


def stage_node(
    node: Node,
    spec: Spec,
    run: Run,
    *,
    root: Path | None,
    on_progress: Callable[[Node, Snapshot], None] = lambda _node, _snapshot: None,
    stop: threading.Event | None = None,
) -> NodeReport:
    """Stage on one node and wait for it; never raises what went wrong there.

    Args:
        node: Where.
        spec: What.
        run: What the nodes share.
        root: Root of the node store; `None` leaves it to the node's own `LLM_PREFETCH_ROOT`.
        on_progress: Told how far it is about once a second.
        stop: When set, the node stops within a piece; what is done is kept there.
    """
    stop, pins, told = stop or threading.Event(), run.pins, None

    def watch(actor: Any) -> None:  # noqa: ANN401 (Ray's handle)
        nonlocal told
        share = run.bandwidth.share
        if share is not None and share != told:
            actor.limit.remote(share)
            told = share
        snapshot = _soon(actor.snapshot.remote())
        if snapshot is not None:
            on_progress(node, snapshot)

    try:
        with stager(node, root) as actor:
            if not pins.complete:
                pins.offer(_wait(node, actor, actor.published.remote(spec.model_dump()), stop=stop))
            with pins.turn(stop), run.bandwidth.joined():
                told = run.bandwidth.share
                staging = actor.stage.remote(spec.model_dump(), pins.known, told)
                report, found = _wait(node, actor, staging, stop=stop, watch=watch)
                pins.settle(found)
            watch(actor)
    except PrefetchError as error:
        _log.info("%s: failed: %s", node.address, error)
        return NodeReport(node, error=error)
    _log.info(
        "%s: %s, %d bytes fetched, %d reused, %.1f s",
        node.address, report.verdict, report.fetched_bytes, report.reused_bytes, report.seconds,
    )  # fmt: skip
    return NodeReport(node, report=report)


def plan_node(node: Node, spec: Spec, *, root: Path | None) -> list[PlanSummary]:
    """What staging would do on one node.

    Raises:
        PrefetchError: as `stage.plan`, from the node.
    """
    with stager(node, root) as actor:
        summaries: list[PlanSummary] = _wait(node, actor, actor.plan.remote(spec.model_dump()))
    return summaries


def _wait(
    node: Node,
    actor: Any,  # noqa: ANN401 (Ray's handle)
    answer: Any,  # noqa: ANN401 (an ObjectRef)
    *,
    stop: threading.Event | None = None,
    watch: Callable[[Any], None] = lambda _actor: None,
) -> Any:  # noqa: ANN401 (whatever the actor answers)
    """What the actor answers; what it answers with an error, and what Ray fails with, is raised as our own."""
    try:
        while not ray.wait([answer], timeout=_POLL_SECONDS)[0]:
            watch(actor)
            if stop is not None and stop.is_set():
                actor.cancel.remote()
                if not ray.wait([answer], timeout=_CANCEL_SECONDS)[0]:
                    raise _cancelled(node)
        value = ray.get(answer)
    except RayError as error:
        value = lost(node, error)
    if isinstance(value, PrefetchError):
        raise _cancelled(node) if stop is not None and stop.is_set() else value
    return value


def _cancelled(node: Node) -> ClusterError:
    """Unlike what the transfer says then, no reason to try again."""
    return ClusterError(
        "the staging was cancelled", where=node.address, hint="stage again: what is done is kept there"
    )


def _soon(reference: Any) -> Snapshot | None:  # noqa: ANN401 (an ObjectRef)
    """The answer if it comes within the poll interval; an actor that is starting or dying does not hold us up."""
    try:
        snapshot: Snapshot = ray.get(reference, timeout=_POLL_SECONDS)
    except (RayError, TimeoutError):
        return None
    return snapshot
