"""The actor that stages on the node it was put on, and how to put it there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from llm_prefetch.cluster.reports import Node
from llm_prefetch.errors import PrefetchError
from llm_prefetch.manifest import Manifest
from llm_prefetch.plan import PlanSummary
from llm_prefetch.progress import CountingProgress, Snapshot
from llm_prefetch.resolve import resolve
from llm_prefetch.spec import Spec
from llm_prefetch.stage import StageReport, committed_manifests, plan, stage
from llm_prefetch.store import open_store
from llm_prefetch.transfer import Throttle

_THREADS = 3  # one works while the others say how far it is and tell it to slow down or stop
_Answer = TypeVar("_Answer")


class NodeStager:
    """The actor. An error is an answer, so that it crosses Ray as it is."""

    def __init__(self, root: str | None) -> None:
        """Use the store at `root`, or at the node's own `LLM_PREFETCH_ROOT`."""
        self._root = Path(root) if root else None
        self._progress = CountingProgress()
        self._stop = threading.Event()
        self._throttle = Throttle()

    def stage(
        self, spec: dict[str, Any], manifests: dict[str, Manifest], share: float | None = None
    ) -> tuple[StageReport, dict[str, Manifest]] | PrefetchError:
        """Stage, with at most `share` bytes per second; the report, and the manifests of what it says is there."""

        def work() -> tuple[StageReport, dict[str, Manifest]]:
            store = open_store(self._root, create=True)
            parsed = Spec.model_validate(spec)
            self._throttle = Throttle(parsed.policy.bytes_per_second)
            if share is not None:
                self._throttle.share(share)
            report = stage(
                parsed,
                store,
                progress=self._progress,
                manifests=manifests,
                stop=self._stop,
                throttle=self._throttle,
            )
            return report, committed_manifests(store, report)

        return _answer(work)

    def plan(self, spec: dict[str, Any]) -> list[PlanSummary] | PrefetchError:
        """Plan."""

        def work() -> list[PlanSummary]:
            store = open_store(self._root, missing_ok=True)
            return [planned.summary for planned in plan(Spec.model_validate(spec), store)]

        return _answer(work)

    def published(self, spec: dict[str, Any]) -> dict[str, Manifest] | PrefetchError:
        """The manifests that the origins hold; an artifact without one is left out."""

        def work() -> dict[str, Manifest]:
            sources = [resolve(artifact) for artifact in Spec.model_validate(spec).artifacts]
            return {s.artifact.name: s.content for s in sources if isinstance(s.content, Manifest)}

        return _answer(work)

    def snapshot(self) -> Snapshot:
        """How far the staging is."""
        return self._progress.snapshot()

    def limit(self, bytes_per_second: float) -> None:
        """Use no more of what the nodes of the run share."""
        self._throttle.share(bytes_per_second)

    def cancel(self) -> None:
        """Stop the staging."""
        self._stop.set()


@contextmanager
def stager(node: Node, root: Path | None) -> Iterator[Any]:
    """An actor on `node`, hard-pinned, that ends with the block, and with this process at the latest."""
    pinned = NodeAffinitySchedulingStrategy(node.id, soft=False)
    options = {
        "num_cpus": 0,
        "max_concurrency": _THREADS,
        "max_restarts": 0,
        "scheduling_strategy": pinned,
    }
    actor = ray.remote(NodeStager).options(**options).remote(str(root) if root else None)
    try:
        yield actor
    finally:
        ray.kill(actor)


def _answer(work: Callable[[], _Answer]) -> _Answer | PrefetchError:
    try:
        return work()
    except PrefetchError as error:
        return error
