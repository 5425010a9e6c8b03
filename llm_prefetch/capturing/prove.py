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
from llm_prefetch.caches.compatible import Difference
from llm_prefetch.caches.evidence import Evidence, Outcome
from llm_prefetch.caches.proof import Proof, proof, record_proof
from llm_prefetch.capturing.capture import candidates
from llm_prefetch.capturing.capture_node import Candidate
from llm_prefetch.capturing.launch import Launch
from llm_prefetch.capturing.trial import serve_running, trial_replica
from llm_prefetch.capturing.turn import turn
from llm_prefetch.cluster.asking import Answer, ask_node, ask_nodes
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
    """All that it holds for, and that have it in their ledgers."""

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
        NotReadyError: no node has the deployment ready, or another capture or proof of it is under way.
        ClusterError: a replica did not start, or no node has kept what it has shown.
        MissingExtraError: Ray Serve is not installed here.
    """
    name, proven = f"llm-prefetch-prove-{launch.deployment}", []
    with turn(launch.deployment, name, say):
        found = candidates(select_nodes(nodes), launch.deployment, root, stop)
        for group in _kinds(found):
            # Where there is most likely room for one more.
            node = min(group, key=lambda node: found[node].running)
            one = _boot(launch, name, node, found[node].bundle, root, seconds, stop, say)
            say(f"{one.node}: {one.outcome}: {one.reason}")
            answers = ask_nodes(group, remember, one, root, seconds=_NODE_SECONDS)
            proven.append(Proven(one, keepers(answers, say)))
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
    """On a node: write it down.

    Raises:
        NotReadyError: it does not hold here: the ledger cannot be written, or another generation went live.
    """
    store = open_store(root)
    record_proof(store, one)
    if proof(store, one.deployment) != one:
        raise NotReadyError(
            "the proof is not in the ledger, or is not of what is live",
            where=str(store.ledger),
            hint="see that this node can write it, and run prove again",
        )
    return True


def keepers(answers: Sequence[Answer[bool]], say: Callable[[str], None]) -> tuple[str, ...]:
    """The addresses of the nodes that have kept a proof; the others are said.

    Raises:
        ClusterError: none has.
    """
    for answer in answers:
        if answer.error is not None:
            say(f"not proven on {answer.node.address}: {answer.error}")
    kept = tuple(answer.node.address for answer in answers if answer.error is None)
    if not kept:
        raise ClusterError(
            f"no node has kept the proof: {answers[0].error}",
            where=", ".join(answer.node.address for answer in answers),
            hint="run prove again when their stores can be written",
        )
    return kept


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
    name: str,
    node: Node,
    bundle: str,
    root: Path | None,
    seconds: float,
    stop: threading.Event,
    say: Callable[[str], None],
) -> Proof:
    config = launch.with_environment({})
    with (
        serve_running(launch.serve_options),
        trial_replica(
            name, config, node, runtime_env=launch.runtime_env, seconds=seconds, stop=stop, say=say
        ),
    ):
        had = ask_node(node, what_it_had, name, root, seconds=_NODE_SECONDS, stop=stop)
    return _proof(launch.deployment, bundle, node, had)


def _proof(deployment: str, bundle: str, node: Node, had: Mapping[str, Any]) -> Proof:
    """Of what the ledger's row says that the replica had."""
    found = Evidence(
        Outcome(had.get("outcome", Outcome.NONE)),
        str(had.get("reason", "the replica could not tell")),
        new_kernels=had.get("new_kernels", 0),
        init_seconds=had.get("init_seconds"),
    )
    differences = (
        Difference(one["field"], one["produced"], one["here"], one["fix"])
        for one in had.get("differences", ())
    )
    return Proof(
        deployment,
        bundle,
        found.outcome,
        found.reason,
        found.used,
        node.address,
        found.init_seconds,
        tuple(map(str, differences)),
    )


def _kinds(found: Mapping[Node, Candidate]) -> list[list[Node]]:
    """Nodes that one proof holds for, in the order of the candidates."""
    kinds: dict[tuple[str, str], list[Node]] = {}
    for node, candidate in found.items():
        kinds.setdefault((candidate.bundle, candidate.identity.model_dump_json()), []).append(node)
    return list(kinds.values())
