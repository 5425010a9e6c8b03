"""Flow `capture`: build the compile cache of a deployment on one node, and publish it for all others."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from prefect.logging import get_run_logger
from pydantic import Field

from flows.launch import Seconds, ServeYaml, find_launch
from flows.parameters import EVERY_NODE, as_path
from flows.run_page import show_markdown
from llm_prefetch.capturing.capture import capture as capture_cache
from llm_prefetch.cluster import connected
from llm_prefetch.signatures import load_signing_key
from llm_prefetch.spec import NodeSelector

To = Annotated[str, Field(min_length=1)]


@flow(
    name="capture",
    description="Start one replica more, let its engine compile, publish what it leaves, and take it down again.",
    persist_result=False,
)
def capture(
    serve_yaml: ServeYaml,
    to: To,
    application: str = "",
    model: str = "",
    nodes: NodeSelector = EVERY_NODE,
    deadline_seconds: Seconds = 1800.0,
    address: str = "",
    root: str = "",
    sign: str = "",
) -> dict[str, Any]:
    """Capture a compile cache, on a node that has the model staged and no replica of it.

    Args:
        serve_yaml: Path of the Serve YAML on the worker's machine; a relative one is below the flow's folder.
        to: Where the artifact goes, such as s3://bucket/caches/llama-3-8b-a10g.
        application: The application in it; needed only if it holds several.
        model: The model_id; needed only if the application serves several.
        nodes: It is captured on one of these; empty means any node.
        deadline_seconds: Seconds for the start of the replica.
        address: Address of the Ray cluster; empty means RAY_ADDRESS, or the cluster on the worker's machine.
        root: Root of the node store on every node; empty leaves it to the nodes' own LLM_PREFETCH_ROOT.
        sign: Path of a private key on the worker's machine, which signs the artifact; the nodes never see it.

    Raises:
        PrefetchError: the key is no use, no node is ready, the replica did not start, or the origin refused.
    """
    log, stop = get_run_logger(), threading.Event()
    key = load_signing_key(Path(sign)) if sign else None
    launch = find_launch(serve_yaml, application, model)
    with connected(address or None):
        report = capture_cache(
            launch,
            to,
            nodes=nodes,
            root=as_path(root),
            seconds=deadline_seconds,
            stop=stop,
            say=log.info,
            key=key,
        )
    show_markdown(
        "capture",
        launch.deployment,
        f"The compile cache of `{launch.deployment}`, captured on {report.node}. Add it to the artifacts of its spec:\n\n"
        f"```yaml\n- {json.dumps(report.artifact)}\n```\n",
    )
    return report.facts()
