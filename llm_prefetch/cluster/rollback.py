"""Rollback: all selected nodes go back to the same bundle, or none does.

First every node is asked whether it could, which changes nothing. What can still fail after that is a node that dies or
a replica that never ends its start; then the others have switched, and the same rollback by the bundle's name finishes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llm_prefetch import settings
from llm_prefetch.cluster.asking import Answer, ask_nodes
from llm_prefetch.cluster.inspection import core
from llm_prefetch.cluster.outcome import NodeOutcome, Outcome
from llm_prefetch.cluster.reports import Node
from llm_prefetch.errors import NotReadyError, PrefetchError, disk_error
from llm_prefetch.holds import somebody
from llm_prefetch.live import check_deployment, current_bundle, rollback
from llm_prefetch.record import Verdict
from llm_prefetch.store import open_store

_ASK_SECONDS = 120.0
_SLACK_SECONDS = 60.0
_IS_LIVE = "it is live"


@dataclass(frozen=True, slots=True)
class Step:
    """From which bundle to which on a node, and the verdict there then."""

    live: str
    target: str
    verdict: Verdict
    reason: str = ""
    core: frozenset[tuple[str, str]] = frozenset()
    """Names and versions of the target, without compile caches, which differ among nodes that differ."""


def rollback_cluster(
    deployment: str,
    nodes: Sequence[Node],
    *,
    to: str = "",
    by: str = "",
    why: str = "",
    root: Path | None = None,
    dry_run: bool = False,
    stop: threading.Event | None = None,
) -> Outcome:
    """Switch `deployment` back on all `nodes`; every node must succeed for the outcome to be ready.

    Args:
        deployment: What to roll back.
        nodes: Where.
        to: The bundle to go to, or the beginning of its name; empty: the one before, if that is the same everywhere.
        by: Who wants it; else the user of this process.
        why: The reason, for whoever is kept from staging what was left.
        root: Root of the node store; `None` leaves it to the nodes.
        dry_run: Only say what would be done.
        stop: When set, the nodes stop.
    """
    asked = ask_nodes(nodes, could_go_back, deployment, to, root, seconds=_ASK_SECONDS, stop=stop)
    before = weigh(deployment, asked)
    if before.refusal is not None or dry_run:
        return before
    targets = frozenset(answer.value.target for answer in asked if answer.value is not None)
    patience = settings.SWITCH_SECONDS.get()
    done = ask_nodes(
        nodes,
        go_back,
        deployment,
        to,
        targets,
        by or somebody(),
        why,
        patience,
        root,
        seconds=patience + _SLACK_SECONDS,
        stop=stop,
    )
    return Outcome(tuple(_after(answer) for answer in done), len(nodes))


def could_go_back(deployment: str, to: str, root: Path | None) -> Step:
    """Runs on a node: what a rollback would do there.

    Raises:
        PrefetchError: as `live.rollback`.
    """
    store = open_store(root)
    try:
        live = current_bundle(store, deployment) or ""
        target = rollback(store, deployment, to=to or None, dry_run=True)
    except OSError as error:
        raise disk_error(error, str(store.root)) from error
    return Step(live, target.id, Verdict.HIT, core=core(target.members))


def go_back(
    deployment: str,
    to: str,
    targets: frozenset[str],
    by: str,
    why: str,
    seconds: float,
    root: Path | None,
) -> Step:
    """Runs on a node: the rollback, if it still goes to one of `targets`, and the check after it.

    Raises:
        PrefetchError: as `live.rollback`; or something else was switched meanwhile.
    """
    before = could_go_back(deployment, to, root)
    if before.target not in targets:
        raise NotReadyError(
            f"{deployment} was switched meanwhile, to {before.live[:19]}",
            where=str(open_store(root).root),
            hint="look what did that, then roll back again",
        )
    store = open_store(root)
    try:
        rollback(store, deployment, to=before.target, seconds=seconds, by=by, why=why)
        check = check_deployment(store, deployment)
    except OSError as error:
        raise disk_error(error, str(store.root)) from error
    return Step(before.live, check.bundle, check.verdict, check.reason, before.core)


def weigh(deployment: str, asked: Sequence[Answer[Step]]) -> Outcome:
    """What a rollback would do on the nodes; with a refusal, if one of them cannot, or if they would part."""
    before = tuple(_before(answer) for answer in asked)
    return Outcome(before, len(asked), refusal=_refusal(deployment, asked))


def _refusal(deployment: str, asked: Sequence[Answer[Step]]) -> PrefetchError | None:
    failed = [answer for answer in asked if answer.error is not None]
    if failed and failed[0].error is not None:
        error: PrefetchError = failed[0].error
        count = f"{len(failed)} of {len(asked)} nodes cannot go back, so none did; {failed[0].node.address}"
        return type(error)(f"{count}: {error.message}", where=error.where, hint=error.hint)
    if len({answer.value.core for answer in asked if answer.value is not None}) == 1:
        return None
    targets = Counter(answer.value.target for answer in asked if answer.value is not None)
    each = ", ".join(f"{count} to {bundle[:19]}" for bundle, count in targets.most_common())
    return NotReadyError(
        f"the nodes would go back to different bundles, so none did: {each}",
        where=deployment,
        hint=f"name the one to go to, such as {targets.most_common(1)[0][0]}",
    )


def _before(answer: Answer[Step]) -> NodeOutcome:
    step = answer.value
    if step is None:
        return NodeOutcome(answer.node, error=answer.error)
    if step.live == step.target:
        return NodeOutcome(answer.node, step.verdict, step.live, reason=_IS_LIVE)
    return NodeOutcome(answer.node, step.verdict, step.live, "would go back", f"to {step.target[:19]}")


def _after(answer: Answer[Step]) -> NodeOutcome:
    step = answer.value
    if step is None:
        return NodeOutcome(answer.node, error=answer.error)
    if step.live == step.target:
        return NodeOutcome(answer.node, step.verdict, step.target, reason=step.reason or _IS_LIVE)
    reason = step.reason or f"from {step.live[:19]}"
    return NodeOutcome(answer.node, step.verdict, step.target, "went back", reason)
