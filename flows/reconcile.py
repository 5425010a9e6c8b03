"""Flow `reconcile`: stage on those selected nodes that lack what the spec asks for now, because they joined or lost it.

Safe to run every minute: where nothing lacks it asks each node once and reads no byte of an artifact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from flows.events import announce
from flows.outcome_page import show_outcome
from flows.parameters import as_path
from flows.stage import stage_on
from llm_prefetch.cluster import (
    ClusterReport,
    Node,
    connected,
    reconcile_cluster,
    reconciled,
    select_nodes,
)
from llm_prefetch.spec import Spec

_TASKS_AT_ONCE = 64


@flow(
    name="reconcile",
    flow_run_name="reconcile-{spec.deployment}",
    description="Stage a deployment on those selected nodes that joined, lost it or hold another version. "
    "Safe to run every minute.",
    task_runner=ThreadPoolTaskRunner(max_workers=_TASKS_AT_ONCE),  # type: ignore[arg-type]
    persist_result=False,
)
def reconcile(spec: Spec, *, dry_run: bool = False, address: str = "", root: str = "") -> dict[str, Any]:
    """Stage `spec` where it lacks. What a rollback went back to is kept until another version is staged.

    Args:
        spec: The deployment, its artifacts, the nodes that need them and the policy.
        dry_run: Only show which nodes lack what, and stage nothing.
        address: Address of the Ray cluster; empty means RAY_ADDRESS, or the cluster on the worker's machine.
        root: Root of the node store on every node; empty leaves it to the nodes' own LLM_PREFETCH_ROOT.

    Raises:
        PrefetchError: fewer nodes are ready than `spec.policy.min_ready` asks for, or nothing tells what is wanted.
    """
    staged: list[ClusterReport] = []

    def stage(spec: Spec, nodes: Sequence[Node]) -> ClusterReport:
        staged.append(stage_on(list(nodes), spec, root))
        return staged[-1]

    with connected(address or None):
        nodes = select_nodes(spec.nodes)
        outcome = reconcile_cluster(spec, nodes, stage, root=as_path(root), dry_run=dry_run)
    show_outcome("reconcile", spec.deployment, outcome)
    for report in staged:
        announce(reconciled(spec.deployment, report, outcome))
    if not dry_run:
        outcome.require_ready()
    return {"deployment": spec.deployment, "ready": outcome.ready_nodes, "nodes": outcome.rows()}
