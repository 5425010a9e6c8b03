"""The cluster as its driver sees it: how to get in, and which nodes a selector means."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import RayError

from llm_prefetch.cluster.reports import Node
from llm_prefetch.errors import ClusterError
from llm_prefetch.spec import NodeSelector

_CONNECT_SECONDS = 5.0


@contextmanager
def connected(address: str | None = None) -> Iterator[None]:
    """Be a driver of the cluster at `address` (or `RAY_ADDRESS`, or the one on this machine).

    Raises:
        ClusterError: there is no cluster there.
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
            hint="compare with the labels and resources in `ray list nodes --detail`",
        )
    nodes = [Node(n["NodeID"], n["NodeManagerAddress"], n["NodeManagerHostname"]) for n in chosen]
    return sorted(nodes, key=lambda node: (node.address, node.id))


def _knock(address: str) -> None:
    """Fail in seconds where nothing listens: Ray itself tries for more than a minute, and talks all the while."""
    parts = urlsplit(address if "://" in address else f"gcs://{address}")
    if parts.hostname and parts.port:
        socket.create_connection((parts.hostname, parts.port), _CONNECT_SECONDS).close()


def _matches(node: Mapping[str, Any], selector: NodeSelector) -> bool:
    names = {node["NodeID"], node["NodeManagerAddress"], node["NodeManagerHostname"]}
    labels = node.get("Labels") or {}
    resources = node.get("Resources") or {}
    return (
        (not selector.ids or not names.isdisjoint(selector.ids))
        and all(labels.get(key) == value for key, value in selector.labels.items())
        and all(resources.get(key, 0.0) >= amount for key, amount in selector.resources.items())
    )
