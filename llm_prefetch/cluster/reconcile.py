"""Reconcile: bring the wanted bundle to those nodes that lack it, and to no other.

One question to every node and one to the origins tell what lacks where, and no byte of an artifact is read, so it can
run every minute. What a rollback decided is kept: where every node that serves the deployment is held, the bundle that
was gone back to is what is wanted, also on nodes that join; where some are, those are left alone.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from llm_prefetch.caches import KIND
from llm_prefetch.cluster.asking import Answer, ask_nodes
from llm_prefetch.cluster.inspection import LiveBundle, Wanted, compare, live_bundle, settle, wanted_by
from llm_prefetch.cluster.outcome import NodeOutcome, Outcome
from llm_prefetch.cluster.reports import ClusterReport, Node
from llm_prefetch.errors import ClusterError, PrefetchError, disk_error
from llm_prefetch.holds import Hold, write_hold
from llm_prefetch.live import Member, current_bundle
from llm_prefetch.record import Verdict
from llm_prefetch.redact import redact
from llm_prefetch.spec import Artifact, Spec
from llm_prefetch.store import open_store

_SECONDS = 120.0
_NODES_TO_ASK_FOR_THE_ORIGIN = 3
_TO_STAGE = "to stage"


def reconcile_cluster(
    spec: Spec,
    nodes: Sequence[Node],
    stage: Callable[[Spec, Sequence[Node]], ClusterReport],
    *,
    root: Path | None = None,
    dry_run: bool = False,
    stop: threading.Event | None = None,
) -> Outcome:
    """Stage `spec` on those of `nodes` that do not hold what it asks for now.

    Args:
        spec: What to hold.
        nodes: Where.
        stage: Stages what it is given on all the nodes it is given; not called when nothing lacks.
        root: Root of the node store; `None` leaves it to the nodes.
        dry_run: Only say what would be done.
        stop: When set, the nodes stop.

    Raises:
        OriginError: nothing tells what is wanted; nothing was changed.
    """
    answers, wanted = _ask(spec, nodes, root, stop or threading.Event())
    decision = decide(spec, answers, wanted)
    before = decision.outcome
    if dry_run or not decision.lacking:
        return before
    # How many of all nodes must be ready says nothing about the few that lack it.
    policy = decision.spec.policy.model_copy(update={"min_ready": "all"})
    to_stage = decision.spec.model_copy(update={"policy": policy})
    done = _staged(decision.lacking, stage(to_stage, [one.node for one in decision.lacking]))
    if decision.hold is not None:
        done = _held(done, spec.deployment, decision.hold, root, stop)
    return replace(before, nodes=tuple(done.get(one.node.id, one) for one in before.nodes))


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done."""

    spec: Spec
    """What to stage."""
    outcome: Outcome
    """How it is before."""
    hold: Hold | None = None
    """What nodes that are staged must be held by, too."""

    @property
    def lacking(self) -> list[NodeOutcome]:
        """Where to stage."""
        return [one for one in self.outcome.nodes if one.did]


def decide(
    spec: Spec, answers: Sequence[Answer[LiveBundle]], wanted: tuple[Wanted, ...] | PrefetchError
) -> Decision:
    """Compare what each node answered with what is wanted, as far as that is known.

    Raises:
        OriginError: it is not known, and asking again will not help, or no node is well.
    """
    lives = [answer.value for answer in answers if answer.value is not None]
    needed, kept = spec.policy.needed(len(answers)), _held_everywhere(lives)
    if kept is not None:
        members = tuple(one.member for one in kept.members)
        found = [_judge(answer, members) for answer in answers]
        note = (
            f"{spec.deployment} was {kept.hold}; {kept.bundle[:19]} is kept until another version is staged"
        )
        return Decision(_as_held(spec, kept), Outcome(tuple(found), needed, note), kept.hold)
    if isinstance(wanted, PrefetchError):
        return Decision(spec, _without_origin(spec, answers, wanted, needed))
    members = settle(wanted, lives)
    found = [_kept(answer) or _judge(answer, members) for answer in answers]
    return Decision(spec, Outcome(tuple(found), needed))


def keep_hold(deployment: str, hold: Hold, root: Path | None) -> None:
    """Runs on a node that joined: what is live there now is held too.

    Raises:
        DiskError: the disk refused.
    """
    store = open_store(root)
    try:
        bundle = current_bundle(store, deployment) or hold.bundle
        write_hold(store, deployment, replace(hold, bundle=bundle))
    except OSError as error:
        raise disk_error(error, str(store.root)) from error


def _ask(
    spec: Spec, nodes: Sequence[Node], root: Path | None, stop: threading.Event
) -> tuple[list[Answer[LiveBundle]], tuple[Wanted, ...] | PrefetchError]:
    """What is live on every node, and what is wanted, at the same time."""
    with ThreadPoolExecutor(1, thread_name_prefix="origin") as pool:
        wanted = pool.submit(_wanted, spec, nodes, stop)
        try:
            answers = ask_nodes(nodes, live_bundle, spec.deployment, root, seconds=_SECONDS, stop=stop)
            return answers, wanted.result()
        except BaseException:
            stop.set()
            raise


