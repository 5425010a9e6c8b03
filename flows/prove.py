"""Flow `prove`: boot the engine once on one node of each kind, and see that it finds the compile cache."""

from __future__ import annotations

import threading
from typing import Any

from prefect import flow
from prefect.logging import get_run_logger

from flows.launch import Seconds, ServeYaml, find_launch
from flows.parameters import EVERY_NODE, as_path
from flows.run_page import show_table
from llm_prefetch.capturing.prove import prove as prove_cache
from llm_prefetch.capturing.prove import require_proof
from llm_prefetch.cluster import connected
from llm_prefetch.spec import NodeSelector


@flow(
    name="prove",
    description="Boot the engine once on one node of each kind: does it find the compile cache that is staged there?",
    persist_result=False,
)
def prove(
    serve_yaml: ServeYaml,
    application: str = "",
    model: str = "",
    nodes: NodeSelector = EVERY_NODE,
    deadline_seconds: Seconds = 1800.0,
    address: str = "",
    root: str = "",
) -> dict[str, Any]:
    """Prove the compile cache of what is live, and keep the answer in the ledger of every node that it holds for.

    Args:
        serve_yaml: Path of the Serve YAML on the worker's machine; a relative one is below the flow's folder.
        application: The application in it; needed only if it holds several.
        model: The model_id; needed only if the application serves several.
        nodes: Those that are proven; empty means every node.
        deadline_seconds: Seconds for the start of each replica.
        address: Address of the Ray cluster; empty means RAY_ADDRESS, or the cluster on the worker's machine.
        root: Root of the node store on every node; empty leaves it to the nodes' own LLM_PREFETCH_ROOT.

    Raises:
        NotReadyError: an engine missed its cache; the table says why.
        PrefetchError: no node is ready, or a replica did not start.
    """
    log, stop = get_run_logger(), threading.Event()
    launch = find_launch(serve_yaml, application, model)
    with connected(address or None):
        proven = prove_cache(
            launch, nodes=nodes, root=as_path(root), seconds=deadline_seconds, stop=stop, say=log.info
        )
    rows = [one.row() for one in proven]
    title = f"What engines of `{launch.deployment}` had of their compile cache, by kind of node."
    show_table("prove", launch.deployment, rows, title)
    require_proof(launch.deployment, proven)
    return {"deployment": launch.deployment, "kinds": rows}
