"""How a run over many nodes ended: one outcome for each node, one table of them, and whether that is enough."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from llm_prefetch.cluster.reports import Node
from llm_prefetch.cluster.summary import SHOWN_NODES, cell, table
from llm_prefetch.errors import NotReadyError, PrefetchError
from llm_prefetch.record import Verdict


@dataclass(frozen=True, slots=True)
class NodeOutcome:
    """What a node holds at the end, and what was done there."""

    node: Node
    verdict: Verdict = Verdict.MISSING
    bundle: str = ""
    did: str = ""
    """In a word or two; empty when nothing was."""
    reason: str = ""
    """Why it was done, or why the verdict is not `HIT`."""
    fetched_bytes: int = 0
    error: PrefetchError | None = None

    @property
    def ready(self) -> bool:
        """Whether it ended well, and a replica may start there."""
        return self.error is None and self.verdict is Verdict.HIT


@dataclass(frozen=True, slots=True)
class Outcome:
    """All selected nodes, and how many of them must be ready."""

    nodes: tuple[NodeOutcome, ...]
    needed: int
    note: str = ""
    """What else a person should know."""
    refusal: PrefetchError | None = None
    """Why nothing was done on any node."""

    @property
    def ready_nodes(self) -> int:
        """How many are ready."""
        return sum(node.ready for node in self.nodes)

    @property
    def ready(self) -> bool:
        """Whether enough are ready."""
        return self.refusal is None and self.ready_nodes >= self.needed

    @property
    def changed(self) -> bool:
        """Whether anything was done, or ought to be."""
        return any(node.did or not node.ready for node in self.nodes)

    def rows(self) -> list[dict[str, Any]]:
        """One row for each node, as tables show it."""
        return [
            {
                "node": one.node.address,
                "verdict": str(one.verdict),
                "bundle": one.bundle[:19],
                "did": one.did,
                "fetched_bytes": one.fetched_bytes,
                "reason": one.reason,
                "error": str(one.error or ""),
            }
            for one in self.nodes
        ]

    def markdown(self, title: str) -> str:
        """A page: how many are ready, what was done, and the nodes that are not, up to a bound."""
        lines = [
            f"## {title}",
            f"{self.ready_nodes} of {len(self.nodes)} nodes are ready, {self.needed} needed.",
        ]
        lines += [f"**{cell(text)}**" for text in (str(self.refusal or ""), self.note) if text]
        done = Counter(one.did for one in self.nodes if one.did)
        if done:
            lines.append(", ".join(f"{count} {did}" for did, count in sorted(done.items())) + ".")
        bad = [one for one in self.nodes if not one.ready]
        if bad:
            rows = [
                [one.node.address, one.verdict, str(one.error or one.reason)] for one in bad[:SHOWN_NODES]
            ]
            lines.append(table(["node", "verdict", "why"], rows))
        if len(bad) > SHOWN_NODES:
            lines.append(f"{len(bad) - SHOWN_NODES} more are in the table.")
        return "\n\n".join(lines) + "\n"

    def require_ready(self) -> None:
        """Pass if enough nodes are ready.

        Raises:
            PrefetchError: why nothing was done; or of the kind of the first node's error, with the count before it.
        """
        if self.refusal is not None:
            raise self.refusal
        if self.ready:
            return
        count = f"{self.ready_nodes} of {len(self.nodes)} nodes are ready, {self.needed} are needed"
        failed = next((one for one in self.nodes if one.error is not None), None)
        if failed is not None and failed.error is not None:
            error, address = failed.error, failed.node.address
            where = error.where if address in error.where else f"{address} {error.where}".strip()
            raise type(error)(f"{count}; {error.message}", where=where, hint=error.hint) from error
        bad = next((one for one in self.nodes if not one.ready), None)
        if bad is None:
            raise NotReadyError(
                count, where="the Ray cluster", hint="select more nodes, or lower policy.min_ready"
            )
        raise NotReadyError(
            f"{count}; it is {bad.verdict}: {bad.reason}",
            where=bad.node.address,
            hint="see the table of the nodes",
        )
