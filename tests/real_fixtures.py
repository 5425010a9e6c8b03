"""What tests of ray, flows and engine share in one session, because it takes half a minute to start: a pytest plugin.

A test that uses `surroundings` wipes the node stores first (`World.wipe`), and keeps to a bucket or prefix of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real.hosts import HostSpec
from tests.real.world import Prefect, World, orchestrated, world

HEAD, REPLICAS, FAST = 0, 1, 2
"""What the hosts are for: drivers and the worker; the only CPUs, where a replica lands; a label and a resource."""


@pytest.fixture(scope="session")
def surroundings() -> Iterator[World]:
    """Three hosts in one Ray cluster, and an S3 API."""
    each = {
        REPLICAS: HostSpec(num_cpus=4),
        FAST: HostSpec(num_cpus=0, labels={"disk": "nvme"}, resources={"fast_disk": 2}),
    }
    with world(3, each=each, spec=HostSpec(num_cpus=0)) as around:
        yield around


@pytest.fixture(scope="session")
def prefect(surroundings: World) -> Iterator[Prefect]:
    """A Prefect server, our deployments on it, and a worker on the head of `surroundings`."""
    with orchestrated(surroundings) as prefect:
        yield prefect
