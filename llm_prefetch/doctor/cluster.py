"""The Ray cluster: whether it lets us in, and what its nodes say of themselves. The only part here that needs Ray."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

from llm_prefetch.doctor.findings import Finding
from llm_prefetch.doctor.machine import MachineFacts, look
from llm_prefetch.doctor.nodes import clock_finding, compare_nodes
from llm_prefetch.errors import PrefetchError
from llm_prefetch.spec import NodeSelector

_ANSWER_SECONDS = 60.0


def cluster_findings(address: str | None, root: Path | None) -> list[Finding]:
    """Ask every node of the cluster at `address`; what keeps us out is a finding too."""
    try:
        from llm_prefetch import cluster
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        return [Finding.failed("ray", "not installed in this Python", "pip install 'llm-prefetch[ray]'")]
    try:
        # Ray's threads print news of the cluster on stdout, where a program reads our answer.
        with contextlib.redirect_stdout(sys.stderr), cluster.connected(address):
            nodes = cluster.select_nodes(NodeSelector())
            found = [Finding.ok("ray", f"{len(nodes)} nodes")]
            asked, answered = time.time(), dict[str, float]()

            def note(answer: cluster.Answer[MachineFacts]) -> None:
                answered[answer.node.id] = time.time()

            where = str(root) if root else None
            answers = cluster.ask_nodes(nodes, look, where, seconds=_ANSWER_SECONDS, on_answer=note)
    except PrefetchError as error:
        return [Finding.of("ray", error)]
    facts: dict[str, MachineFacts] = {}
    for answer in answers:
        name = answer.node.address
        if answer.error is not None:
            found.append(Finding.of(f"node {name}", answer.error))
        elif answer.value is not None:
            facts[name] = answer.value
            found.append(clock_finding(name, answer.value.clock, asked, answered[answer.node.id]))
    return found + compare_nodes(facts)
