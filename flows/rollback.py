"""Flow `rollback`: all selected nodes go back to the same earlier bundle, or none does."""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow, runtime
from pydantic import Field

from flows.outcome_page import show_outcome
from flows.parameters import EVERY_NODE, Deployment, as_path
from llm_prefetch.cluster import connected, rollback_cluster, select_holders
from llm_prefetch.spec import NodeSelector

To = Annotated[str, Field(pattern="^((bundle-)?[0-9a-f]{4,64})?$")]
Why = Annotated[str, Field(max_length=500)]


@flow(
    name="rollback",
    flow_run_name="rollback-{deployment}",
    description="Switch a deployment back to its earlier bundle on all selected nodes, or on none. It is held there: "
    "reconcile does not undo it, and what was left is not staged again.",
    persist_result=False,
)
def rollback(
    deployment: Deployment,
    *,
    to: To = "",
    why: Why = "",
    nodes: NodeSelector = EVERY_NODE,
    dry_run: bool = False,
    address: str = "",
    root: str = "",
) -> dict[str, Any]:
    """Roll `deployment` back; replicas that are starting are waited for.

    Args:
        deployment: Name of the deployment, as in its spec.
        to: The bundle to go to, or the beginning of its name. Empty: the one before, if that is the same on all nodes.
        why: The reason, for whoever wants to stage again what was left.
        nodes: Which Ray nodes; empty means every node that holds the deployment.
        dry_run: Only show where each node would go back to.
        address: Address of the Ray cluster; empty means RAY_ADDRESS, or the cluster on the worker's machine.
        root: Root of the node store on every node; empty leaves it to the nodes' own LLM_PREFETCH_ROOT.

    Raises:
        PrefetchError: a node cannot go back, or they differ, and nothing was changed; or a node failed on its way.
    """
    with connected(address or None):
        outcome = rollback_cluster(
            deployment,
            select_holders(deployment, nodes, root=as_path(root)),
            to=to,
            by=f"the flow run {runtime.flow_run.name}",
            why=why,
            root=as_path(root),
            dry_run=dry_run,
        )
    show_outcome("rollback", deployment, outcome)
    outcome.require_ready()
    return {"deployment": deployment, "ready": outcome.ready_nodes, "nodes": outcome.rows()}
