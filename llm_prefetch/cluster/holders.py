"""Which nodes a run is about that names a deployment and no spec."""

from __future__ import annotations

from pathlib import Path

from llm_prefetch.cluster.asking import ask_nodes
from llm_prefetch.cluster.inspection import live_bundle
from llm_prefetch.cluster.nodes import select_nodes
from llm_prefetch.cluster.reports import Node
from llm_prefetch.errors import NotReadyError
from llm_prefetch.spec import NodeSelector

_SECONDS = 120.0


def select_holders(deployment: str, selector: NodeSelector, *, root: Path | None) -> list[Node]:
    """The nodes of `selector`; where it selects every node, those that hold `deployment`, or do not say.

    Raises:
        ClusterError: no node matches.
        NotReadyError: no node holds it.
    """
    nodes = select_nodes(selector)
    if selector != NodeSelector():
        return nodes
    answers = ask_nodes(nodes, live_bundle, deployment, root, seconds=_SECONDS)
    holders = [answer.node for answer in answers if answer.value is None or answer.value.bundle]
    if not holders:
        raise NotReadyError(
            f"{deployment} is live on none of {len(nodes)} nodes",
            where="the Ray cluster",
            hint="check the name and the root, or stage it",
        )
    return holders
