"""The actor that stages on the node it was put on, and the actors of one run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from llm_prefetch.cluster.reports import Node
from llm_prefetch.errors import PrefetchError, disk_error
from llm_prefetch.live import DeploymentCheck, check_deployment
from llm_prefetch.manifest import Manifest
from llm_prefetch.names import remember
from llm_prefetch.progress import CountingProgress, Snapshot
from llm_prefetch.resolve import resolve
from llm_prefetch.spec import Spec
from llm_prefetch.stage import StageReport, committed_manifests, stage
from llm_prefetch.store import open_store
from llm_prefetch.transfer import Throttle

_THREADS = 3  # one works while the others say how far it is and tell it to slow down or stop
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Staged:
    """What a node answers after a staging."""

    report: StageReport
    check: DeploymentCheck
    """Of what lies there after the switch."""
    manifests: dict[str, Manifest]
    root: str


class NodeStager:
    """The actor. An error is an answer, so that it crosses Ray as it is."""

    def __init__(self, root: str | None) -> None:
        """Use the store at `root`, or at the node's own `LLM_PREFETCH_ROOT`."""
        self._root = Path(root) if root else None
        self._progress = CountingProgress()
        self._stop = threading.Event()
        self._throttle = Throttle()

    def stage(
        self,
        spec: dict[str, Any],
        manifests: dict[str, Manifest],
        share: float | None = None,
        called: Sequence[str] = (),
    ) -> Staged | PrefetchError:
        """Stage, with at most `share` bytes per second, what Prefect calls so; and look at what lies there then."""

        def work() -> Staged:
            store = open_store(self._root, create=True)
            parsed = Spec.model_validate(spec)
            for reference in called:
                remember(store, reference, parsed.deployment)
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
            check = check_deployment(store, parsed.deployment)
            return Staged(report, check, committed_manifests(store, report), str(store.root))

        return _answer(work)

    def check(self, deployment: str) -> DeploymentCheck | PrefetchError:
        """What lies there now."""
        return _answer(lambda: check_deployment(open_store(self._root), deployment))

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


class Stagers:
    """The actors of one run. One that did its work is kept until all have, to be asked once more then.

    For the threads of one run. An actor ends with this process at the latest.
    """

    def __init__(self) -> None:
        """None yet."""
        self._done: dict[str, Any] = {}
        self._lock = threading.Lock()

    @contextmanager
    def on(self, node: Node, root: Path | None) -> Iterator[Any]:
        """A new actor on `node`, hard-pinned; it ends here if the block fails."""
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
        except BaseException:
            ray.kill(actor)
            raise
        with self._lock:
            self._done[node.id] = actor

    def done(self, node: Node) -> Any | None:  # noqa: ANN401 (Ray's handle)
        """The actor that did its work on `node`."""
        with self._lock:
            return self._done.get(node.id)

    def close(self) -> None:
        """End them."""
        with self._lock:
            done, self._done = self._done, {}
        for actor in done.values():
            ray.kill(actor)


def _answer(work: Callable[[], _Answer]) -> _Answer | PrefetchError:
    try:
        return work()
    except PrefetchError as error:
        return error
    except OSError as error:
        return disk_error(error, "the node store")
