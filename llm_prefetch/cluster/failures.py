"""What Ray fails with, as our own errors: about one node, and with what to do next."""

from __future__ import annotations

from ray.exceptions import (
    ActorUnschedulableError,
    NodeDiedError,
    RayActorError,
    TaskUnschedulableError,
    WorkerCrashedError,
)

from llm_prefetch.cluster.reports import Node
from llm_prefetch.errors import ClusterError, OriginAccessError, PrefetchError
from llm_prefetch.redact import redact_text

_GONE = (ActorUnschedulableError, TaskUnschedulableError)
_DEAD = (NodeDiedError, RayActorError, WorkerCrashedError)


def lost(node: Node, error: Exception) -> ClusterError:
    """Why there is no answer from a node, where the `error` is Ray's."""
    reason = redact_text(str(error).strip().rpartition("\n")[2]) or type(error).__name__
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return ClusterError(
            f"llm-prefetch does not start there: {reason}",
            where=node.address,
            hint="install the same version of llm-prefetch on every node",
        )
    if isinstance(error, _GONE):
        return ClusterError(
            "the node has left the cluster since it was selected",
            where=node.address,
            hint="run the same again: it selects among the nodes that are there then",
        )
    if isinstance(error, _DEAD):
        return ClusterError(
            "the node or the process at work there died",
            where=node.address,
            hint="run the same again: what is done is kept there",
        )
    return ClusterError(f"Ray failed: {reason}", where=node.address, hint="see the Ray logs of that node")


def on_the_node(node: Node, error: PrefetchError) -> PrefetchError:
    """The `error` of a node, with what is different there: it does not read with the driver's credentials."""
    if not isinstance(error, OriginAccessError):
        return error
    own = f"it is {node.address} that must be allowed to read there; what the driver may does not help it"
    return type(error)(error.message, where=error.where, hint=f"{error.hint}; {own}" if error.hint else own)
