"""Stage on every node, each with a report of its own, and all with the same versions."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from llm_prefetch.cluster.failures import lost, on_the_node
from llm_prefetch.cluster.reports import ClusterReport, Node, NodeReport
from llm_prefetch.cluster.run import Run
from llm_prefetch.errors import ClusterError, NotReadyError, PrefetchError
from llm_prefetch.live import DeploymentCheck
from llm_prefetch.progress import Snapshot
from llm_prefetch.spec import Spec

_POLL_SECONDS = 1.0
_CANCEL_SECONDS = 5.0
_CONFIRM_SECONDS = 60.0
_log = logging.getLogger(__name__)


class Running(Protocol):
    """A staging in progress on one node: a future of `concurrent.futures`, or a part of a batch."""

    def result(self) -> NodeReport:
        """Wait for the report."""


def stage_cluster(
    spec: Spec, nodes: Sequence[Node], start: Callable[[Node, Run], Running], *, stop: threading.Event
) -> ClusterReport:
    """Stage on all `nodes` at once; `start` begins one of them and says how to wait for it.

    When all are done, each node that is ready is asked once more: one that died after its report, or whose files
    were changed since, does not count. No error of a node is raised: each is in its node's report. If this thread
    is interrupted, `stop` is set and the nodes are waited for, which takes seconds.
    """
    run = Run.of(spec)
    running: list[Running] = []
    try:
        running.extend(start(node, run) for node in nodes)
        reports = _confirmed([one.result() for one in running], run)
    except BaseException:
        stop.set()
        for one in running:
            with suppress(Exception):
                one.result()
        raise
    finally:
        run.stagers.close()
    return ClusterReport(tuple(reports), spec.policy.needed(len(nodes)), run.pins.published)


def stage_node(
    node: Node,
    spec: Spec,
    run: Run,
    *,
    root: Path | None,
    called: Sequence[str] = (),
    on_progress: Callable[[Node, Snapshot], None] = lambda _node, _snapshot: None,
    stop: threading.Event | None = None,
) -> NodeReport:
    """Stage on one node and wait for it; never raises what went wrong there.

    Args:
        node: Where.
        spec: What.
        run: What the nodes share.
        root: Root of the node store; `None` leaves it to the node's own `LLM_PREFETCH_ROOT`.
        called: What Prefect calls the deployment, for `names.remember` on the node.
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
        with run.stagers.on(node, root) as actor:
            if not pins.complete:
                pins.offer(_wait(node, actor, actor.published.remote(spec.model_dump()), stop=stop))
            with pins.turn(stop), run.bandwidth.joined():
                told = run.bandwidth.share
                staging = actor.stage.remote(spec.model_dump(), pins.known, told, tuple(called))
                staged = _wait(node, actor, staging, stop=stop, watch=watch)
                pins.settle(staged.manifests)
            watch(actor)
    except PrefetchError as error:
        _log.info("%s: failed: %s", node.address, error)
        return NodeReport(node, error=on_the_node(node, error))
    report = staged.report
    _log.info(
        "%s: %s, %d bytes fetched, %d reused, %.1f s",
        node.address, staged.check.verdict, report.fetched_bytes, report.reused_bytes, report.seconds,
    )  # fmt: skip
    return looked_at(NodeReport(node, report, root=staged.root), staged.check)


def looked_at(done: NodeReport, check: DeploymentCheck) -> NodeReport:
    """The report of a node where the staging was `done`, once `check` has looked at what lies there."""
    if done.report is not None and check.bundle not in ("", done.report.bundle):
        error = NotReadyError(
            f"{check.bundle} is live there and not what this run staged",
            where=done.node.address,
            hint="stage one deployment from one spec at a time, then stage again",
        )
        return replace(done, check=None, error=error)
    if not check.ready:
        error = NotReadyError(
            f"{check.deployment} is {check.verdict} after it was staged: {check.reason}",
            where=done.node.address,
            hint="something else changes its files; find it, then stage again",
        )
        return replace(done, check=check, error=error)
    return replace(done, check=check)


def _confirmed(reports: Sequence[NodeReport], run: Run) -> list[NodeReport]:
    """The reports, after each node that is ready was asked once more what lies there."""
    asked = {}
    for place, report in enumerate(reports):
        actor = run.stagers.done(report.node)
        if report.ready and report.report is not None and actor is not None:
            asked[actor.check.remote(report.report.deployment)] = place
    waiting, ends = list(asked), time.monotonic() + _CONFIRM_SECONDS
    while waiting and time.monotonic() < ends:
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_SECONDS)
    confirmed = list(reports)
    for reference, place in asked.items():
        confirmed[place] = _confirm(reports[place], None if reference in waiting else reference)
    return confirmed


def _confirm(done: NodeReport, answer: Any | None) -> NodeReport:  # noqa: ANN401 (an ObjectRef)
    """The report with what the node answers, or with why it does not."""
    found: DeploymentCheck | PrefetchError
    try:
        found = ray.get(answer) if answer is not None else _silent(done.node)
    except RayError as error:
        found = lost(done.node, error)
    if not isinstance(found, PrefetchError):
        return looked_at(done, found)
    _log.info("%s: staged, and then lost: %s", done.node.address, found)
    return replace(done, check=None, error=found)


def _silent(node: Node) -> ClusterError:
    return ClusterError(
        f"it was staged, and then said nothing for {_CONFIRM_SECONDS:g} s",
        where=node.address,
        hint="is the node still there? Run the same again",
    )


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
