"""The cluster: the same staging on every selected Ray node, through actors that are pinned to their node.

A node needs this package and nothing of Prefect. On each node
one actor does the work, because an actor can be asked how far it is and told to stop while it works. Nodes never
fail each other: each has its own report.
"""

from llm_prefetch.cluster.applying import require_complete, require_planned
from llm_prefetch.cluster.asking import Answer, ask_nodes
from llm_prefetch.cluster.batches import Batch, Batches
from llm_prefetch.cluster.holders import select_holders
from llm_prefetch.cluster.ledger_page import ledger_page
from llm_prefetch.cluster.ledgers import ClusterLedger, collect_ledgers
from llm_prefetch.cluster.nodes import connected, select_nodes
from llm_prefetch.cluster.notices import Notice, notices, reconciled
from llm_prefetch.cluster.outcome import NodeOutcome, Outcome
from llm_prefetch.cluster.planning import ClusterPlan, plan_cluster
from llm_prefetch.cluster.reconcile import reconcile_cluster
from llm_prefetch.cluster.reports import ClusterReport, Node, NodeReport, require_ready
from llm_prefetch.cluster.rollback import rollback_cluster
from llm_prefetch.cluster.run import Run
from llm_prefetch.cluster.scrub import scrub_cluster
from llm_prefetch.cluster.staging import Running, stage_cluster, stage_node
from llm_prefetch.cluster.summary import manifest_links, plan_summary, summary

__all__ = [
    "Answer",
    "Batch",
    "Batches",
    "ClusterLedger",
    "ClusterPlan",
    "ClusterReport",
    "Node",
    "NodeOutcome",
    "NodeReport",
    "Notice",
    "Outcome",
    "Run",
    "Running",
    "ask_nodes",
    "collect_ledgers",
    "connected",
    "ledger_page",
    "manifest_links",
    "notices",
    "plan_cluster",
    "plan_summary",
    "reconcile_cluster",
    "reconciled",
    "require_complete",
    "require_planned",
    "require_ready",
    "rollback_cluster",
    "scrub_cluster",
    "select_holders",
    "select_nodes",
    "stage_cluster",
    "stage_node",
    "summary",
]
