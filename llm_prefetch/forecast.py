"""What a staging would do on this node now, in numbers small enough to send: bytes, room on the disk, and how long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llm_prefetch import ledger
from llm_prefetch import manifest as manifests
from llm_prefetch.errors import OriginChangedError, disk_error
from llm_prefetch.leftovers import leftovers
from llm_prefetch.manifest import Listing, Manifest
from llm_prefetch.origins import open_origin
from llm_prefetch.origins.asking import ask
from llm_prefetch.plan import Plan, PlanSummary, free_bytes, make_plan
from llm_prefetch.redact import redact
from llm_prefetch.resolve import Source, resolve
from llm_prefetch.room import drawn_on, enough, missing_bytes
from llm_prefetch.spec import Artifact, Spec
from llm_prefetch.stage_caches import LeftOut, find_source, left_out
from llm_prefetch.stop import Stop
from llm_prefetch.store import NodeStore

_LEDGER_BYTES = 8 * 2**20

Content = Manifest | Listing


@dataclass(frozen=True, slots=True)
class Eviction:
    """What would be deleted to make room."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """What staging a deployment on one node means; sizes in bytes."""

    artifacts: tuple[PlanSummary, ...]
    evictions: tuple[Eviction, ...]
    free_bytes: int
    rate: float | None
    """Bytes per second of the last staging that fetched something; `None` where there was none."""
    left_out: tuple[LeftOut, ...] = ()
    """Compile caches that would not be staged on this node."""

    @property
    def fetch_bytes(self) -> int:
        """To read from the origins."""
        return sum(artifact.fetch_bytes for artifact in self.artifacts)

    @property
    def reuse_bytes(self) -> int:
        """Here already."""
        return sum(artifact.reuse_bytes for artifact in self.artifacts)

    @property
    def evict_bytes(self) -> int:
        """To be set free."""
        return sum(eviction.bytes for eviction in self.evictions)

    @property
    def fits(self) -> bool:
        """Whether there is room, after what would be deleted."""
        space = sum(artifact.space_bytes for artifact in self.artifacts)
        return space <= self.free_bytes + self.evict_bytes

    @property
    def eta_seconds(self) -> float | None:
        """How long the fetching would take at the last measured rate; `None` where none was measured."""
        if not self.fetch_bytes:
            return 0.0
        return self.fetch_bytes / self.rate if self.rate else None


def find_sources(
    spec: Spec, store: NodeStore, known: Mapping[str, Content] | None = None
) -> list[Source | LeftOut]:
    """What the origins hold, artifact by artifact; what is `known` already is only checked to be there for this node.

    Raises:
        OriginError: an origin cannot be read; or it does not hold here what is known.
        PrefetchError: as `find_source`.
    """
    found: list[Source | LeftOut] = []
    for artifact in spec.artifacts:
        if known is not None and artifact.name in known:
            source = _confirmed(artifact, known[artifact.name])
            found.append(left_out(source, spec, store, {}) or source)
        else:
            found.append(find_source(artifact, spec, store, {}))
    return found


def forecast(spec: Spec, store: NodeStore, found: Sequence[Source | LeftOut]) -> Forecast:
    """Plan all that was `found` of `spec` on this node. Writes nothing.

    Raises:
        DiskError: the store cannot be read.
    """
    try:
        plans = [make_plan(store, source) for source in found if isinstance(source, Source)]
        free = free_bytes(store.root)
        evictions = _evictions(store, plans, free) if spec.policy.make_room else ()
        return Forecast(
            tuple(plan.summary for plan in plans),
            evictions,
            free,
            _last_rate(store),
            tuple(one for one in found if isinstance(one, LeftOut)),
        )
    except OSError as error:
        raise disk_error(error, str(store.root)) from error


def _confirmed(artifact: Artifact, content: Content) -> Source:
    """One question instead of a manifest or a listing; if the answer is not the one expected, the origin is looked at."""
    origin = ask(lambda: open_origin(artifact.uri, artifact.transport), None)
    if isinstance(content, Manifest):
        here = ask(lambda: origin.stat(manifests.PATH), None) is not None
    else:
        first = content.files[0]
        found = ask(lambda: origin.stat(first.path), None)
        here = found is not None and found.size == first.size
    if here:
        return Source(artifact, origin, content)
    source = resolve(artifact, stop=Stop())
    if source.key != key_of(content):
        raise OriginChangedError(
            f"this node finds {source.key[:15]}, another one {key_of(content)[:15]}",
            where=redact(artifact.uri),
            hint="a path of one machine is no origin for many; else wait until the origin is complete",
        )
    return source


def key_of(content: Content) -> str:
    """The version of a manifest, the key of a listing."""
    return content.version if isinstance(content, Manifest) else content.key


def _evictions(store: NodeStore, plans: Sequence[Plan], free: int) -> tuple[Eviction, ...]:
    """What would go; nothing where all that may go is not enough."""
    space = sum(plan.space_bytes for plan in plans)
    missing = missing_bytes(space, free)
    if not missing or not store.root.is_dir():
        return ()
    found = leftovers(store, spare=set().union(*(drawn_on(store, plan) for plan in plans)))
    if free + sum(one.bytes for one in found) < space:
        return ()
    return tuple(Eviction(one.label, one.bytes) for one in enough(found, missing))


def _last_rate(store: NodeStore) -> float | None:
    """Of the last staging that ended well: the planned bytes of one that did not were not all fetched."""
    for row in reversed(ledger.read(store, "stage", last_bytes=_LEDGER_BYTES)):
        steps = row.get("steps")
        moved = [
            (step["bytes"], step["seconds"])
            for step in (steps if isinstance(steps, list) else ())
            if isinstance(step, dict) and step.get("step") == "transfer"
            and isinstance(step.get("bytes"), int) and isinstance(step.get("seconds"), float)
        ]  # fmt: skip
        total, seconds = sum(count for count, _ in moved), sum(seconds for _, seconds in moved)
        if row.get("outcome") == "ready" and total > 0 and seconds > 0:
            return float(total / seconds)
    return None
