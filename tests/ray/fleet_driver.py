"""A driver for what looks after nodes that are staged: run on a host with `-m`, it prints what came of it as JSON."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llm_prefetch.cluster import (
    ClusterReport,
    Node,
    Outcome,
    connected,
    reconcile_cluster,
    rollback_cluster,
    scrub_cluster,
    select_holders,
    select_nodes,
    stage_cluster,
    stage_node,
)
from llm_prefetch.spec import NodeSelector, Spec


def reconcile(spec: dict[str, Any], *, dry_run: bool = False) -> Outcome:
    parsed = Spec.model_validate(spec)
    return reconcile_cluster(parsed, select_nodes(parsed.nodes), stage, dry_run=dry_run)


def stage(spec: Spec, nodes: Sequence[Node]) -> ClusterReport:
    stop = threading.Event()
    with ThreadPoolExecutor(8) as pool:

        def start(node: Node, run: Any) -> Any:
            return pool.submit(stage_node, node, spec, run, root=None, stop=stop)

        return stage_cluster(spec, nodes, start, stop=stop)


def rollback(deployment: str, **how: Any) -> Outcome:
    return rollback_cluster(deployment, select_holders(deployment, NodeSelector(), root=None), **how)


def scrub(deployment: str, **how: Any) -> Outcome:
    return scrub_cluster(deployment, select_nodes(NodeSelector()), **{"seconds": 120.0, **how})


def plain(outcome: Outcome) -> dict[str, Any]:
    return {
        "ready": outcome.ready,
        "note": outcome.note,
        "refusal": str(outcome.refusal or ""),
        "nodes": {row["node"]: row for row in outcome.rows()},
    }


if __name__ == "__main__":
    calls = {work.__name__: work for work in (reconcile, rollback, scrub)}
    with connected():
        for name, what, how in json.loads(sys.argv[1]):
            print("fleet:" + json.dumps(plain(calls[name](what, **how))), flush=True)