def _wanted(spec: Spec, nodes: Sequence[Node], stop: threading.Event) -> tuple[Wanted, ...] | PrefetchError:
    """Asked on one node, which may read what this process may not; on the next if that fails."""
    error: PrefetchError = ClusterError("no node was asked", hint="select at least one")
    for node in nodes[:_NODES_TO_ASK_FOR_THE_ORIGIN]:
        (answer,) = ask_nodes([node], wanted_by, spec, seconds=_SECONDS, stop=stop)
        if answer.value is not None:
            return answer.value
        error = answer.error or error
    return error


def _held_everywhere(lives: Sequence[LiveBundle]) -> LiveBundle | None:
    """What a rollback keeps on every node that serves the deployment; where it is well, if it is so anywhere."""
    serving = sorted(
        (live for live in lives if live.bundle), key=lambda live: live.verdict is not Verdict.HIT
    )
    if serving and all(live.hold for live in serving) and len({live.core for live in serving}) == 1:
        return serving[0]
    return None


def _as_held(spec: Spec, live: LiveBundle) -> Spec:
    """The spec of what is live: its versions, from where they came."""
    known = {artifact.name: artifact for artifact in spec.artifacts}
    artifacts = []
    for one in live.members:
        fallback = known.get(one.member.name)
        uri = fallback.uri if fallback and one.uri in ("", redact(fallback.uri)) else one.uri
        artifact = fallback or Artifact(name=one.member.name, uri=uri)
        pinned = {"uri": uri, "kind": one.member.kind, "version": one.member.version}
        artifacts.append(artifact.model_copy(update=pinned))
    return spec.model_copy(update={"artifacts": artifacts})


def _judge(answer: Answer[LiveBundle], wanted: Sequence[Member]) -> NodeOutcome:
    """What a node holds, and whether it is to be staged."""
    live = answer.value
    if live is None:
        return NodeOutcome(answer.node, error=answer.error)
    finding = compare(live, wanted)
    did = "" if finding.verdict is Verdict.HIT else _TO_STAGE
    return NodeOutcome(answer.node, finding.verdict, live.bundle, did, finding.reason)


def _kept(answer: Answer[LiveBundle]) -> NodeOutcome | None:
    """A node that is held, unlike others: it is left alone."""
    live = answer.value
    if live is None or live.hold is None:
        return None
    reason = "; ".join(filter(None, [live.reason, str(live.hold)]))
    return NodeOutcome(answer.node, live.verdict, live.bundle, reason=reason)


def _staged(lacking: Sequence[NodeOutcome], report: ClusterReport) -> dict[str, NodeOutcome]:
    reports = {one.node.id: one for one in report.nodes}
    return {
        one.node.id: replace(
            one,
            verdict=after.verdict,
            bundle=after.report.bundle if after.report else one.bundle,
            did="staged" if after.report else "",
            fetched_bytes=after.report.fetched_bytes if after.report else 0,
            error=after.error,
        )
        for one in lacking
        for after in [reports[one.node.id]]
    }


def _held(
    staged: dict[str, NodeOutcome],
    deployment: str,
    hold: Hold,
    root: Path | None,
    stop: threading.Event | None,
) -> dict[str, NodeOutcome]:
    """A node that joined is held like the others, or the next staging would part them."""
    nodes = [one.node for one in staged.values() if one.ready]
    answers = ask_nodes(nodes, keep_hold, deployment, hold, root, seconds=_SECONDS, stop=stop)
    failed = {answer.node.id: answer.error for answer in answers if answer.error is not None}
    return {key: replace(one, error=failed.get(key, one.error)) for key, one in staged.items()}


def _without_origin(
    spec: Spec, answers: Sequence[Answer[LiveBundle]], error: PrefetchError, needed: int
) -> Outcome:
    """Nodes that agree with each other are ready, as far as anybody can tell; the others cannot be helped now."""
    names = {artifact.name for artifact in spec.artifacts if artifact.kind != KIND}
    well = Counter(
        answer.value.core
        for answer in answers
        if answer.value is not None
        and answer.value.verdict is Verdict.HIT
        and {name for name, _ in answer.value.core} == names
    )
    if not error.retryable or not well:
        raise type(error)(
            f"nothing tells what is wanted, and nothing was changed: {error.message}",
            where=error.where,
            hint=error.hint,
        ) from error
    [(agreed, _)] = well.most_common(1)
    found = []
    for answer in answers:
        live = answer.value
        if live is None:
            found.append(NodeOutcome(answer.node, error=answer.error))
        elif live.verdict is not Verdict.HIT:
            found.append(NodeOutcome(answer.node, live.verdict, live.bundle, reason=live.reason, error=error))
        elif live.core != agreed:
            reason = "it holds other versions than most nodes"
            found.append(NodeOutcome(answer.node, Verdict.STALE, live.bundle, reason=reason, error=error))
        else:
            found.append(NodeOutcome(answer.node, live.verdict, live.bundle))
    note = f"the origin does not answer, so nothing was staged and what most nodes hold is taken to be right: {error}"
    return Outcome(tuple(found), needed, note)
