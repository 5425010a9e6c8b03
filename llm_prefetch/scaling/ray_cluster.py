"""The nodes of a Ray cluster as a scale-up asks them: for room, for what is live, for the starts in their ledgers."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import ray
from ray.autoscaler.sdk import request_resources
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.exceptions import RayError

from llm_prefetch import ledger
from llm_prefetch.caches.proof import Proof, proof
from llm_prefetch.cluster.asking import Answer, ask_nodes
from llm_prefetch.cluster.inspection import LiveBundle, live_bundle
from llm_prefetch.cluster.nodes import select_nodes
from llm_prefetch.cluster.reports import Node
from llm_prefetch.errors import ClusterError
from llm_prefetch.scaling.autoscaler import NodeRoom, Request
from llm_prefetch.scaling.scale_report import StartSeen
from llm_prefetch.spec import NodeSelector, Spec
from llm_prefetch.store import open_store

_log = logging.getLogger(__name__)
_ANSWER_SECONDS = 120.0  # the first question to a node starts a process there


class RayCluster:
    """The cluster that this process is connected to."""

    def __init__(self, spec: Spec, root: Path | None) -> None:
        """`root` is that of the node stores; `None` leaves it to the nodes' own `LLM_PREFETCH_ROOT`."""
        self._spec, self._root = spec, root

    def rooms(self) -> list[NodeRoom]:
        """What each live node has, what is free of it, and whether the spec selects it."""
        selected = set[str]()
        with suppress(ClusterError):  # none is, yet
            selected = {node.id for node in select_nodes(self._spec.nodes)}
        free = ray._private.state.available_resources_per_node()  # noqa: SLF001 (there is no public one)
        return [
            NodeRoom(
                node["NodeID"], node["NodeID"] in selected, node["Resources"], free.get(node["NodeID"], {})
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    def request(self, request: Request) -> None:
        """Replace what the autoscaler is asked for.

        Raises:
            ClusterError: Ray does not take it.
        """
        if any(request.labels) and not is_autoscaler_v2():
            _log.warning(
                "this cluster's autoscaler, version 1, knows no labels: it may add nodes without them"
            )
        try:
            request_resources(bundles=list(request.shapes), bundle_label_selectors=list(request.labels))
        except (RayError, RuntimeError, TypeError, ValueError) as error:
            raise ClusterError(
                f"Ray does not take the request for nodes: {str(error).partition(chr(10))[0]}",
                where=f"nodes: {self._spec.nodes.model_dump(exclude_defaults=True)}",
                hint="mend the labels, or switch request_nodes off",
            ) from error

    def live(self) -> list[Answer[LiveBundle]]:
        """What each selected node says that is live there, by the quick check.

        Raises:
            ClusterError: no node is selected any more.
        """
        nodes = select_nodes(self._spec.nodes)
        return ask_nodes(nodes, live_bundle, self._spec.deployment, self._root, seconds=_ANSWER_SECONDS)

    def proofs(self, nodes: Sequence[Node]) -> list[Answer[Proof | None]]:
        """What each of these nodes knows of the compile cache that is live there."""
        return ask_nodes(nodes, proof_on_node, self._spec.deployment, self._root, seconds=_ANSWER_SECONDS)

    def starts(self, nodes: Sequence[str]) -> dict[str, StartSeen]:
        """The last start of each replica that the ledgers of these nodes tell of, by the name of its actor."""
        asked = select_nodes(NodeSelector(ids=list(nodes)))
        answers = ask_nodes(asked, starts_on_node, self._spec.deployment, self._root, seconds=_ANSWER_SECONDS)
        return {name: start for answer in answers for name, start in (answer.value or {}).items()}


def dashboard_url(named: str) -> str:
    """The dashboard that was `named`, or else the one that the environment or the cluster names.

    Raises:
        ClusterError: the cluster has none.
    """
    url = named or os.environ.get("RAY_DASHBOARD_ADDRESS") or ray._private.worker.get_dashboard_url()  # noqa: SLF001
    if not url:
        raise ClusterError(
            "the cluster does not say where its dashboard is",
            where="RAY_DASHBOARD_ADDRESS",
            hint="name it in the target's dashboard; Serve's REST API is there",
        )
    return url if "://" in url else f"http://{url}"


def proof_on_node(deployment: str, root: Path | None) -> Proof | None:
    """What is known of the compile cache that is live on the node that this runs on.

    Raises:
        DiskError: there is no store, or it cannot be read.
    """
    return proof(open_store(root), deployment)


def starts_on_node(deployment: str, root: Path | None) -> dict[str, StartSeen]:
    """The last start of each replica of `deployment` in the ledger of the node that this runs on.

    Raises:
        DiskError: there is no store, or it cannot be read.
    """
    return {
        str(row["replica"]): StartSeen(
            *(str(row.get(field, "")) for field in ("verdict", "rung", "bundle", "reason"))
        )
        for row in ledger.read(open_store(root), "start")
        if row.get("replica") and row.get("deployment") == deployment and row.get("role") != "worker"
    }
