"""The cluster: the same staging on every selected Ray node, through actors that are pinned to their node.

The only module outside `serve/` that imports Ray. A node needs this package and nothing of Prefect. On each node
one actor does the work, because an actor can be asked how far it is and told to stop while it works. Nodes never
wait for each other and never fail each other: each has its own report.

When an origin holds no manifest, the first node that stages computes the digests, and the others are pinned to
what it found, so that one run never leaves two versions on the cluster.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from llm_prefetch.errors import ClusterError, NotReadyError, PrefetchError
from llm_prefetch.manifest import Manifest
from llm_prefetch.plan import PlanSummary
from llm_prefetch.progress import CountingProgress, Snapshot
from llm_prefetch.record import Verdict
from llm_prefetch.resolve import resolve
from llm_prefetch.spec import NodeSelector, Spec
from llm_prefetch.stage import StageReport, committed_manifests, plan, stage
from llm_prefetch.store import open_store

POLL_SECONDS = 1.0
_ACTOR_THREADS = 3
_CANCEL_SECONDS = 5.0


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
    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    """What was staged, by artifact name; the other nodes are pinned to it."""

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


class Running(Protocol):
    """A staging in progress on one node: a future of `concurrent.futures` or of Prefect."""

    def result(self) -> NodeReport:
        """Wait for the report."""


@contextmanager
def connected(address: str | None = None) -> Iterator[None]:
    """Be a driver of the cluster at `address` (or `RAY_ADDRESS`, or the one on this machine).

    Raises:
        ClusterError: there is no cluster there.
    """
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(
            address=address or "auto",
            namespace="llm-prefetch",
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except (ConnectionError, RayError, RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ClusterError(
            f"no Ray cluster answers: {reason}",
            where=address or "RAY_ADDRESS or this machine",
            hint="run this on a node of the cluster, or name its address with --address",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def select_nodes(selector: NodeSelector) -> list[Node]:
    """The live nodes that satisfy all of `selector`, in a stable order.

    Raises:
        ClusterError: none does.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    chosen = [node for node in alive if _matches(node, selector)]
    if not chosen:
        raise ClusterError(
            f"no node of the cluster matches; {len(alive)} are alive",
            where=f"nodes: {selector.model_dump(exclude_defaults=True)}",
            hint="compare with the labels and resources in `ray list nodes`",
        )
    nodes = [Node(n["NodeID"], n["NodeManagerAddress"], n["NodeManagerHostname"]) for n in chosen]
    return sorted(nodes, key=lambda node: (node.address, node.id))


def stage_cluster(
    spec: Spec,
    nodes: Sequence[Node],
    start: Callable[[Node, Mapping[str, Manifest]], Running],
    *,
    root: Path | None,
) -> ClusterReport:
    """Stage on all `nodes`; `start` begins one of them and says how to wait for it.

    No error of a node is raised: each is in its node's report.
    """
    waiting, reports, manifests = list(nodes), [], dict[str, Manifest]()
    while waiting and len(manifests) < len(spec.artifacts):
        try:
            manifests = published_manifests(waiting[0], spec, root=root)
        except PrefetchError as error:
            reports.append(NodeReport(waiting.pop(0), error=error))
            continue
        if len(manifests) < len(spec.artifacts):
            reports.append(start(waiting.pop(0), manifests).result())
            manifests = dict(reports[-1].manifests) if reports[-1].ready else {}
    running = [start(node, manifests) for node in waiting]
    reports += [run.result() for run in running]
    return ClusterReport(tuple(reports), spec.policy.needed(len(nodes)))


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
        raise NotReadyError(count, hint="see the verdicts of the nodes")
    raise type(error)(f"{count}; {error.message}", where=error.where, hint=error.hint) from error


def stage_node(
    node: Node,
    spec: Spec,
    manifests: Mapping[str, Manifest],
    *,
    root: Path | None,
    on_progress: Callable[[Node, Snapshot], None] = lambda _node, _snapshot: None,
    stop: threading.Event | None = None,
) -> NodeReport:
    """Stage on one node and wait for it; never raises what went wrong there.

    Args:
        node: Where.
        spec: What.
        manifests: Versions that the run is pinned to, by artifact name.
        root: Root of the node store; `None` leaves it to the node's own `LLM_PREFETCH_ROOT`.
        on_progress: Told how far it is about once a second.
        stop: When set, the node stops within a piece; what is done is kept there.
    """
    with _actor(node, root) as actor:
        try:
            run = actor.stage.remote(spec.model_dump(), dict(manifests))
            while not ray.wait([run], timeout=POLL_SECONDS)[0]:
                on_progress(node, _soon(actor.snapshot.remote()) or Snapshot("", 0, 0, 0.0))
                if stop is not None and stop.is_set():
                    actor.cancel.remote()
                    ray.wait([run], timeout=_CANCEL_SECONDS)
                    break
            outcome = ray.get(run, timeout=_CANCEL_SECONDS)
            snapshot = _soon(actor.snapshot.remote())
            if snapshot is not None:
                on_progress(node, snapshot)
        except (RayError, TimeoutError) as error:
            return NodeReport(node, error=_lost(node, error))
    if isinstance(outcome, PrefetchError):
        return NodeReport(node, error=outcome)
    report, found = outcome
    return NodeReport(node, report=report, manifests=found)


