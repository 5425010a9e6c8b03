"""What happened on the nodes, and whether that is enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llm_prefetch.errors import NotReadyError, PrefetchError
from llm_prefetch.live import DeploymentCheck
from llm_prefetch.record import Verdict
from llm_prefetch.stage import StageReport


@dataclass(frozen=True, slots=True)
class Node:
    """A Ray node. The id changes when Ray restarts there; the address is what people know."""

    id: str
    address: str
    hostname: str


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What happened on one node: what it did, what lies there now, or the error that ended it."""

    node: Node
    report: StageReport | None = None
    error: PrefetchError | None = None
    check: DeploymentCheck | None = None
    """The newest look at what lies there, after the switch."""
    root: str = ""
    """Of the node store."""

    @property
    def ready(self) -> bool:
        """Whether a replica may start there."""
        return self.error is None and self.verdict is Verdict.HIT

    @property
    def verdict(self) -> Verdict:
        """The verdict of what lies there; `MISSING` when the staging ended in an error."""
        if self.check is not None:
            return self.check.verdict
        return self.report.verdict if self.report is not None and self.error is None else Verdict.MISSING

    @property
    def changed(self) -> bool:
        """Whether the run made the node ready, rather than found it so."""
        return (
            self.ready and self.report is not None and bool(self.report.switched or self.report.fetched_bytes)
        )


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """What happened on all selected nodes, and how many had to be ready."""

    nodes: tuple[NodeReport, ...]
    needed: int
    published: frozenset[str] = frozenset()
    """The artifacts that have a manifest at their origin."""

    @property
    def ready_nodes(self) -> int:
        """Nodes on which a replica may start."""
        return sum(node.ready for node in self.nodes)

    @property
    def ready(self) -> bool:
        """Whether enough nodes are ready."""
        return self.ready_nodes >= self.needed

    @property
    def failed(self) -> tuple[NodeReport, ...]:
        """The nodes with an error."""
        return tuple(node for node in self.nodes if node.error is not None)

    @property
    def first_error(self) -> PrefetchError | None:
        """The error of the first node that failed."""
        return next((node.error for node in self.failed), None)

    @property
    def staged(self) -> StageReport | None:
        """What a node that is ready did; the versions and the bundle are the same on all."""
        return next((node.report for node in self.nodes if node.ready), None)

    def rows(self) -> list[dict[str, Any]]:
        """One row for each node, as tables show it; bytes and seconds."""
        return [
            {
                "node": node.node.address,
                "host": node.node.hostname,
                "verdict": str(node.verdict),
                "fetched_bytes": node.report.fetched_bytes if node.report else 0,
                "reused_bytes": node.report.reused_bytes if node.report else 0,
                "evicted_bytes": node.report.evicted_bytes if node.report else 0,
                "seconds": round(node.report.seconds, 2) if node.report else None,
                "root": node.root,
                "error": str(node.error or ""),
            }
            for node in self.nodes
        ]


def require_ready(report: ClusterReport) -> None:
    """Pass if enough nodes are ready.

    Raises:
        PrefetchError: the first node's error, with the count and the node before it; or `NotReadyError`.
    """
    if report.ready:
        return
    count = f"{report.ready_nodes} of {len(report.nodes)} nodes are ready, {report.needed} are needed"
    if not report.failed:
        where = next((node.node.address for node in report.nodes if not node.ready), "the Ray cluster")
        raise NotReadyError(
            count, where=where, hint="see the verdicts of the nodes, or lower policy.min_ready"
        )
    first, *others = report.failed
    error = first.error
    assert error is not None  # noqa: S101 (for the type checker)
    more = f" (and {len(others)} more)" if others else ""
    message = f"{count}; {first.node.address}{more}: {error.message}"
    raise type(error)(message, where=error.where, hint=error.hint) from error
