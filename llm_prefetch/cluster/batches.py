"""Many nodes as few pieces of work: each a row in Prefect, and tried again only for the nodes that need it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Protocol

from llm_prefetch.cluster.reports import Node, NodeReport
from llm_prefetch.cluster.run import Run
from llm_prefetch.cluster.staging import Running
from llm_prefetch.errors import ClusterError, PrefetchError
from llm_prefetch.redact import redact_text

MOST = 64
"""Pieces of work; up to so many nodes each is one of its own."""
_NODES_AT_ONCE = 256


class Waited(Protocol):
    """A piece of work that was submitted: a future."""

    def result(self) -> object:
        """Wait until it has ended; raises what it was raised by."""


class Batch:
    """The stagings of some nodes. Calling it again repeats those that failed and may succeed now.

    Not a dataclass: Prefect would walk through its fields, and a manifest has a digest for every 16 MiB.
    """

    def __init__(self, nodes: Sequence[Node], stage: Callable[[Node], NodeReport], at_once: int) -> None:
        """`stage` raises nothing; `at_once` of the nodes work at the same time."""
        self.nodes = tuple(nodes)
        self._stage, self._at_once = stage, at_once
        self._reports: dict[str, NodeReport] = {}

    @property
    def name(self) -> str:
        """What people see: the address of its node, or of its first."""
        first, others = self.nodes[0].address, len(self.nodes) - 1
        return f"{first}-and-{others}-more" if others else first

    def __call__(self) -> None:
        """Stage where it is not done.

        Raises:
            PrefetchError: of the first node that failed; of one that may succeed later, if there is one.
        """
        todo = [node for node in self.nodes if self._open(node)]
        if len(todo) == 1:
            reports = [self._stage(todo[0])]
        else:
            with ThreadPoolExecutor(max(1, min(len(todo), self._at_once))) as pool:
                # What is logged there belongs to the run that this thread belongs to.
                futures = [pool.submit(copy_context().run, self._stage, node) for node in todo]
                reports = [future.result() for future in futures]
        self._reports |= {report.node.id: report for report in reports}
        errors = [report.error for report in self._reports.values() if report.error is not None]
        if errors:
            raise next((error for error in errors if error.retryable), errors[0])

    def report(self, node: Node) -> NodeReport | None:
        """What happened on `node` so far."""
        return self._reports.get(node.id)

    def _open(self, node: Node) -> bool:
        report = self._reports.get(node.id)
        return report is None or (report.error is not None and report.error.retryable)


class Batches:
    """Stages nodes in batches; `start` is what `stage_cluster` needs."""

    def __init__(
        self,
        nodes: Sequence[Node],
        stage: Callable[[Node, Run], NodeReport],
        submit: Callable[[Batch], Waited],
        *,
        most: int = MOST,
    ) -> None:
        """`stage` does one node; `submit` begins a batch, and says how to wait for it."""
        self._stage, self._submit = stage, submit
        self._parts = _parts(nodes, most)
        self._begun: dict[str, tuple[Batch, Waited]] = {}

    def start(self, node: Node, run: Run) -> Running:
        """Begin the batch of `node`, unless it has begun."""
        if node.id not in self._begun:
            part = next(part for part in self._parts if node in part)
            at_once = -(-_NODES_AT_ONCE // len(self._parts))
            batch = Batch(part, lambda member: self._stage(member, run), at_once)
            begun = (batch, self._submit(batch))
            self._begun |= {member.id: begun for member in part}
        return _Member(node, *self._begun[node.id])


def _parts(nodes: Sequence[Node], most: int) -> list[Sequence[Node]]:
    size = -(-len(nodes) // most) or 1
    return [nodes[at : at + size] for at in range(0, len(nodes), size)]


class _Member:
    """One node of a batch that has begun."""

    def __init__(self, node: Node, batch: Batch, waited: Waited) -> None:
        self._node, self._batch, self._waited = node, batch, waited

    def result(self) -> NodeReport:
        """Wait for the batch; the report of the node, whatever became of the others."""
        failure: Exception | None = None
        try:
            self._waited.result()
        except Exception as error:  # noqa: BLE001 (whatever an executor makes of it; the other nodes go on)
            failure = error
        report = self._batch.report(self._node)
        if report is not None:
            return report
        if isinstance(failure, PrefetchError):
            return NodeReport(self._node, error=failure)
        reason = redact_text(str(failure or "").strip().partition("\n")[0]) or type(failure).__name__
        broken = ClusterError(
            f"the task run failed: {reason}", where=self._node.address, hint="see the log of the task run"
        )
        return NodeReport(self._node, error=broken)
