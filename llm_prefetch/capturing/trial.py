"""One real replica more, for as long as a block lasts: a Serve application of its own, which nothing is routed to.

It is placed by the label that Ray gives each node. Whatever ends the block, the application is deleted; what a killed
process left is deleted by the next one, as its name is a function of the deployment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any

import ray

from llm_prefetch.cluster.asking import ask_node
from llm_prefetch.cluster.reports import Node
from llm_prefetch.errors import ClusterError, MissingExtraError
from llm_prefetch.redact import redact_text

_POLL_SECONDS = 0.5
_CONTROLLER = "SERVE_CONTROLLER_ACTOR"
_LABEL = "ray.io/node-id"
_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
_SHOWN_CHARACTERS = 600


@contextmanager
def serve_running(options: Mapping[str, Any]) -> Iterator[None]:
    """Have Serve run for as long as the block lasts; where it runs already, it is left as it is.

    Args:
        options: Of `serve.start`, as the Serve YAML has them: Serve cannot change them while it runs, so what a killed
            process leaves running must be what the next `serve deploy` would have started.

    Raises:
        MissingExtraError: Ray Serve is not installed here.
    """
    serve = _serve()
    try:
        ray.get_actor(_CONTROLLER, namespace="serve")
    except ValueError:
        serve.start(**options)
    else:
        yield
        return
    try:
        yield
    finally:
        if not [app for app in serve.status().applications.values() if app.status != "DELETING"]:
            serve.shutdown()


def delete_left(name: str, say: Callable[[str], None]) -> None:
    """Delete the application that a killed process has left, if it has: its replica holds on to its node.

    Raises:
        MissingExtraError: Ray Serve is not installed here.
    """
    serve = _serve()
    if name in serve.status().applications:
        say(f"deleting {name}, which an earlier run has left")
        serve.delete(name)


@contextmanager
def trial_replica(
    name: str,
    llm_config: Mapping[str, Any],
    node: Node,
    *,
    runtime_env: Mapping[str, Any],
    seconds: float,
    stop: threading.Event,
    say: Callable[[str], None] = lambda _line: None,
) -> Iterator[Callable[[], None]]:
    """Start the replica and wait until its engine is up; yields what lets it go before the block ends.

    Args:
        name: Of the application.
        llm_config: As a Serve YAML has it.
        node: Where all of it is placed.
        runtime_env: Of the application: what its classes are imported with.
        seconds: How long a start may take.
        stop: When set, it is given up.
        say: Told what is waited for.

    Raises:
        ClusterError: it did not start.
    """
    serve = _serve()
    say(f"starting a replica on {node.address}")
    began = time.monotonic()
    try:
        # vLLM is on the node, and need not be here.
        ask_node(
            node,
            _deploy,
            name,
            dict(llm_config),
            node.id,
            seconds=seconds,
            stop=stop,
            runtime_env=runtime_env,
        )
        _wait(name, began + seconds, stop, say)
        yield lambda: serve.delete(name, _blocking=False)
    except BaseException:  # an interrupted process has seconds left: Serve goes on with it alone
        with suppress(Exception):
            serve.delete(name, _blocking=False)
        raise
    serve.delete(name)


def _serve() -> ModuleType:
    try:
        return import_module("ray.serve")
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"a replica is started through Ray Serve, which lacks {error.name}",
            where="this Python",
            hint="pip install 'ray[serve]'",
        ) from error


def _deploy(name: str, llm_config: dict[str, Any], node: str) -> None:
    """On the node: build the application. Serve places the replica on `node`, and is not waited for."""
    try:
        from ray import serve
        from ray.serve.llm import LLMConfig, build_llm_deployment

        options = {"placement_group_bundle_label_selector": [{_LABEL: node}]}
        app = build_llm_deployment(LLMConfig(**llm_config), override_serve_options=options)
        serve.run_many(
            [serve.RunTarget(app, name, route_prefix=None)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
    except Exception as error:  # noqa: BLE001 (an error of Serve or pydantic may not pickle)
        reason = redact_text(" ".join(f"{type(error).__name__}: {error}".split()))
        raise ClusterError(
            f"the replica cannot be deployed: {reason}",
            where=name,
            hint="does `serve deploy` take this YAML?",
        ) from None


def _wait(name: str, deadline: float, stop: threading.Event, say: Callable[[str], None]) -> None:
    serve = _serve()
    told, message, began = "", "", time.monotonic()
    while time.monotonic() < deadline and not stop.is_set():
        app = serve.status().applications.get(name)
        status = "" if app is None else str(getattr(app.status, "value", app.status))
        parts = [] if app is None else [one.message for one in app.deployments.values()]
        message = redact_text(
            " ".join(" ".join(filter(None, ["" if app is None else app.message, *parts])).split())
        )
        if status == "RUNNING":
            say(f"the engine is up after {time.monotonic() - began:.0f} s")
            return
        if status in _FAILED:
            raise ClusterError(
                f"the replica did not start: {message[-_SHOWN_CHARACTERS:]}",
                where=name,
                hint="see its log in /tmp/ray/session_latest/logs/serve on its node",
            )
        if message and message != told:
            told = message
            say(message[:_SHOWN_CHARACTERS])
        time.sleep(_POLL_SECONDS)
    raise _given_up(name, stop, time.monotonic() - began, message)


def _given_up(name: str, stop: threading.Event, seconds: float, message: str) -> ClusterError:
    if stop.is_set():
        return ClusterError("it was cancelled", where=name, hint="run the same again")
    return ClusterError(
        f"the replica was not up after {seconds:.0f} s{message and f': {message[-_SHOWN_CHARACTERS:]}'}",
        where=name,
        hint="is there room for one replica more on this node? A longer --deadline helps a slow start",
    )
