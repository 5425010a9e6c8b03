"""Flow `stage`: make a deployment ready on every selected Ray node, ahead of scale-up.

One task run for each node does all artifacts there, so a run of many files is few rows in Prefect. Retries
follow our errors: what may pass is tried again, what will not is not. What counts is on the nodes: a run that
is repeated, cancelled or killed continues from their files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from prefect import flow, task
from prefect.artifacts import create_progress_artifact, create_table_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.tasks import exponential_backoff

from flows.parameters import Address, Root, as_path
from flows.run_page import artifact_key
from llm_prefetch.cluster import (
    Node,
    NodeReport,
    Run,
    connected,
    require_ready,
    select_nodes,
    stage_cluster,
    stage_node,
)
from llm_prefetch.errors import ClusterError, PrefetchError
from llm_prefetch.progress import PercentOfNodes, Snapshot
from llm_prefetch.redact import redact_text
from llm_prefetch.spec import Spec

if TYPE_CHECKING:
    from prefect.futures import PrefectFuture

_NODES_AT_ONCE = 64


@flow(
    name="stage",
    flow_run_name="stage-{spec.deployment}",
    description="Fetch, verify and commit everything a deployment launches with, on every selected Ray node.",
    task_runner=ThreadPoolTaskRunner(max_workers=_NODES_AT_ONCE),  # type: ignore[arg-type]
    persist_result=False,
)
def stage(spec: Spec, address: Address = "", root: Root = "") -> dict[str, Any]:
    """Stage `spec` on the cluster and switch its deployment live on every node that is ready.

    Args:
        spec: The deployment, its artifacts, the nodes that need them and the policy.
        address: Of the Ray cluster.
        root: Of the node store on every node.

    Raises:
        PrefetchError: fewer nodes are ready than `spec.policy.min_ready` asks for.
    """
    log = get_run_logger()
    store, stop = as_path(root), threading.Event()
    with connected(address or None):
        nodes = select_nodes(spec.nodes)
        log.info(
            "staging %s on %d nodes: %s", spec.deployment, len(nodes), ", ".join(n.address for n in nodes)
        )
        progress = _progress_artifact(spec, len(nodes))

        def start(node: Node, run: Run) -> _Running:
            def show(node: Node, snapshot: Snapshot) -> None:
                progress.update(node.id, snapshot)

            # A callable, because Prefect walks through arguments: a manifest has a digest for every 16 MiB.
            work = partial(stage_node, node, spec, run, root=store, on_progress=show, stop=stop)
            return _Running(
                node, stage_on_node.with_options(task_run_name=f"stage-{node.address}").submit(work)
            )

        # A run that is cancelled gets SIGTERM, which Prefect raises here: then the nodes are told to stop.
        report = stage_cluster(spec, nodes, start, stop=stop)
    create_table_artifact(
        key=artifact_key("stage", spec.deployment),
        table=report.rows(),
        description=f"`{spec.deployment}`: {report.ready_nodes} of {len(nodes)} nodes ready, {report.needed} needed.",
    )
    require_ready(report)
    progress.finish()
    log.info("%s is ready on %d of %d nodes", spec.deployment, report.ready_nodes, len(nodes))
    return {"deployment": spec.deployment, "ready": report.ready_nodes, "nodes": report.rows()}


def _retryable(_task: object, _task_run: object, state: Any) -> bool:  # noqa: ANN401 (a Prefect state)
    try:
        state.result()
    except PrefetchError as error:
        return error.retryable
    except Exception:  # noqa: BLE001 (a bug: trying it again will not mend it)
        return False
    return False


@task(
    retries=3,
    retry_delay_seconds=exponential_backoff(10),
    retry_jitter_factor=0.5,
    retry_condition_fn=_retryable,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def stage_on_node(work: Callable[[], NodeReport]) -> NodeReport:
    """Do the `work` of one node; its error is this task's error, so that Prefect can retry it."""
    report = work()
    if report.error is not None:
        raise report.error
    return report


class _Running:
    """A task run, waited for as the cluster module waits: an error becomes the node's report."""

    def __init__(self, node: Node, future: PrefectFuture[NodeReport]) -> None:
        self._node, self._future = node, future

    def result(self) -> NodeReport:
        """Wait for the report."""
        try:
            return self._future.result()
        except PrefetchError as error:
            return NodeReport(self._node, error=error)
        except Exception as error:  # noqa: BLE001 (whatever Prefect makes of a task run; the other nodes go on)
            reason = redact_text(str(error).strip().partition("\n")[0]) or type(error).__name__
            failed = ClusterError(
                f"the task run failed: {reason}", where=self._node.address, hint="see the log of the task run"
            )
            return NodeReport(self._node, error=failed)


def _progress_artifact(spec: Spec, nodes: int) -> PercentOfNodes:
    """One progress artifact for the run; each update of it is an event, so they are few."""
    artifact = create_progress_artifact(
        progress=0.0,
        key=artifact_key("progress", spec.deployment),
        description=f"Bytes of `{spec.deployment}` staged on {nodes} nodes",
    )

    def report(percent: float, _total: Snapshot) -> None:
        try:
            update_progress_artifact(artifact, progress=percent)  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001 (a server that is away for a moment does not end a staging)
            get_run_logger().warning("cannot report the progress: %s", error)

    return PercentOfNodes(report, nodes=nodes)
