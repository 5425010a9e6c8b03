"""What happened on the nodes, and whether that is enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llm_prefetch.errors import NotReadyError, PrefetchError
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
    """What happened on one node: a report, or the error that ended it."""

    node: Node
    report: StageReport | None = None
    error: PrefetchError | None = None

    @property
    def ready(self) -> bool:
        """Whether a replica may start there."""
        return self.report is not None and self.report.verdict is Verdict.HIT

    @property
    def verdict(self) -> Verdict:
        """The verdict of the node's artifacts; `MISSING` when the staging ended in an error."""
        return self.report.verdict if self.report is not None else Verdict.MISSING


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """What happened on all selected nodes, and how many had to be ready."""

    nodes: tuple[NodeReport, ...]
    needed: int

    @property
    def ready_nodes(self) -> int:
        """Nodes on which a replica may start."""
        return sum(node.ready for node in self.nodes)

    @property
    def ready(self) -> bool:
        """Whether enough nodes are ready."""
        return self.ready_nodes >= self.needed

    @property
    def first_error(self) -> PrefetchError | None:
        """The error of the first node that failed."""
        return next((node.error for node in self.nodes if node.error is not None), None)

    def rows(self) -> list[dict[str, Any]]:
        """One row for each node, as tables show it; bytes and seconds."""
        return [
            {
                "node": node.node.address,
                "verdict": str(node.verdict),
                "fetched_bytes": node.report.fetched_bytes if node.report else 0,
                "reused_bytes": node.report.reused_bytes if node.report else 0,
                "seconds": round(node.report.seconds, 2) if node.report else None,
                "error": str(node.error or ""),
            }
            for node in self.nodes
        ]


def require_ready(report: ClusterReport) -> None:
    """Pass if enough nodes are ready.

    Raises:
        PrefetchError: the first node's error, with the count before it; or `NotReadyError`.
    """
    if report.ready:
        return
    count = f"{report.ready_nodes} of {len(report.nodes)} nodes are ready, {report.needed} are needed"
    error = report.first_error
    if error is None:
        raise NotReadyError(count, hint="see the verdicts of the nodes, or lower policy.min_ready")
    raise type(error)(f"{count}; {error.message}", where=error.where, hint=error.hint) from error
