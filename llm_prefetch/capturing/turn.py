"""One capture or proof of a deployment at a time in a cluster: both start a replica under a fixed name.

Two at once would delete each other's replica, and a replica that is to prove a cache finds none on a node that another
one is captured on. The turn is the name of an actor that belongs to the process whose turn it is. Nothing else says
as well whether that process is alive: Ray ends the actor with it, however it ends, and no deadline has to be guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from llm_prefetch.capturing.trial import delete_left
from llm_prefetch.errors import NotReadyError

_NAMESPACE = "llm-prefetch"


class _Turn:
    """Does nothing, but has a name."""


@contextmanager
def turn(deployment: str, application: str, say: Callable[[str], None]) -> Iterator[None]:
    """Be the only capture or proof of a deployment for as long as the block lasts.

    Args:
        deployment: Whose cache.
        application: Of Ray Serve, that the replica will be: what a killed process has left of it is deleted.
        say: Told so.

    Raises:
        NotReadyError: another one is under way.
        MissingExtraError: Ray Serve is not installed here.
    """
    name = f"turn-{deployment}"
    # On this node our package is surely there.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    try:
        actor = ray.remote(num_cpus=0)(_Turn).options(
            name=name, namespace=_NAMESPACE, scheduling_strategy=here
        ).remote()  # fmt: skip
    except ValueError:  # the name is taken
        raise NotReadyError(
            f"another capture or proof of {deployment} is under way",
            where=f"the actor {name} in the Ray cluster",
            hint="wait until it has ended; that of a killed process ends within seconds",
        ) from None
    try:
        delete_left(application, say)
        yield
    finally:
        with suppress(Exception):
            ray.kill(actor)
