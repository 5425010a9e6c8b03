"""Flow `stage`: make a deployment ready on every selected Ray node, ahead of scale-up.

One task run for each node does all artifacts there, so a run of many files is few rows in Prefect; beyond 64 nodes, a
task run has several. Retries follow our errors: what may pass is tried again, what will not is not. What counts is on
the nodes: a run that is repeated, cancelled or killed continues from their files.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Annotated, Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.tasks import exponential_backoff
from pydantic import Field

from flows.events import announce
from flows.own_deployment import called
from flows.parameters import as_path
from flows.run_page import live_progress, show_markdown, show_run, show_table
from llm_prefetch.cluster import (
    Batch,
    Batches,
    ClusterPlan,
    ClusterReport,
    Node,
    NodeReport,
    Run,
    connected,
    notices,
    plan_cluster,
    plan_summary,
    require_complete,
    require_planned,
    require_ready,
    select_nodes,
    stage_cluster,
    stage_node,
)
from llm_prefetch.errors import PrefetchError
from llm_prefetch.progress import PercentOfNodes, Snapshot
from llm_prefetch.spec import Spec

_TASKS_AT_ONCE = 64

PlanId = Annotated[str, Field(pattern="^(plan-[0-9a-f]{12})?$")]


@flow(
    name="stage",
    flow_run_name="stage-{spec.deployment}",
    description="Fetch, verify and commit everything a deployment launches with, on every selected Ray node.",
    task_runner=ThreadPoolTaskRunner(max_workers=_TASKS_AT_ONCE),  # type: ignore[arg-type]
    persist_result=False,
)
def stage(
    spec: Spec, address: str = "", root: str = "", *, dry_run: bool = False, plan: PlanId = ""
) -> dict[str, Any]:
    """Stage `spec` on the cluster and switch its deployment live on every node that is ready.

    Args:
        spec: The deployment, its artifacts, the nodes that need them and the policy.
        address: Address of the Ray cluster; empty means RAY_ADDRESS, or the cluster on the worker's machine.
        root: Root of the node store on every node; empty leaves it to the nodes' own LLM_PREFETCH_ROOT.
        dry_run: Show what would be staged on each node, and stage nothing.
        plan: Id of the plan that a dry run has shown; if it is not true any more, nothing is staged. Empty: no plan.

    Raises:
        PrefetchError: fewer nodes are ready than `spec.policy.min_ready` asks for.
    """
    report: ClusterReport | None = None
    try:
        with connected(address or None):
            nodes = select_nodes(spec.nodes)
            if dry_run or plan:
                planned = plan_cluster(spec, nodes, root=as_path(root))
                if dry_run:
                    return _show_plan(spec, planned)
                require_planned(plan, planned)
            report = stage_on(nodes, spec, root)
        require_ready(report)
    except PrefetchError as error:
        show_run(spec, report, error)
        if not dry_run:  # nothing was to be staged
            announce(notices(spec.deployment, report, error))
        raise
    show_run(spec, report, None)
    announce(notices(spec.deployment, report, None))
    get_run_logger().info(
        "%s is ready on %d of %d nodes", spec.deployment, report.ready_nodes, len(report.nodes)
    )
    return {"deployment": spec.deployment, "ready": report.ready_nodes, "nodes": report.rows()}


def stage_on(nodes: list[Node], spec: Spec, root: str) -> ClusterReport:
    """Stage `spec` on `nodes`, in task runs of the flow run that calls; what became of each is in the report."""
    get_run_logger().info(
        "staging %s on %d nodes: %s", spec.deployment, len(nodes), ", ".join(n.address for n in nodes)
    )
    stop, names = threading.Event(), called(spec.deployment)
    with live_progress(spec.deployment, len(nodes)) as progress:

        def work(node: Node, run: Run) -> NodeReport:
            show = partial(_show, progress)
            return stage_node(node, spec, run, root=as_path(root), called=names, on_progress=show, stop=stop)

        # A run that is cancelled gets SIGTERM, which Prefect raises here: then the nodes are told to stop.
        report = stage_cluster(spec, nodes, Batches(nodes, work, _submit).start, stop=stop)
        progress.finish(complete=report.ready)
    return report


def _show(progress: PercentOfNodes, node: Node, snapshot: Snapshot) -> None:
    progress.update(node.id, snapshot)


def _submit(batch: Batch) -> Any:  # noqa: ANN401 (a future of Prefect's)
    return stage_on_nodes.with_options(task_run_name=f"stage-{batch.name}").submit(batch)


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
def stage_on_nodes(batch: Batch) -> None:
    """Stage on the nodes of `batch`; what failed there is this task's error, so that Prefect can retry it."""
    batch()


def _show_plan(spec: Spec, planned: ClusterPlan) -> dict[str, Any]:
    rows = planned.rows()
    for row in rows:
        get_run_logger().info("%s: %s", planned.id, ", ".join(f"{key} {value}" for key, value in row.items()))
    show_table(
        "plan", spec.deployment, rows, f"`{spec.deployment}`: the plan `{planned.id}`; nothing was staged."
    )
    show_markdown("planned", spec.deployment, plan_summary(spec, planned.id, rows))
    require_complete(planned)
    return {"deployment": spec.deployment, "plan": planned.id, "nodes": rows}
