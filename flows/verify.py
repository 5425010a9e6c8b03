"""Flow `verify`: the scrub. Every selected node reads what is live on its disk, and damage is repaired or put away."""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow
from prefect.logging import get_run_logger
from pydantic import Field

from flows.outcome_page import show_outcome
from flows.parameters import EVERY_NODE, Deployment, as_path
from llm_prefetch.cluster import NodeOutcome, connected, scrub_cluster, select_holders
from llm_prefetch.scrub import OnDamage
from llm_prefetch.spec import NodeSelector

_SECONDS_PER_HOUR = 3600.0

Rate = Annotated[float, Field(ge=0)]
Hours = Annotated[float, Field(gt=0)]


@flow(
    name="verify",
    flow_run_name="verify-{deployment}",
    description="Read and hash every byte that is live on the selected nodes; repair or quarantine what is damaged. "
    "Completed only if all of them are right then.",
    persist_result=False,
)
def verify(
    deployment: Deployment,
    *,
    full: bool = True,
    on_damage: OnDamage = "repair",
    megabytes_per_second: Rate = 0.0,
    hours: Hours = 12.0,
    nodes: NodeSelector = EVERY_NODE,
    address: str = "",
    root: str = "",
) -> dict[str, Any]:
    """Scrub `deployment` on every selected node.

    Args:
        deployment: Name of the deployment, as in its spec.
        full: Read every byte; otherwise only what one look at each file tells.
        on_damage: repair fetches the wrong chunks again; quarantine takes the version out of use; report leaves it.
            Whatever it is, no replica starts on a version that a full check found damaged.
        megabytes_per_second: Most to read from the disk of one node; 0 is no limit.
        hours: How long it may take; a node that is not done then counts as failed.
        nodes: Which Ray nodes; empty means every node that holds the deployment.
        address: Address of the Ray cluster; empty means RAY_ADDRESS, or the cluster on the worker's machine.
        root: Root of the node store on every node; empty leaves it to the nodes' own LLM_PREFETCH_ROOT.

    Raises:
        PrefetchError: a node does not hold what its manifests say.
    """
    log = get_run_logger()

    def tell(node: NodeOutcome) -> None:
        log.info("%s: %s", node.node.address, node.error or node.verdict)

    with connected(address or None):
        outcome = scrub_cluster(
            deployment,
            select_holders(deployment, nodes, root=as_path(root)),
            full=full,
            on_damage=on_damage,
            bytes_per_second=megabytes_per_second * 1e6 or None,
            seconds=hours * _SECONDS_PER_HOUR,
            root=as_path(root),
            on_node=tell,
        )
    show_outcome("verify", deployment, outcome)
    outcome.require_ready()
    return {"deployment": deployment, "ready": outcome.ready_nodes, "nodes": outcome.rows()}
