"""The versions that one run stages, so that it never leaves two of them on the cluster.

Every node asks the origins for itself, because what fails on one node may work on the next; but for each artifact
the first answer decides for all. Where an origin has no manifest there is no answer before a node has read
all bytes: then the nodes take turns until one has done that, and the others are pinned to the digests it found.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from llm_prefetch.errors import OriginChangedError
from llm_prefetch.manifest import Manifest

_POLL_SECONDS = 0.2


class Pins:
    """Manifests by artifact name, as they become known. For the threads of one run."""

    def __init__(self, names: frozenset[str]) -> None:
        """`names` are all artifacts of the spec."""
        self._names = names
        self._manifests: dict[str, Manifest] = {}
        self._published = frozenset[str]()
        self._lock = threading.Lock()
        self._turn = threading.Lock()

    @property
    def known(self) -> dict[str, Manifest]:
        """What is pinned so far."""
        with self._lock:
            return dict(self._manifests)

    @property
    def complete(self) -> bool:
        """Whether every artifact is pinned."""
        return self._names <= self.known.keys()

    @property
    def published(self) -> frozenset[str]:
        """The artifacts whose manifest a node read at the origin."""
        with self._lock:
            return self._published

    def offer(self, found: Mapping[str, Manifest]) -> None:
        """A node read these manifests at the origins; what was pinned before stays."""
        with self._lock:
            self._manifests = {**found, **self._manifests}
            self._published |= found.keys()

    def settle(self, staged: Mapping[str, Manifest]) -> None:
        """A node staged these.

        Raises:
            OriginChangedError: another node of this run was first, with another version.
        """
        with self._lock:
            self._manifests = {**staged, **self._manifests}
        for name, manifest in self.known.items():
            if name in staged and staged[name].version != manifest.version:
                raise OriginChangedError(
                    f"{name!r} became {staged[name].version}, while other nodes staged {manifest.version}",
                    where=f"the origin of {name}",
                    hint="the origin changes while it is read; stage again when it is complete",
                )

    @contextmanager
    def turn(self, stop: threading.Event) -> Iterator[None]:
        """Wait until every version is known, or until it is for the caller to find out. Ends early by `stop`."""
        held = False
        try:
            while not stop.is_set() and not held and not self.complete:
                held = self._turn.acquire(timeout=_POLL_SECONDS)
            yield
        finally:
            if held:
                self._turn.release()
