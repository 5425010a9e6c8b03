"""Serve, the cluster and the clock of a scale-up, which do what a test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from llm_prefetch.caches.evidence import Outcome
from llm_prefetch.caches.proof import Proof
from llm_prefetch.cluster.asking import Answer
from llm_prefetch.cluster.inspection import LiveBundle, LiveMember
from llm_prefetch.cluster.reports import Node
from llm_prefetch.live import Member
from llm_prefetch.record import Verdict
from llm_prefetch.scaling.autoscaler import NodeRoom, Request
from llm_prefetch.scaling.scale_report import ScaleReport, StartSeen
from llm_prefetch.scaling.scale_up import scale_up
from llm_prefetch.scaling.serve_api import Replica, Served
from llm_prefetch.scaling.serve_target import ServeTarget
from llm_prefetch.spec import Spec

NODES = [Node(f"id{n}", f"10.0.0.{n}", f"host{n}") for n in range(2)]
GPU = {"GPU": 1.0}
SPEC = Spec.model_validate(
    {
        "deployment": "llama",
        "artifacts": [{"name": "weights", "uri": "s3://b/m"}],
        "nodes": {"labels": {"pool": "a10g"}},
    }
)
PROOF = Proof("llama", "bundle-1", Outcome.HIT, "loaded", used=True, node="10.0.0.0")


def target(**fields: Any) -> ServeTarget:
    return ServeTarget.model_validate(
        {"application": "llm", "deployment": "LLMServer:llama", "replicas": 2, **fields}
    )


def live(bundle: str, weights: str = "b3-1", *caches: str) -> LiveBundle:
    """What is live on a node that is well: versions of the weights, and of compile caches that fit it."""
    members = [
        Member("weights", "model", weights),
        *(Member("cache", "compile-cache", one) for one in caches),
    ]
    return LiveBundle(bundle, Verdict.HIT, "", tuple(LiveMember(member, "", "") for member in members))


def replica(name: str, node: Node = NODES[0], state: str = "RUNNING") -> Replica:
    return Replica(name, f"actor-{name}", state, node.id, node.address)


class World:
    """Serve, the cluster and the time; what happens is in `events`, and `at` says what happens by itself."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.at: dict[float, Callable[[], None]] = {}
        self.now = 0.0
        self.served = Served(1, (replica("old"),), (GPU,))
        self.free = {node.id: 1.0 for node in NODES}
        self.requests: list[Request] = []
        self.lives = dict.fromkeys(NODES, live("bundle-1"))
        self.seen = {"actor-new": StartSeen("HIT", "hit", "bundle-1", "")}
        self.proven = dict.fromkeys(NODES, PROOF)
        self.trouble: dict[str, BaseException] = {}
        self.new_replicas = (replica("new", NODES[1]),)

    # The time.
    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for when in [when for when in self.at if when <= self.now]:
            self.at.pop(when)()

    # Serve.
    def read(self) -> Served:
        self._happens("read")
        return self.served

    def scale(self, replicas: int) -> None:
        self._happens(f"scale {replicas}")
        self.served = replace(
            self.served, target=replicas, replicas=(*self.served.replicas, *self.new_replicas)
        )

    # The cluster.
    def rooms(self) -> list[NodeRoom]:
        return [NodeRoom(name, True, {"GPU": 1.0}, {"GPU": free}) for name, free in self.free.items()]

    def request(self, request: Request) -> None:
        self.requests.append(request)
        self._happens("request" if request.shapes else "clear")

    def live(self) -> list[Answer[LiveBundle]]:
        self._happens("verify")
        return [Answer(node, live) for node, live in self.lives.items()]

    def starts(self, nodes: Sequence[str]) -> dict[str, StartSeen]:
        self._happens(f"ledgers {','.join(nodes)}")
        return self.seen

    def stage(self) -> None:
        self._happens("stage")

    def proofs(self, nodes: Sequence[Node]) -> list[Answer[Proof | None]]:
        self._happens("proofs")
        return [Answer(node, self.proven.get(node)) for node in nodes]

    def run(self, wanted: ServeTarget | None = None, spec: Spec = SPEC) -> ScaleReport:
        return scale_up(
            spec,
            wanted or target(),
            serve=self,
            cluster=self,
            stage=self.stage,
            clock=self,
        )

    def _happens(self, event: str) -> None:
        self.events.append(event)
        trouble = self.trouble.get(event)
        if trouble is not None:
            raise trouble

    @property
    def told(self) -> list[str]:
        """The events without the looks at Serve."""
        return [event for event in self.events if event != "read"]
