"""Ask every node the same: one pinned task on each, whose answer or error is that node's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import ray
from ray.exceptions import RayError, WorkerCrashedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from llm_prefetch.cluster.failures import lost
from llm_prefetch.cluster.reports import Node
from llm_prefetch.errors import ClusterError, PrefetchError

_POLL_SECONDS = 0.5
_LOOK_SECONDS = 5.0
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Answer(Generic[_Value]):
    """What one node says: a value, or the error that kept it from one."""

    node: Node
    value: _Value | None = None
    error: PrefetchError | None = None


def ask_nodes(
    nodes: Sequence[Node],
    question: Callable[..., _Value],
    *arguments: Any,  # noqa: ANN401 (whatever the question takes)
    seconds: float,
    stop: threading.Event | None = None,
    on_answer: Callable[[Answer[_Value]], None] = lambda _answer: None,
    runtime_env: Mapping[str, Any] | None = None,
) -> list[Answer[_Value]]:
    """Call `question(*arguments)` on all `nodes` at once; an answer for each, in their order. Raises nothing of theirs.

    Args:
        nodes: Where.
        question: A function at the top of a module of this package, which every node has.
        arguments: What it is called with; anything that pickles.
        seconds: How long all of it may take. A node that has not answered then has an error, and stops.
        stop: When set, the nodes stop too.
        on_answer: Told of each answer as it comes.
        runtime_env: What the question needs to be asked in, where that is not what nodes have.
    """
    # An error of ours is an answer, so that it crosses Ray as it is.
    task = ray.remote(
        num_cpus=0, max_retries=0, **({"runtime_env": dict(runtime_env)} if runtime_env else {})
    )(_answered)
    asked = {
        task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False), name=question.__name__
        ).remote(question, arguments): node
        for node in nodes
    }
    answers: dict[str, Answer[_Value]] = {}
    waiting, deadline = list(asked), time.monotonic() + seconds
    look = time.monotonic() + _LOOK_SECONDS
    try:
        while waiting and time.monotonic() < deadline and not (stop is not None and stop.is_set()):
            done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_SECONDS)
            found = [_answer(asked[reference], reference) for reference in done]
            if time.monotonic() >= look:
                dead = _on_dead_nodes(waiting, asked)
                found += [
                    Answer(asked[reference], error=lost(asked[reference], WorkerCrashedError()))
                    for reference in dead
                ]
                waiting = [reference for reference in waiting if reference not in dead]
                look = time.monotonic() + _LOOK_SECONDS
            for answer in found:
                answers[answer.node.id] = answer
                on_answer(answer)
    finally:
        # Only what has not answered: Ray 2.60 aborts a process that cancels a task whose answer it is storing.
        for reference in waiting:
            with suppress(RayError):
                ray.cancel(reference, force=True)
    for reference in waiting:
        answers[asked[reference].id] = Answer(asked[reference], error=_late(asked[reference], seconds, stop))
    return [answers[node.id] for node in nodes]


def ask_node(
    node: Node,
    question: Callable[..., _Value],
    *arguments: Any,  # noqa: ANN401 (as above)
    seconds: float,
    stop: threading.Event | None = None,
    runtime_env: Mapping[str, Any] | None = None,
) -> _Value:
    """What one node answers, as `ask_nodes`.

    Raises:
        PrefetchError: what it answers with, or that it does not.
    """
    (answer,) = ask_nodes([node], question, *arguments, seconds=seconds, stop=stop, runtime_env=runtime_env)
    if answer.error is not None:
        raise answer.error
    return cast("_Value", answer.value)


def _answered(question: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:  # noqa: ANN401
    try:
        return question(*arguments)
    except PrefetchError as error:
        return error


def _on_dead_nodes(waiting: Sequence[Any], asked: Mapping[Any, Node]) -> list[Any]:
    """What will never be answered. Of a node whose network fell silent, Ray fails a task only after minutes."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return [reference for reference in waiting if asked[reference].id not in alive]


def _answer(node: Node, reference: Any) -> Answer[Any]:  # noqa: ANN401 (an ObjectRef)
    try:
        value = ray.get(reference)
    except RayError as error:
        return Answer(node, error=lost(node, error))
    return Answer(node, error=value) if isinstance(value, PrefetchError) else Answer(node, value)


def _late(node: Node, seconds: float, stop: threading.Event | None) -> ClusterError:
    if stop is not None and stop.is_set():
        return ClusterError("it was cancelled", where=node.address, hint="run the same again")
    return ClusterError(
        f"no answer within {seconds:g} s", where=node.address, hint="see the Ray logs of that node"
    )
