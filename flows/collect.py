"""Flow `collect`: the ledgers of the nodes in one table, with a summary and a picture of the starts. Changes nothing."""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow
from prefect.logging import get_run_logger
from pydantic import Field

from flows.parameters import EVERY_NODE, as_path
from flows.run_page import show_markdown, show_table
from llm_prefetch.cluster import collect_ledgers, connected, ledger_page, select_nodes
from llm_prefetch.spec import NodeSelector

Hours = Annotated[float, Field(gt=0, le=24 * 366)]


@flow(
    name="collect",
    description="Collect what the nodes' ledgers tell of replica starts and stagings into one table and a picture.",
    persist_result=False,
)
def collect(
    deployment: str = "",
    hours: Hours = 24.0,
    nodes: NodeSelector = EVERY_NODE,
    address: str = "",
    root: str = "",
) -> dict[str, Any]:
    """Collect the ledgers of the selected nodes; one that cannot answer is a row with its error.

    Args:
        deployment: Only starts and stagings of this deployment; empty means all.
        hours: How many hours to look back.
        nodes: Which Ray nodes to ask; empty means every node.
        address: Address of the Ray cluster; empty means RAY_ADDRESS, or the cluster on the worker's machine.
        root: Root of the node store on every node; empty leaves it to the nodes' own LLM_PREFETCH_ROOT.

    Raises:
        PrefetchError: there is no cluster, or no node in it matches.
    """
    with connected(address or None):
        found = collect_ledgers(select_nodes(nodes), root=as_path(root), deployment=deployment, hours=hours)
    name = deployment or "all"
    show_table("collect", name, found.rows(), f"Starts and stagings of {name}, the newest first.")
    show_markdown("collect-summary", name, ledger_page(found, deployment, hours))
    counts = found.counts()
    get_run_logger().info("collected %d starts and %d stagings", counts["starts"], counts["stagings"])
    return counts
