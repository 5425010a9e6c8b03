"""The cluster: the same staging on every selected Ray node, through actors that are pinned to their node.

The only part outside `serve/` that imports Ray. A node needs this package and nothing of Prefect. On each node
one actor does the work, because an actor can be asked how far it is and told to stop while it works. Nodes never
fail each other: each has its own report.
"""

from llm_prefetch.cluster.asking import Answer, ask_nodes
from llm_prefetch.cluster.nodes import connected, select_nodes
from llm_prefetch.cluster.reports import ClusterReport, Node, NodeReport, require_ready
from llm_prefetch.cluster.run import Run
from llm_prefetch.cluster.staging import Running, plan_node, stage_cluster, stage_node

__all__ = [
    "Answer",
    "ClusterReport",
    "Node",
    "NodeReport",
    "Run",
    "Running",
    "ask_nodes",
    "connected",
    "plan_node",
    "require_ready",
    "select_nodes",
    "stage_cluster",
    "stage_node",
]
