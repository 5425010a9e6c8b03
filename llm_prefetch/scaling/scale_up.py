"""Bring up more replicas of a deployment, warm: nodes first, then the files on them, and only then Ray Serve.

Until the files are verified on the nodes Serve is as it was, so whatever fails before has cost nothing. From then on
Serve is left with what it was asked for, because its replicas may come up yet; the report says which of the two it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from llm_prefetch.caches.proof import Proof
from llm_prefetch.cluster.asking import Answer
from llm_prefetch.cluster.inspection import LiveBundle
from llm_prefetch.cluster.reports import Node
from llm_prefetch.errors import ClusterError, NotReadyError, PrefetchError
from llm_prefetch.record import Verdict
from llm_prefetch.scaling.autoscaler import NodeRoom, Request, Shape, request_for, standing, without_room
from llm_prefetch.scaling.scale_report import ReplicaReport, ScaleReport, StartSeen
from llm_prefetch.scaling.serve_api import Served, UnansweredError
from llm_prefetch.scaling.serve_target import ServeTarget
from llm_prefetch.scaling.waiting import Clock, wait_for
from llm_prefetch.spec import Spec

_UNKNOWN = Served(0, (), ())
_log = logging.getLogger(__name__)


class Serve(Protocol):
    """The deployment in Ray Serve, as `serve_api.ServeDeployment` is it."""

    def read(self) -> Served:
        """As it is."""

    def scale(self, replicas: int, /) -> None:
        """Ask for so many replicas."""


class Cluster(Protocol):
    """The nodes, as `ray_cluster.RayCluster` asks them."""

    def rooms(self) -> list[NodeRoom]:
        """What each live node has, what is free of it, and whether the spec selects it."""

    def request(self, request: Request, /) -> None:
        """Replace what the autoscaler is asked for."""

    def live(self) -> list[Answer[LiveBundle]]:
        """What each selected node says that is live there, by the quick check."""

    def proofs(self, nodes: Sequence[Node], /) -> list[Answer[Proof | None]]:
        """What each of these nodes knows of the compile cache that is live there."""

    def starts(self, nodes: Sequence[str], /) -> dict[str, StartSeen]:
        """The last start of each replica that the ledgers of these nodes tell of, by the name of its actor."""


def scale_up(
    spec: Spec,
    target: ServeTarget,
    *,
    serve: Serve,
    cluster: Cluster,
    stage: Callable[[], object],
    clock: Clock = time,
) -> ScaleReport:
    """Have the replicas that `target` wants, on nodes where `spec` is staged and verified.

    No `PrefetchError` is raised: it is in the report, see `scale_report.require_scaled`. However this ends, by an
    interruption too, no request for nodes is left standing.

    Args:
        spec: What is staged, and on which nodes; new replicas are expected there.
        target: Which deployment of Serve, and how many replicas.
        serve: That deployment.
        cluster: The nodes.
        stage: Stages `spec` on them; whatever it raises ends the run with Serve untouched.
        clock: The time.
    """
    run = _Run(spec, target, serve, cluster, clock)
    try:
        shapes = run.begin()
        with run.standing_request(shapes):
            with run.step("nodes"):
                run.wait_for_room(shapes)
            with run.step("stage"):
                stage()
            with run.step("verify"):
                run.verify()
            with run.step("scale"):
                run.scale()
            with run.step("replicas"):
                run.wait_for_replicas()
    except PrefetchError as error:
        _log.info("ended: %s", error)
        return run.report(error)
    except BaseException:
        _log.warning("interrupted: %s", run.report(None).serve)
        raise
    return run.report(None)


@dataclass
class _Run:
    """What is known so far; the report can be made of it at any time."""

    spec: Spec
    target: ServeTarget
    serve: Serve
    cluster: Cluster
    clock: Clock
    before: Served = _UNKNOWN
    after: Served = _UNKNOWN
    wanted: int = 0
    asked: int = 0
    accepted: bool = False
    bundles: Mapping[str, str] = field(default_factory=dict)
    """What was verified, by node id; compile caches differ among nodes that differ."""
    starts: Mapping[str, StartSeen] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)

    def begin(self) -> tuple[Shape, ...]:
        """What needs a place on a node."""
        self.before = self.after = self.serve.read()
        self._raise_failure(self.before)
        self.wanted = self.target.wanted(self.before.target)
        each: tuple[Shape, ...] = (self.target.shape,) if self.target.shape else self.before.shapes
        return each * max(0, self.wanted - self.before.placed)

    def standing_request(self, shapes: Sequence[Shape]) -> AbstractContextManager[None]:
        """Until the replicas run, because the autoscaler would take away nodes that are idle while they are staged."""
        if not shapes or not self.target.request_nodes:
            return nullcontext()
        request = request_for(shapes, self.cluster.rooms(), self.spec.nodes)
        return standing(request, self.cluster.request)

    def wait_for_room(self, shapes: Sequence[Shape]) -> None:
        def lacking() -> str:
            left = without_room(shapes, self.cluster.rooms())
            return f"room for {len(left)} more of {dict(left[0])} on the selected nodes" if left else ""

        what = wait_for(lacking, seconds=self.target.node_seconds, clock=self.clock)
        if what:
            raise ClusterError(
                f"there was no {what} within {self.target.node_seconds:g} s",
                where=f"nodes: {self.spec.nodes.model_dump(exclude_defaults=True)}",
                hint="without an autoscaler nobody adds nodes: add them yourself. With one, see `ray status`: do its "
                "node types have these labels and resources, and may it have more nodes?",
            )

    def verify(self) -> None:
        """Enough nodes are ready, all with the same versions, and compile caches are proven where that is wanted."""
        answers = self.cluster.live()
        found = {answer.node: answer.value for answer in answers if answer.value is not None}
        ready = [node for node, live in found.items() if live.verdict is Verdict.HIT]
        generations = {found[node].core for node in ready}
        if len(ready) < max(1, self.spec.policy.needed(len(answers))) or len(generations) != 1:
            bad = next((answer for answer in answers if answer.node not in ready), None)
            why = bad and f"; {bad.node.address}: {bad.error or (bad.value and bad.value.reason)}"
            raise NotReadyError(
                f"{len(ready)} of {len(answers)} nodes are ready, with {len(generations)} generations{why or ''}",
                where=self.spec.deployment,
                hint="another staging or a rollback came between: run this again",
            )
        self.bundles = {node.id: found[node].bundle for node in ready}
        if self.target.require_proof:
            self._require_proof(ready)

    def _require_proof(self, nodes: Sequence[Node]) -> None:
        for answer in self.cluster.proofs(nodes):
            if answer.value is None or not answer.value.used:
                known = answer.value and f"{answer.value.outcome}: {answer.value.reason}"
                raise NotReadyError(
                    f"no engine is known to find the compile cache there: {answer.error or known or 'none was tried'}",
                    where=answer.node.address,
                    hint="run the flow prove for these nodes, then this again",
                )

    def scale(self) -> None:
        """Unless somebody has asked for as many meanwhile."""
        self.before = self.after = self.serve.read()
        if self.before.target >= self.wanted:
            return
        self.asked = self.wanted  # from now on it may be, however this ends
        try:
            self.serve.scale(self.wanted)
        except PrefetchError as error:
            if not isinstance(error, UnansweredError):
                self.asked = 0
            raise
        _log.info("Serve was asked for %d replicas instead of %d", self.wanted, self.before.target)

    def wait_for_replicas(self) -> None:
        what = wait_for(self._lacking_replicas, seconds=self.target.replica_seconds, clock=self.clock)
        new = [replica for replica in self.after.replicas if replica.id not in self._ran]
        if new:
            self.starts = self.cluster.starts(sorted({replica.node for replica in new if replica.node}))
        if what:
            raise NotReadyError(
                f"after {self.target.replica_seconds:g} s there is still to wait for {what}",
                where=self._where,
                hint="see the logs of its replicas in Ray's dashboard; running this again waits on",
            )

    def _lacking_replicas(self) -> str:
        try:
            self.after = self.serve.read()
        except UnansweredError as error:
            return f"Serve to answer: {error.message}"
        self._raise_failure(self.after)
        if self.after.target < self.wanted:
            if not self.accepted:  # Serve takes up a config a moment after it has answered
                return f"Serve to take up the number of {self.wanted} replicas"
            raise NotReadyError(
                f"somebody has asked Serve for {self.after.target} replicas meanwhile, {self.wanted} were wanted",
                where=self._where,
                hint="let one scaler decide, then run this again",
            )
        self.accepted = True
        lacking = self.wanted - sum(replica.running for replica in self.after.replicas)
        if lacking <= 0 and self.after.healthy:
            return ""
        told = f" ({self.after.message})" if self.after.message else ""
        return (f"{lacking} more replicas to run" if lacking > 0 else "Serve to have done with it") + told

    def _raise_failure(self, served: Served) -> None:
        if served.failure:
            raise NotReadyError(
                f"Serve has given up: {served.failure}",
                where=self._where,
                hint="see the logs of its replicas; it tries again when it is deployed anew",
            )

    @property
    def _where(self) -> str:
        return f"{self.target.application}/{self.target.deployment}"

    @property
    def _ran(self) -> frozenset[str]:
        """The replicas that ran before Serve was asked."""
        return frozenset(replica.id for replica in self.before.replicas if replica.running)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        began = self.clock.monotonic()
        try:
            yield
        finally:
            self.steps[name] = round(self.clock.monotonic() - began, 3)
            _log.info("%s: %.1f s", name, self.steps[name])

    def report(self, error: PrefetchError | None) -> ScaleReport:
        replicas = tuple(
            ReplicaReport(
                replica.id,
                replica.address,
                replica.state,
                new=replica.id not in self._ran,
                bundle=self.bundles.get(replica.node, ""),
                start=self.starts.get(replica.name),
            )
            for replica in self.after.replicas
        )
        left = {replica.id for replica in self.after.replicas if replica.state != "STOPPING"}
        return ScaleReport(
            self.target,
            self.before.target,
            self.wanted,
            self.asked,
            replicas,
            replaced=tuple(sorted(self._ran - left)),
            steps=self.steps,
            error=error,
        )
