"""What tests of ray, flows and engine share in one session, because it takes half a minute to start: a pytest plugin.

A test that uses `surroundings` wipes the node stores first (`World.wipe`), and keeps to a bucket or prefix of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.real.hosts import HostSpec
from tests.real.ports import can_isolate
from tests.real.world import Prefect, World, orchestrated, world

HEAD, REPLICAS, FAST = 0, 1, 2
"""What the hosts are for: drivers and the worker; the only CPUs, where a replica lands; a label and a resource."""


@pytest.fixture(scope="session")
def isolation() -> None:
    """For tests whose hosts need disks and networks of their own: skips them where these cannot be had.

    In CI nothing is skipped: there a machine that cannot isolate fails these tests.
    """
    if not can_isolate() and os.environ.get("CI") != "true":
        pytest.skip("disks and networks of their own need root, iproute2 and util-linux")


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
