"""The scrub of many nodes: each reads what is live on its own disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from llm_prefetch.cluster.asking import Answer, ask_nodes
from llm_prefetch.cluster.outcome import NodeOutcome, Outcome
from llm_prefetch.cluster.reports import Node
from llm_prefetch.scrub import OnDamage, ScrubReport, scrub
from llm_prefetch.store import open_store
from llm_prefetch.transfer import Throttle


def scrub_cluster(
    deployment: str,
    nodes: Sequence[Node],
    *,
    full: bool = True,
    on_damage: OnDamage = "repair",
    bytes_per_second: float | None = None,
    seconds: float,
    root: Path | None = None,
    stop: threading.Event | None = None,
    on_node: Callable[[NodeOutcome], None] = lambda _outcome: None,
) -> Outcome:
    """Scrub `deployment` on all `nodes`; every node must hold what its manifests say for the outcome to be ready.

    Args:
        deployment: What to check.
        nodes: Where.
        full: Read every byte.
        on_damage: What to do with a damaged version.
        bytes_per_second: Most to read on one node; `None` is no limit.
        seconds: How long all of it may take.
        root: Root of the node store; `None` leaves it to the nodes.
        stop: When set, the nodes stop.
        on_node: Told of each node as it ends.
    """

    def tell(answer: Answer[ScrubReport]) -> None:
        on_node(_outcome(answer))

    answers = ask_nodes(
        nodes,
        scrub_node,
        deployment,
        full,
        on_damage,
        bytes_per_second,
        root,
        seconds=seconds,
        stop=stop,
        on_answer=tell,
    )
    return Outcome(tuple(_outcome(answer) for answer in answers), len(nodes))


def scrub_node(
    deployment: str,
    full: bool,  # noqa: FBT001 (Ray passes it by position)
    on_damage: OnDamage,
    bytes_per_second: float | None,
    root: Path | None,
) -> ScrubReport:
    """Runs on a node.

    Raises:
        PrefetchError: as `scrub`; or there is no store.
    """
    return scrub(
        open_store(root), deployment, full=full, on_damage=on_damage, throttle=Throttle(bytes_per_second)
    )


def _outcome(answer: Answer[ScrubReport]) -> NodeOutcome:
    report = answer.value
    if report is None:
        return NodeOutcome(answer.node, error=answer.error)
    return NodeOutcome(
        answer.node,
        report.verdict,
        report.bundle,
        ", ".join(dict.fromkeys(report.did)),
        "; ".join(report.damage) or report.reason,
        report.fetched_bytes,
        report.error,
    )
