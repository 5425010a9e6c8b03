"""Prove: boot the engine once on one node of each kind, and see that it finds the compile cache that was staged there.

A cache that is staged may still be missed, and no engine says so. What one node shows holds for all with the same
identity and the same bundle, so it is written into the ledger of each of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_prefetch import ledger
from llm_prefetch.caches.evidence import Outcome
from llm_prefetch.caches.proof import Proof, record_proof
from llm_prefetch.capturing.capture import candidates
from llm_prefetch.capturing.capture_node import Candidate
from llm_prefetch.capturing.launch import Launch
from llm_prefetch.capturing.trial import serve_running, trial_replica
from llm_prefetch.cluster.asking import ask_node, ask_nodes
from llm_prefetch.cluster.nodes import select_nodes
from llm_prefetch.cluster.reports import Node
from llm_prefetch.errors import ClusterError, NotReadyError
from llm_prefetch.spec import NodeSelector
from llm_prefetch.store import open_store

_NODE_SECONDS = 60.0
_ROW_SECONDS = 15.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Proven:
    """What one kind of node shows."""

    proof: Proof
    nodes: tuple[str, ...]
    """All that it holds for."""

    def row(self) -> dict[str, Any]:
        """As tables show it."""
        return {
            "booted_on": self.proof.node,
            "nodes": len(self.nodes),
            "outcome": str(self.proof.outcome),
            "init_seconds": self.proof.init_seconds,
            "reason": "; ".join([self.proof.reason, *self.proof.differences]),
        }


def prove(
    launch: Launch,
    *,
    nodes: NodeSelector,
    root: Path | None,
    seconds: float,
    stop: threading.Event,
    say: Callable[[str], None] = lambda _line: None,
) -> list[Proven]:
    """Boot one replica on one node of each kind that has the deployment ready, one after the other.

    Args:
        launch: What is booted.
        nodes: Those that are proven.
        root: Of the node store; `None` leaves it to the nodes.
        seconds: How long a replica may take to start.
        stop: When set, it is given up.
        say: Told what is done.

    Raises:
        NotReadyError: no node has the deployment ready.
        ClusterError: a replica did not start.
    """
    found = candidates(select_nodes(nodes), launch.deployment, root, stop)
    proven = []
    for group in _kinds(found):
        # Where there is most likely room for one more.
        node = min(group, key=lambda node: found[node].running)
        one = _boot(launch, node, found[node].bundle, root, seconds, stop, say)
        ask_nodes(group, remember, one, root, seconds=_NODE_SECONDS)
        proven.append(Proven(one, tuple(node.address for node in group)))
        say(f"{one.node}: {one.outcome}: {one.reason}")
    return proven


def require_proof(deployment: str, proven: Sequence[Proven]) -> None:
    """Pass if every kind of node has shown that it uses its cache.

    Raises:
        NotReadyError: one has not.
    """
    missed = [one.proof for one in proven if not one.proof.used]
    if missed:
        raise NotReadyError(
            f"{deployment}: {'; '.join(f'{one.node}: {one.outcome}: {one.reason}' for one in missed)}",
            where=", ".join(one.node for one in missed),
            hint=next(
                (line for one in missed for line in one.differences), "capture the cache again, and pin it"
            ),
        )


def remember(one: Proof, root: Path | None) -> bool:
    """On a node: write it down."""
    record_proof(open_store(root), one)
    return True


def what_it_had(application: str, root: Path | None) -> dict[str, Any]:
    """On a node: what the newest replica of `application` had of its cache, as the ledger tells.

    Raises:
        ClusterError: it does not tell.
    """
    store = open_store(root)
    deadline = time.monotonic() + _ROW_SECONDS
    while time.monotonic() < deadline:
        rows = ledger.read(store, "start", "engine")
        ours = [row["start"] for row in rows if f"::{application}#" in str(row.get("replica"))]
        for row in rows:
            if ours and row["kind"] == "engine" and row.get("start") == ours[-1]:
                return dict(row.get("compile") or {})
        time.sleep(_POLL_SECONDS)
    raise ClusterError(
        "the replica has not said what it had of its cache",
        where=str(store.ledger),
        hint="does its node run this version of llm-prefetch, with LLM_PREFETCH_ROOT as here?",
    )


def _boot(
    launch: Launch,
    node: Node,
    bundle: str,
    root: Path | None,
    seconds: float,
    stop: threading.Event,
    say: Callable[[str], None],
) -> Proof:
    name = f"llm-prefetch-prove-{launch.deployment}"
    config = launch.with_environment({})
    with (
        serve_running(launch.serve_options),
        trial_replica(
            name, config, node, runtime_env=launch.runtime_env, seconds=seconds, stop=stop, say=say
        ),
    ):
        had = ask_node(node, what_it_had, name, root, seconds=_NODE_SECONDS, stop=stop)
    outcome = Outcome(had.get("outcome", Outcome.NONE))
    differences = tuple(
        f"{one['field']}: {one['produced']} -> {one['here']} ({one['fix']})"
        for one in had.get("differences", ())
    )
    used = outcome is Outcome.HIT or (outcome is Outcome.PARTIAL and not had.get("new_kernels"))
    reason = str(had.get("reason", "the replica could not tell"))
    return Proof(
        launch.deployment, bundle, outcome, reason, used, node.address, had.get("init_seconds"), differences
    )


def _kinds(found: Mapping[Node, Candidate]) -> list[list[Node]]:
    """Nodes that one proof holds for, in the order of the candidates."""
    kinds: dict[tuple[str, str], list[Node]] = {}
    for node, candidate in found.items():
        kinds.setdefault((candidate.bundle, candidate.identity.model_dump_json()), []).append(node)
    return list(kinds.values())