def plan_node(node: Node, spec: Spec, *, root: Path | None) -> list[PlanSummary]:
    """What staging would do on one node.

    Raises:
        PrefetchError: as `stage.plan`, from the node.
    """
    summaries: list[PlanSummary] = _ask(node, root, lambda actor: actor.plan.remote(spec.model_dump()))
    return summaries


def published_manifests(node: Node, spec: Spec, *, root: Path | None) -> dict[str, Manifest]:
    """The manifests that the origins hold, as `node` sees them; an artifact without one is left out.

    Raises:
        PrefetchError: from the node.
    """
    found: dict[str, Manifest] = _ask(node, root, lambda actor: actor.published.remote(spec.model_dump()))
    return found


class NodeStager:
    """The actor: staging on the node it was put on."""

    def __init__(self, root: str | None) -> None:
        """Use the store at `root`, or at the node's own `LLM_PREFETCH_ROOT`."""
        self._root = Path(root) if root else None
        self._progress = CountingProgress()
        self._stop = threading.Event()

    def stage(
        self, spec: dict[str, Any], manifests: dict[str, Manifest]
    ) -> tuple[StageReport, dict[str, Manifest]] | PrefetchError:
        """Stage; an error is an answer, so that it crosses Ray as it is."""
        try:
            store = open_store(self._root, create=True)
            report = stage(
                Spec.model_validate(spec),
                store,
                progress=self._progress,
                manifests=manifests,
                stop=self._stop,
            )
            return report, committed_manifests(store, report)
        except PrefetchError as error:
            return error

    def plan(self, spec: dict[str, Any]) -> list[PlanSummary] | PrefetchError:
        """Plan."""
        try:
            store = open_store(self._root, create=True)
            return [planned.summary for planned in plan(Spec.model_validate(spec), store)]
        except PrefetchError as error:
            return error

    def published(self, spec: dict[str, Any]) -> dict[str, Manifest] | PrefetchError:
        """Ask the origins."""
        try:
            sources = [resolve(artifact) for artifact in Spec.model_validate(spec).artifacts]
        except PrefetchError as error:
            return error
        return {s.artifact.name: s.content for s in sources if isinstance(s.content, Manifest)}

    def snapshot(self) -> Snapshot:
        """How far the staging is."""
        return self._progress.snapshot()

    def cancel(self) -> None:
        """Stop the staging."""
        self._stop.set()


@contextmanager
def _actor(node: Node, root: Path | None) -> Iterator[Any]:
    """An actor on `node`, hard-pinned, that ends with the block."""
    pinned = NodeAffinitySchedulingStrategy(node.id, soft=False)
    options = {
        "num_cpus": 0,
        "max_concurrency": _ACTOR_THREADS,
        "max_restarts": 0,
        "scheduling_strategy": pinned,
    }
    actor = ray.remote(NodeStager).options(**options).remote(str(root) if root else None)
    try:
        yield actor
    finally:
        ray.kill(actor)


def _ask(node: Node, root: Path | None, call: Callable[[Any], Any]) -> Any:  # noqa: ANN401 (whatever the actor answers)
    with _actor(node, root) as actor:
        try:
            answer = ray.get(call(actor))
        except RayError as error:
            raise _lost(node, error) from error
    if isinstance(answer, PrefetchError):
        raise answer
    return answer


def _soon(reference: Any) -> Snapshot | None:  # noqa: ANN401 (an ObjectRef)
    """The answer if it comes within the poll interval; an actor that is starting or dying does not hold us up."""
    try:
        snapshot: Snapshot = ray.get(reference, timeout=POLL_SECONDS)
    except (RayError, TimeoutError):
        return None
    return snapshot


def _lost(node: Node, error: Exception) -> ClusterError:
    if isinstance(error, RayActorError):
        return ClusterError(
            "the node or its staging process died",
            where=node.address,
            hint="stage again: what is done is kept there",
        )
    reason = str(error).strip().rpartition("\n")[2] or type(error).__name__
    return ClusterError(f"Ray failed: {reason}", where=node.address, hint="see the Ray logs of that node")


def _matches(node: Mapping[str, Any], selector: NodeSelector) -> bool:
    names = {node["NodeID"], node["NodeManagerAddress"], node["NodeManagerHostname"]}
    labels = node.get("Labels") or {}
    resources = node.get("Resources") or {}
    return (
        (not selector.ids or not names.isdisjoint(selector.ids))
        and all(labels.get(key) == value for key, value in selector.labels.items())
        and all(resources.get(key, 0.0) >= amount for key, amount in selector.resources.items())
    )
