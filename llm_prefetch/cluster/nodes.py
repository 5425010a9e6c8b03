"""The cluster as its driver sees it: how to get in, and which nodes a selector means."""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import AuthenticationError, RayError

from llm_prefetch.cluster.reports import Node
from llm_prefetch.errors import ClusterError
from llm_prefetch.spec import NodeSelector

_CONNECT_SECONDS = 5.0
_NODE_ID = "ray.io/node-id"
_NO_CHOICE = ("memory", "object_store_memory")
_SHOWN = 12


@contextmanager
def connected(address: str | None = None) -> Iterator[None]:
    """Be a driver of the cluster at `address` (or `RAY_ADDRESS`, or the one on this machine).

    Raises:
        ClusterError: there is no cluster there, or it does not accept our token.
    """
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        _knock(address)
        ray.init(
            address=address, namespace="llm-prefetch", log_to_driver=False, logging_level=logging.WARNING
        )
    except AuthenticationError as error:
        raise _refused(address) from error
    except (ConnectionError, RayError, RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ClusterError(
            f"no Ray cluster answers: {reason}",
            where="this machine" if address == "auto" else address,
            hint="run this on a node of the cluster, or name its address with --address or RAY_ADDRESS",
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
            hint=f"mend the selector; there are {what_there_is(alive, selector)}",
        )
    nodes = [Node(n["NodeID"], n["NodeManagerAddress"], n["NodeManagerHostname"]) for n in chosen]
    return sorted(nodes, key=lambda node: (node.address, node.id))


def what_there_is(alive: Sequence[Mapping[str, Any]], selector: NodeSelector) -> str:
    """What the nodes that are `alive` have of what `selector` asks for, and how many have it."""
    found: list[str] = []
    if selector.labels:
        labels = (
            pair for node in alive for pair in (node.get("Labels") or {}).items() if pair[0] != _NODE_ID
        )
        found.append(f"the labels {_counted(f'{key}={value}' for key, value in labels)}")
    if selector.resources:
        resources = (pair for node in alive for pair in (node.get("Resources") or {}).items())
        amounts = (
            f"{key}: {value:g}" for key, value in resources if ":" not in key and key not in _NO_CHOICE
        )
        found.append(f"the resources {_counted(amounts)}")
    if selector.ids or not found:
        found.append(f"the nodes {_counted(str(node['NodeManagerHostname']) for node in alive)}")
    return "; ".join(found)


def _counted(values: Iterable[str]) -> str:
    counts = Counter(values).most_common()
    shown = [value if count == 1 else f"{value} ({count} nodes)" for value, count in counts[:_SHOWN]]
    more = [f"and {len(counts) - _SHOWN} more"] if len(counts) > _SHOWN else []
    return ", ".join([*shown, *more]) or "(none)"


def _knock(address: str) -> None:
    """Fail in seconds where nothing listens, or where our token is not the right one.

    Ray itself tries for 20 s or for more than a minute, talks all the while, and does not say that it is the token.
    """
    parts = urlsplit(address if "://" in address else f"gcs://{address}")
    if parts.hostname and parts.port:
        socket.create_connection((parts.hostname, parts.port), _CONNECT_SECONDS).close()
        if parts.scheme == "gcs":
            _show_token(address)


def _show_token(address: str) -> None:
    try:
        import grpc  # type: ignore[import-untyped]
        from ray._private.grpc_utils import init_grpc_channel
    except (
        ImportError
    ):  # not Ray's public interface: without it, the wrong token is a cluster that does not answer
        return
    with init_grpc_channel(address) as channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")(b"", timeout=_CONNECT_SECONDS)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise _refused(address) from error


def _refused(address: str) -> ClusterError:
    return ClusterError(
        "the Ray cluster asks for a token, and ours is missing or wrong",
        where=address,
        hint="set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, to those of the cluster",
    )


def _matches(node: Mapping[str, Any], selector: NodeSelector) -> bool:
    names = {node["NodeID"], node["NodeManagerAddress"], node["NodeManagerHostname"]}
    labels = node.get("Labels") or {}
    resources = node.get("Resources") or {}
    return (
        (not selector.ids or not names.isdisjoint(selector.ids))
        and all(labels.get(key) == value for key, value in selector.labels.items())
        and all(resources.get(key, 0.0) >= amount for key, amount in selector.resources.items())
    )
