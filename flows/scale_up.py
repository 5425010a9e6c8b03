"""Flow `scale-up`: more replicas of a deployment in Ray Serve, on nodes where everything is staged before they start.

The order is what it is for: nodes, then the files on them, then Serve. Until then Serve is as it was. The staging is a
run of the flow `stage` of its own, below this one.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from prefect import flow
from prefect.logging import get_run_logger

from flows.parameters import as_path
from flows.run_page import show_markdown, show_table
from flows.stage import stage
from llm_prefetch.cluster import connected
from llm_prefetch.scaling.ray_cluster import RayCluster, dashboard_url
from llm_prefetch.scaling.scale_report import require_scaled
from llm_prefetch.scaling.scale_up import scale_up as bring_up
from llm_prefetch.scaling.serve_api import ServeDeployment, token_headers
from llm_prefetch.scaling.serve_target import ServeTarget
from llm_prefetch.spec import Spec


@flow(
    name="scale-up",
    flow_run_name="scale-up-{spec.deployment}",
    description="Get nodes, stage and verify a deployment on them, then have Ray Serve start more replicas.",
    persist_result=False,
)
def scale_up(spec: Spec, target: ServeTarget, address: str = "", root: str = "") -> dict[str, Any]:
    """Have the replicas that `target` wants, warm.

    Args:
        spec: What is staged, on the nodes that the replicas may go to.
        target: The deployment in Ray Serve, how many replicas, and how long that may take.
        address: Address of the Ray cluster; empty means RAY_ADDRESS, or the cluster on the worker's machine.
        root: Root of the node store on every node; empty leaves it to the nodes' own LLM_PREFETCH_ROOT.

    Raises:
        PrefetchError: not all wanted replicas run, or a new one is not warm; the message says what Serve is left with.
    """
    with connected(address or None):
        url = dashboard_url(target.dashboard)
        headers = token_headers(os.environ)
        report = bring_up(
            spec,
            target,
            serve=ServeDeployment(url, target.application, target.deployment, headers=headers),
            cluster=RayCluster(spec, as_path(root)),
            stage=partial(stage, spec, address=address, root=root),
        )
    show_table(
        "replicas",
        spec.deployment,
        report.rows(),
        f"`{target.application}`: the replicas of `{target.deployment}`",
    )
    show_markdown("scale-up", spec.deployment, report.markdown())
    require_scaled(report)
    get_run_logger().info("%s has %d replicas", target.deployment, len(report.replicas))
    return {"replicas": report.rows(), "steps": dict(report.steps)}
