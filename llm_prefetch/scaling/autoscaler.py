"""Room for replicas: where it is on the nodes, and how Ray's autoscaler is asked for more.

What the autoscaler is asked for is a floor under the whole cluster: it sees to nodes on which all shapes of the request
fit at once, busy or not, and takes away none that it needs for them. There is one such request in a cluster, the last
one stands, and it stands until somebody clears it. So a request holds the nodes as they are, and what is missing beside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from llm_prefetch.spec import NodeSelector

Shape = Mapping[str, float]
"""An amount of each resource, on one node."""

_LEAST = 1e-6
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """What a node has, and what is free of it. `matches`: a replica may go there."""

    id: str
    matches: bool
    total: Shape
    free: Shape


@dataclass(frozen=True, slots=True)
class Request:
    """What the autoscaler is asked for: shapes, and for each the labels of the nodes that it may lie on."""

    shapes: tuple[dict[str, float], ...] = ()
    labels: tuple[dict[str, str], ...] = ()


def without_room(shapes: Sequence[Shape], nodes: Sequence[NodeRoom]) -> list[Shape]:
    """Those of `shapes` that fit on no matching node any more, when each is put where it fits first."""
    free = [dict(node.free) for node in nodes if node.matches]
    left = []
    for shape in sorted(shapes, key=lambda shape: -sum(shape.values())):
        place = next((node for node in free if _fits(shape, node)), None)
        if place is None:
            left.append(shape)
            continue
        _take(shape, place)
    return left


def request_for(shapes: Sequence[Shape], nodes: Sequence[NodeRoom], selector: NodeSelector) -> Request:
    """The nodes as they are, and new ones that `selector` takes for those of `shapes` that have no room on them.

    Of each node all that the shapes could take is asked for, so that the autoscaler neither counts on it for the missing
    ones nor takes an idle node away.
    """
    names = sorted({name for shape in shapes for name in shape} | set(selector.resources))
    labels = dict(selector.labels)
    pairs = []
    for node in nodes:
        held = {name: node.total[name] for name in names if node.total.get(name, 0) > _LEAST}
        if held:
            pairs.append((held, labels if node.matches else {}))
    pairs += [(new, labels) for new in _new_nodes(without_room(shapes, nodes), selector.resources)]
    return Request(tuple(shape for shape, _ in pairs), tuple(wanted for _, wanted in pairs))


def _new_nodes(shapes: Sequence[Shape], least: Shape) -> list[dict[str, float]]:
    """What new nodes must have for `shapes`, each no less than `least`, on which several of them may fit."""
    new: list[dict[str, float]] = []
    free: list[dict[str, float]] = []
    for shape in shapes:
        place = next((node for node in free if _fits(shape, node)), None)
        if place is None:
            node = {
                name: max(shape.get(name, 0.0), least.get(name, 0.0)) for name in sorted({*shape, *least})
            }
            new.append(node)
            place = dict(node)
            free.append(place)
        _take(shape, place)
    return new


@contextmanager
def standing(request: Request, ask: Callable[[Request], None]) -> Iterator[None]:
    """Let `request` stand as long as the block runs; however that ends, the cluster is left without a request."""
    try:
        ask(request)
        yield
    finally:
        try:
            ask(Request())
        except Exception:  # noqa: BLE001 (whatever Ray raises: what went wrong in the block is what counts)
            _log.warning(
                "the request for nodes could not be cleared, and keeps them: "
                "clear it by ray.autoscaler.sdk.request_resources(bundles=[])",
                exc_info=True,
            )


def _fits(shape: Shape, free: Shape) -> bool:
    return all(free.get(name, 0) >= amount - _LEAST for name, amount in shape.items())


def _take(shape: Shape, free: dict[str, float]) -> None:
    for name, amount in shape.items():
        free[name] -= amount
