"""What a scale-up did, replica by replica, and whether all of it is true that it was for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llm_prefetch.errors import NotReadyError, PrefetchError
from llm_prefetch.record import Verdict
from llm_prefetch.scaling.serve_target import ServeTarget


@dataclass(frozen=True, slots=True)
class StartSeen:
    """The start of a replica, as the ledger of its node tells of it."""

    verdict: str
    rung: str
    bundle: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One replica at the end; it is `new` if it came up in this run."""

    id: str
    node: str
    state: str
    new: bool
    bundle: str = ""
    """What was verified on its node before Serve was asked; empty where nothing was."""
    start: StartSeen | None = None

    @property
    def staged(self) -> bool:
        """Whether its node was verified before Serve was asked."""
        return bool(self.bundle)

    def trouble(self, *, require_hit: bool) -> str:
        """What keeps a new replica from counting as warm; empty where nothing does."""
        if not self.new:
            return ""
        if not self.staged:
            return f"{self.id} came up on {self.node}, where nothing was staged"
        if not require_hit:
            return ""
        if self.start is None:
            return f"the ledger of {self.node} knows of no start of {self.id}"
        if self.start.verdict != Verdict.HIT:
            return f"{self.id} found {self.start.verdict} on {self.node} and came up by {self.start.rung}"
        if self.start.bundle != self.bundle:
            return f"{self.id} came up from another generation than the one that was verified on {self.node}"
        return ""


@dataclass(frozen=True, slots=True)
class ScaleReport:
    """What happened; `asked` is what Serve was asked for in this run, 0 where it was left as it was."""

    target: ServeTarget
    before: int
    wanted: int
    asked: int = 0
    replicas: tuple[ReplicaReport, ...] = ()
    replaced: tuple[str, ...] = ()
    """Replicas that ran when Serve was asked and are gone, although nobody asked for that."""
    steps: Mapping[str, float] = field(default_factory=dict)
    """Seconds by step."""
    error: PrefetchError | None = None
    """What ended the run."""

    @property
    def troubles(self) -> list[str]:
        """What is not as it should be although all replicas run."""
        require_hit = self.target.require_hit
        found = [replica.trouble(require_hit=require_hit) for replica in self.replicas]
        gone = f"Serve has replaced replicas that ran before: {', '.join(self.replaced)}"
        return [trouble for trouble in [*found, gone if self.replaced else ""] if trouble]

    @property
    def scaled(self) -> bool:
        """Whether all wanted replicas run, and the new ones warm."""
        return self.error is None and not self.troubles

    @property
    def serve(self) -> str:
        """What Serve is left with."""
        if self.asked:
            return f"Serve was asked for {self.asked} replicas, and is left so"
        return "Serve is as it was"

    def rows(self) -> list[dict[str, Any]]:
        """One row for each replica, as tables show it."""
        return [
            {
                "replica": replica.id,
                "node": replica.node,
                "state": replica.state,
                "new": replica.new,
                "staged": replica.staged,
                "start": replica.start.verdict if replica.start else "",
                "reason": replica.trouble(require_hit=self.target.require_hit),
            }
            for replica in self.replicas
        ]

    def markdown(self) -> str:
        """A page about it: what was wanted, what came of it, and where the time went."""
        target = self.target
        new = sum(replica.new for replica in self.replicas)
        told = self.troubles if self.error is None else [str(self.error)]
        lines = [
            f"## `{target.application}` / `{target.deployment}`: {self.before} to {self.wanted} replicas",
            "",
            f"{'Done' if self.scaled else 'Not done'}: {new} new; {self.serve}.",
            "",
            *(f"- {line}" for line in told),
            *([""] if told else []),
            "| step | seconds |",
            "|---|---|",
            *(f"| {name} | {seconds:.1f} |" for name, seconds in self.steps.items()),
        ]
        return "\n".join(lines)


def require_scaled(report: ScaleReport) -> None:
    """Pass if all wanted replicas run, and the new ones warm.

    Raises:
        PrefetchError: what ended the run, and what Serve is left with.
        NotReadyError: all replicas run, but not as they should.
    """
    error = report.error
    if error is not None:
        raise type(error)(f"{error.message}; {report.serve}", where=error.where, hint=error.hint) from error
    if report.troubles:
        raise NotReadyError(
            f"the replicas run, but {'; '.join(report.troubles)}; {report.serve}",
            where=f"{report.target.application}/{report.target.deployment}",
            hint="let the nodes of the spec be those that the replicas may go to, and have the deployment use "
            "llm_prefetch.serve.PrefetchCallback, or switch require_hit off",
        )
