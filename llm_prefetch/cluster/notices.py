"""What is announced when a run has ended: events for automations and people, without knowing who sends them.

    llm-prefetch.bundle.staged         enough nodes are ready; about llm-prefetch.bundle.<deployment>
    llm-prefetch.bundle.stage-failed   they are not, or the run could not begin; about the same
    llm-prefetch.node.ready            this run made a node ready; about llm-prefetch.node.<host>

A `stage` that finds everything there announces the first alone; a `reconcile` that does announces nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

from llm_prefetch.cluster.outcome import Outcome
from llm_prefetch.cluster.reports import ClusterReport, NodeReport
from llm_prefetch.errors import PrefetchError
from llm_prefetch.redact import redact_text

STAGED = "llm-prefetch.bundle.staged"
STAGE_FAILED = "llm-prefetch.bundle.stage-failed"
NODE_READY = "llm-prefetch.node.ready"
BUNDLE = "llm-prefetch.bundle."
NODE = "llm-prefetch.node."


class BundlePayload(TypedDict):
    """What the two events about a bundle say."""

    deployment: str
    bundle: str
    versions: dict[str, str]
    """By artifact; empty where the run staged on no node."""
    nodes: int
    ready: int
    needed: int
    failed: int
    fetched_bytes: int
    reused_bytes: int
    error: str
    """Code of the first error, or empty."""
    message: str


class NodePayload(TypedDict):
    """What the event about a node says."""

    deployment: str
    bundle: str
    address: str
    host: str
    root: str
    fetched_bytes: int
    reused_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Notice:
    """One event: what happened to the `resource` called `name`."""

    event: str
    resource: str
    name: str
    payload: BundlePayload | NodePayload
    related: Mapping[str, str]
    """Ids of other resources, and their roles; few, because a server stores each of them."""


def notices(deployment: str, report: ClusterReport | None, error: PrefetchError | None) -> list[Notice]:
    """What to announce of a run that ended with `report`, or with `error`, or with both."""
    event = STAGED if error is None else STAGE_FAILED
    return _notices(event, deployment, report, report, error or (report.first_error if report else None))


def reconciled(deployment: str, report: ClusterReport, outcome: Outcome) -> list[Notice]:
    """What to announce of a run that staged on those nodes of `outcome` that lacked it: whether the whole is ready."""
    try:
        outcome.require_ready()
    except PrefetchError as error:
        return _notices(STAGE_FAILED, deployment, report, outcome, error)
    first = next((node.error for node in outcome.nodes if node.error is not None), None)
    return _notices(STAGED, deployment, report, outcome, first)


def _notices(
    event: str,
    deployment: str,
    report: ClusterReport | None,
    whole: ClusterReport | Outcome | None,
    error: PrefetchError | None,
) -> list[Notice]:
    """What was done is in `report`, and how all the nodes are in `whole`."""
    nodes = report.nodes if report else ()
    staged = report.staged if report else None
    bundle = BundlePayload(
        deployment=deployment,
        bundle=staged.bundle if staged else "",
        versions={artifact.name: artifact.version for artifact in staged.artifacts} if staged else {},
        nodes=len(whole.nodes) if whole else 0,
        ready=whole.ready_nodes if whole else 0,
        needed=whole.needed if whole else 0,
        failed=sum(node.error is not None for node in whole.nodes) if whole else 0,
        fetched_bytes=sum(node.report.fetched_bytes for node in nodes if node.report),
        reused_bytes=sum(node.report.reused_bytes for node in nodes if node.report),
        error=error.code if error else "",
        message=redact_text(str(error)) if error else "",
    )
    return [
        Notice(event, BUNDLE + deployment, deployment, bundle, {}),
        *(_of_node(deployment, node) for node in nodes if node.changed),
    ]


def _of_node(deployment: str, node: NodeReport) -> Notice:
    report = node.report
    assert report is not None  # noqa: S101 (for the type checker: a node that changed has one)
    payload = NodePayload(
        deployment=deployment,
        bundle=report.bundle,
        address=node.node.address,
        host=node.node.hostname,
        root=node.root,
        fetched_bytes=report.fetched_bytes,
        reused_bytes=report.reused_bytes,
        seconds=round(report.seconds, 2),
    )
    host = node.node.hostname
    return Notice(NODE_READY, NODE + host, host, payload, {BUNDLE + deployment: "bundle"})
