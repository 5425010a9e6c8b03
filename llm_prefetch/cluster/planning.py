"""What a staging would do on every node: the origins are read once, and each node plans for itself, in numbers.

One node reads the manifests; the others are handed them through Ray's object store and ask each origin one question,
whether they may read there at all. What comes back is a kilobyte for each node, however many files there are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from blake3 import blake3

from llm_prefetch.caches import KIND
from llm_prefetch.cluster.asking import Answer, ask_nodes
from llm_prefetch.cluster.reports import Node
from llm_prefetch.errors import PrefetchError
from llm_prefetch.forecast import Content, Forecast, find_sources, forecast
from llm_prefetch.manifest import canonical_json
from llm_prefetch.redact import redact
from llm_prefetch.resolve import Source
from llm_prefetch.spec import Spec
from llm_prefetch.store import NodeStore, open_store

_SECONDS = 600.0
_READERS = 3
_ID_CHARACTERS = 12


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What staging would do on one node, or the error that kept it from planning."""

    node: Node
    forecast: Forecast | None = None
    error: PrefetchError | None = None


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What staging would do on all nodes."""

    id: str
    """Changes with the spec and with what the origins hold; not with what the nodes have."""
    nodes: tuple[NodePlan, ...]
    source: str
    """The origins."""

    @property
    def failed(self) -> tuple[NodePlan, ...]:
        """The nodes that could not plan."""
        return tuple(node for node in self.nodes if node.error is not None)

    @property
    def fetch_bytes(self) -> int:
        """To read from the origins, over all nodes."""
        return sum(node.forecast.fetch_bytes for node in self.nodes if node.forecast)

    def rows(self) -> list[dict[str, Any]]:
        """One row for each node, as tables show it; bytes and seconds."""
        return [_row(node, self.source) for node in self.nodes]


@dataclass(frozen=True, slots=True)
class Planned:
    """What one node answers."""

    forecast: Forecast
    keys: tuple[str, ...]
    """Version or listing of each artifact at its origin, in the order of the spec.

    Without compile caches: whether one is staged depends on the node, and the spec pins it, or the key that signs it.
    """
    contents: dict[str, Content]
    """The same whole, by artifact name, if this node was the one to read them."""


Ask = Callable[[Sequence[Node], Mapping[str, Content] | None], Sequence[Answer[Planned]]]


def plan_cluster(
    spec: Spec, nodes: Sequence[Node], *, root: Path | None, stop: threading.Event | None = None
) -> ClusterPlan:
    """Plan `spec` on all `nodes`; writes nothing, and raises no error of a node.

    Args:
        spec: What to stage.
        nodes: Where.
        root: Root of the node store; `None` leaves it to the node's own `LLM_PREFETCH_ROOT`.
        stop: When set, the nodes stop, and those that have not answered have an error.
    """

    def ask(asked: Sequence[Node], known: Mapping[str, Content] | None) -> Sequence[Answer[Planned]]:
        shared = ray.put(known)  # once for all nodes
        where = str(root) if root else None
        return ask_nodes(
            asked, _planned_there, spec.model_dump(), where, [shared], seconds=_SECONDS, stop=stop
        )

    return plan_nodes(spec, nodes, ask)


def plan_nodes(spec: Spec, nodes: Sequence[Node], ask: Ask) -> ClusterPlan:
    """The same, with `ask` in place of Ray: it calls `plan_here` for each node it is given."""
    answers: dict[str, Answer[Planned]] = {}
    first: Planned | None = None
    for node in nodes[:_READERS]:  # what fails on one may work on the next
        [answers[node.id]] = ask([node], None)
        first = answers[node.id].value
        if first is not None:
            break
    others = [node for node in nodes if node.id not in answers]
    answers |= {answer.node.id: answer for answer in ask(others, first.contents if first else {})}
    ordered = [answers[node.id] for node in nodes]
    planned = next((answer.value for answer in ordered if answer.value is not None), None)
    plans = tuple(
        NodePlan(answer.node, answer.value.forecast if answer.value else None, answer.error)
        for answer in ordered
    )
    source = ", ".join(dict.fromkeys(redact(artifact.uri) for artifact in spec.artifacts))
    return ClusterPlan(_id(spec, planned.keys if planned else ()), plans, source)


def plan_here(spec: Spec, store: NodeStore, known: Mapping[str, Content] | None) -> Planned:
    """The plan of the node that this runs on.

    Raises:
        PrefetchError: an origin cannot be read from here, or the store cannot.
    """
    found = find_sources(spec, store, known)
    sources = [one for one in found if isinstance(one, Source)]
    keys = tuple(source.key for source in sources if source.artifact.kind != KIND)
    contents = {source.artifact.name: source.content for source in sources} if known is None else {}
    return Planned(forecast(spec, store, found), keys, contents)


def _planned_there(spec: dict[str, Any], root: str | None, shared: list[Any]) -> Planned:
    """On the node; a reference in a list is not fetched before it is asked for."""
    store = open_store(Path(root) if root else None, missing_ok=True)
    return plan_here(Spec.model_validate(spec), store, ray.get(shared[0]))


def _id(spec: Spec, keys: Sequence[str]) -> str:
    body = {"spec": spec.model_dump(mode="json"), "origins": list(keys)}
    return f"plan-{blake3(canonical_json(body)).hexdigest()[:_ID_CHARACTERS]}"


def _row(plan: NodePlan, source: str) -> dict[str, Any]:
    found = plan.forecast
    eta = found.eta_seconds if found else None
    return {
        "node": plan.node.address,
        "host": plan.node.hostname,
        "fits": found.fits if found else None,
        "fetch_bytes": found.fetch_bytes if found else None,
        "reuse_bytes": found.reuse_bytes if found else None,
        "evict_bytes": found.evict_bytes if found else None,
        "free_bytes": found.free_bytes if found else None,
        "eta_seconds": None if eta is None else round(eta, 1),
        "source": source,
        "evict": ", ".join(eviction.name for eviction in found.evictions) if found else "",
        "left_out": ", ".join(f"{one.name}: {one.verdict}" for one in found.left_out) if found else "",
        "error": str(plan.error or ""),
    }
