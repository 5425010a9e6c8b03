"""What the nodes of one run share."""

from __future__ import annotations

from dataclasses import dataclass

from llm_prefetch.cluster.bandwidth import SharedBandwidth
from llm_prefetch.cluster.pins import Pins
from llm_prefetch.spec import Spec


@dataclass(frozen=True)
class Run:
    """The versions, so that all nodes get the same, and the bandwidth."""

    pins: Pins
    bandwidth: SharedBandwidth

    @classmethod
    def of(cls, spec: Spec) -> Run:
        """A new run of `spec`."""
        names = frozenset(artifact.name for artifact in spec.artifacts)
        return cls(Pins(names), SharedBandwidth(spec.policy.run_bytes_per_second))
