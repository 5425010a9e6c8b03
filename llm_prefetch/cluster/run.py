"""What the nodes of one run share."""

from __future__ import annotations

from dataclasses import dataclass, field

from llm_prefetch.cluster.bandwidth import SharedBandwidth
from llm_prefetch.cluster.pins import Pins
from llm_prefetch.cluster.stager import Stagers
from llm_prefetch.spec import Spec


@dataclass(frozen=True)
class Run:
    """The versions, so that all nodes get the same, the bandwidth, and the actors until the run ends."""

    pins: Pins
    bandwidth: SharedBandwidth
    stagers: Stagers = field(default_factory=Stagers)

    @classmethod
    def of(cls, spec: Spec) -> Run:
        """A new run of `spec`."""
        names = frozenset(artifact.name for artifact in spec.artifacts)
        return cls(Pins(names), SharedBandwidth(spec.policy.run_bytes_per_second))
