"""Capture: start one real replica of a launch, let its engine compile, and publish what it has left.

vLLM's key holds the environment and the configuration of the process that compiles, so nothing but a replica through
Ray Serve, from the LLMConfig that will be served, on a node with the model at its engine path, builds a cache that hits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray

from llm_prefetch.capturing.capture_node import (
    PUBLISH_SECONDS,
    Candidate,
    Captured,
    begin,
    collect,
    finish,
    look,
)
from llm_prefetch.capturing.launch import Launch
from llm_prefetch.capturing.trial import serve_running, trial_replica
from llm_prefetch.capturing.turn import turn
from llm_prefetch.cluster.asking import ask_node, ask_nodes
from llm_prefetch.cluster.nodes import select_nodes
from llm_prefetch.cluster.reports import Node
from llm_prefetch.errors import NotReadyError, PrefetchError
from llm_prefetch.signatures import OUTDATED, SigningKey, sign_published
from llm_prefetch.spec import NodeSelector

_NODE_SECONDS = 120.0
_AROUND_SECONDS = 300.0
"""What a capture may take on a node besides the replica's start, and before it publishes."""


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What a capture did, or would do: then `captured` is `None`."""

    deployment: str
    uri: str
    node: str
    captured: Captured | None = None
    start_seconds: float = 0.0
    """Until the engine was up."""
    seconds: float = 0.0
    """All of it."""
    signed_by: str = ""
    """The public key of who has signed it."""

    @property
    def artifact(self) -> dict[str, str]:
        """For the spec of the deployment."""
        version = self.captured.published.version if self.captured is not None else "b3-..."
        return {"name": "compile", "kind": "compile-cache", "uri": self.uri, "version": version}

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "artifact": self.artifact}


def capture(
    launch: Launch,
    uri: str,
    *,
    nodes: NodeSelector,
    root: Path | None,
    seconds: float,
    stop: threading.Event,
    say: Callable[[str], None] = lambda _line: None,
    dry_run: bool = False,
    key: SigningKey | None = None,
) -> CaptureReport:
    """Capture a compile cache and publish it at `uri`; the replica is gone when this returns, whatever happens.

    Args:
        launch: What is started.
        uri: Where the artifact goes.
        nodes: It is captured on one of these.
        root: Of the node store; `None` leaves it to the nodes.
        seconds: How long the replica may take to start.
        stop: When set, it is given up.
        say: Told what is done.
        dry_run: Only choose a node.
        key: Signs what the node has published. It stays here: no node sees it.

    Raises:
        NotReadyError: no node has the deployment ready, or another capture or proof of it is under way.
        ClusterError: the replica did not start.
        OriginError: the origin refused.
        MissingExtraError: Ray Serve is not installed here.
    """
    if dry_run:
        return CaptureReport(launch.deployment, uri, _free_node(launch, nodes, root, stop).address)
    began, name = time.monotonic(), f"llm-prefetch-capture-{launch.deployment}"
    with turn(launch.deployment, name, say):
        node = _free_node(launch, nodes, root, stop)
        captured, started = _captured(launch, name, uri, node, root, seconds, stop, say)
    signed_by = _sign(captured, uri, key, say)
    took = round(time.monotonic() - began, 3)
    return CaptureReport(launch.deployment, uri, node.address, captured, round(started, 3), took, signed_by)


def _free_node(launch: Launch, nodes: NodeSelector, root: Path | None, stop: threading.Event) -> Node:
    """Where it is captured."""
    found = candidates(select_nodes(nodes), launch.deployment, root, stop)
    for node, candidate in found.items():
        if not candidate.running:
            return node
    raise NotReadyError(
        f"every node that has {launch.deployment} ready runs replicas of it",
        where=", ".join(node.address for node in found),
        hint="add a node to capture on, or end the replicas of one",
    )


def _captured(
    launch: Launch,
    name: str,
    uri: str,
    node: Node,
    root: Path | None,
    seconds: float,
    stop: threading.Event,
    say: Callable[[str], None],
) -> tuple[Captured, float]:
    """What the node has published, and the seconds until the engine was up."""
    began = time.monotonic()
    with (
        serve_running(launch.serve_options),
        _cache_set_aside(node, launch.deployment, root, seconds + _AROUND_SECONDS, stop) as variables,
    ):
        config = launch.with_environment(variables)
        with trial_replica(
            name, config, node, runtime_env=launch.runtime_env, seconds=seconds, stop=stop, say=say
        ) as let_go:
            started = time.monotonic() - began
            say("publishing what it has compiled")
            captured = ask_node(
                node, collect, launch.deployment, root, uri, stop=stop, seconds=PUBLISH_SECONDS
            )
            let_go()
    return captured, started


def _sign(captured: Captured, uri: str, key: SigningKey | None, say: Callable[[str], None]) -> str:
    """Sign exactly what the node has answered, whatever lies there by now; the public key, empty without a key."""
    if key is None:
        if captured.outdated_signature:
            say(OUTDATED)
        return ""
    say(f"signing {captured.published.version}")
    sign_published(uri, captured.published.version, key)
    return key.public


@contextmanager
def _cache_set_aside(
    node: Node, deployment: str, root: Path | None, seconds: float, stop: threading.Event
) -> Iterator[dict[str, str]]:
    """The engine's variables; what was set aside on the node is put back, whatever happens."""
    variables = ask_node(node, begin, deployment, root, seconds, stop=stop, seconds=_NODE_SECONDS)
    try:
        yield variables
    except BaseException:
        with suppress(PrefetchError):
            ask_node(node, finish, deployment, root, seconds=_NODE_SECONDS)
        raise
    ask_node(node, finish, deployment, root, seconds=_NODE_SECONDS)


def candidates(
    nodes: Sequence[Node], deployment: str, root: Path | None, stop: threading.Event
) -> dict[Node, Candidate]:
    """The nodes on which a replica may start, those with the most GPUs and CPUs first.

    Raises:
        NotReadyError: there is none.
    """
    answers = ask_nodes(nodes, look, deployment, root, seconds=_NODE_SECONDS, stop=stop)
    ready = {one.node: one.value for one in answers if one.value is not None and not one.value.reason}
    if not ready:
        reasons = (str(one.error or (one.value and one.value.reason)) for one in answers)
        raise NotReadyError(
            f"no node has {deployment} ready: {'; '.join(dict.fromkeys(reasons))}",
            where=", ".join(node.address for node in nodes),
            hint="stage the model first: its engine path goes into the key",
        )
    size = {node["NodeID"]: node.get("Resources") or {} for node in ray.nodes()}

    def largest(node: Node) -> tuple[float, float, str]:
        found = size.get(node.id, {})
        return -found.get("GPU", 0.0), -found.get("CPU", 0.0), node.address

    return {node: ready[node] for node in sorted(ready, key=largest)}
