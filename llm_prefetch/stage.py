"""Staging on one node: plan, transfer, commit and verify each artifact, then switch the deployment to the bundle.

Safe to kill at any instruction and to run twice at once: the next run finishes what this one began, and of
two stagings of the same version one works while the other waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from llm_prefetch import ledger
from llm_prefetch.caches import KIND
from llm_prefetch.commit import seal
from llm_prefetch.errors import PrefetchError, disk_error
from llm_prefetch.leases import in_use, staging
from llm_prefetch.ledger import Trace
from llm_prefetch.links import check_link, place_link
from llm_prefetch.live import Member, is_live, make_bundle, switch
from llm_prefetch.manifest import Manifest, parse_manifest
from llm_prefetch.progress import NoProgress, Progress
from llm_prefetch.record import CommitRecord, Verdict, read_record
from llm_prefetch.resolve import Source, resolve
from llm_prefetch.signatures import SignedSource
from llm_prefetch.spec import Artifact, Spec
from llm_prefetch.stage_artifact import ArtifactReport, stage_artifact
from llm_prefetch.stage_caches import (
    LeftOut,
    caches_last,
    find_source,
    install_cache,
    told,
)
from llm_prefetch.stage_plugins import check_pinned, try_plugins
from llm_prefetch.stop import Stop
from llm_prefetch.store import NodeStore
from llm_prefetch.transfer import Throttle

_READY = "ready"
"""The outcome of a staging that has made the node ready, in its row of the ledger."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """What staging a deployment did on this node."""

    deployment: str
    bundle: str
    switched: bool
    artifacts: tuple[ArtifactReport, ...]
    seconds: float
    preflight: str = ""
    """What became of the trial of the plugins; empty where there was none."""
    left_out: tuple[LeftOut, ...] = ()
    """Compile caches that this node does not get: replicas compile for themselves."""

    @property
    def fetched_bytes(self) -> int:
        """Bytes read from origins."""
        return sum(artifact.fetched_bytes for artifact in self.artifacts)

    @property
    def reused_bytes(self) -> int:
        """Bytes that were on this node already."""
        return sum(artifact.reused_bytes for artifact in self.artifacts)

    @property
    def evicted_bytes(self) -> int:
        """Bytes set free of leftovers, because it did not fit."""
        return sum(artifact.evicted_bytes for artifact in self.artifacts)

    @property
    def verdict(self) -> Verdict:
        """The first verdict that is not `HIT`, or `HIT`."""
        return next((a.verdict for a in self.artifacts if a.verdict is not Verdict.HIT), Verdict.HIT)


def stage(
    spec: Spec,
    store: NodeStore,
    *,
    progress: Progress | None = None,
    manifests: Mapping[str, Manifest] | None = None,
    stop: threading.Event | None = None,
    throttle: Throttle | None = None,
) -> StageReport:
    """Make the deployment of `spec` ready on this node and live.

    Args:
        spec: What to stage; its node selector is not looked at.
        store: Where.
        progress: Told of every byte.
        manifests: Manifests by artifact name that the run already knows; the others come from the origin.
        stop: When set, the staging ends within a second and what is done is kept.
        throttle: The bandwidth cap; else that of the policy.

    Raises:
        PrefetchError: see `errors`; nothing that was live or committed is lost.
    """
    progress, trace = progress or NoProgress(), Trace()
    throttle = throttle or Throttle(spec.policy.bytes_per_second)
    until = Stop(stop, seconds=spec.policy.deadline_seconds)
    linked = [artifact for artifact in spec.artifacts if artifact.link]
    members: list[Member] = []
    reports: list[ArtifactReport] = []
    without: list[LeftOut] = []
    facts: dict[str, Any] = {"deployment": spec.deployment, "artifacts": []}
    with (
        staging(store, spec.deployment),
        ExitStack() as counted_on,
        _recorded(store, "stage", _READY, trace, facts),
    ):
        for artifact in linked:
            check_link(store, spec, artifact)
        for artifact in spec.artifacts:
            check_pinned(artifact, until, spec.policy.trusted_keys)
        for artifact in caches_last(spec.artifacts):
            with trace.step("resolve", artifact=artifact.name):
                versions = {member.name: member.version for member in members}
                pinned = (manifests or {}).get(artifact.name)
                source = find_source(artifact, spec, store, versions, pinned=pinned, stop=until)
            if isinstance(source, LeftOut):
                without.append(told(source, facts, progress))
                continue
            if isinstance(source, SignedSource):
                progress.say(f"{artifact.name}: {source.key[:15]} is signed by {source.signed_by}")
            counted_on.enter_context(in_use(store, source.key))  # so that nobody deletes it before it is live
            report = stage_artifact(
                source, store, progress, throttle, until, trace, evict=spec.policy.make_room
            )
            counted_on.enter_context(in_use(store, report.version))
            reports.append(report)
            facts["artifacts"].append(_told(report))
            members.append(_member(source, report))
        plugged = any(artifact.plugins for artifact in spec.artifacts)
        if plugged and not is_live(store, spec.deployment, members):  # what is live was tried before
            with trace.step("preflight"):
                versions = {member.name: member.version for member in members}
                facts["preflight"] = try_plugins(spec.artifacts, store, versions, progress, until)
        _install_caches(store, spec.deployment, members, progress, trace)
        with trace.step("live"):
            bundle = make_bundle(store, members)
            switched = switch(store, spec.deployment, bundle, why="stage")
            _place_links(store, spec, members)
        with trace.step("sync"):
            for report in reports:
                _sync(store, report)
    return StageReport(
        spec.deployment,
        bundle.id,
        switched,
        tuple(reports),
        trace.seconds,
        facts.get("preflight", ""),
        tuple(without),
    )


def _install_caches(
    store: NodeStore, deployment: str, members: Sequence[Member], progress: Progress, trace: Trace
) -> None:
    for member in members:
        if member.kind == KIND:
            with trace.step("install", artifact=member.name) as row:
                row["outcome"] = install_cache(store, deployment, member.name, member.version, progress)


def _place_links(store: NodeStore, spec: Spec, members: Sequence[Member]) -> None:
    staged = {member.name for member in members}
    for artifact in spec.artifacts:
        if artifact.link and artifact.name in staged:
            place_link(store, spec, artifact)


def _told(report: ArtifactReport) -> dict[str, Any]:
    """One artifact in the ledger's row."""
    return {
        "name": report.name,
        "version": report.version,
        "fetched": report.fetched_bytes,
        "reused": report.reused_bytes,
        "evicted": report.evicted_bytes,
    }


def _member(source: Source, report: ArtifactReport) -> Member:
    """Only code has to be pinned, so only there a pin makes a bundle of its own."""
    signed_by = source.signed_by if isinstance(source, SignedSource) else ""
    return Member(report.name, source.artifact.kind, report.version, source.artifact.pinned, signed_by)


def repair(
    store: NodeStore,
    record: CommitRecord,
    *,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> ArtifactReport:
    """Make the damaged version of `record` what its manifest says again, by fetching its wrong chunks alone.

    Replicas that run on it keep the files they have open: the mended ones are new files.

    Raises:
        PrefetchError: as `stage`.
    """
    name, version = record.name, record.version
    artifact = Artifact(name=name, uri=record.uri, transport=record.transport, version=version)
    trace = Trace()
    with _recorded(store, "repair", "repaired", trace, {"artifact": name, "version": version}):
        with trace.step("resolve", artifact=name):
            source = resolve(artifact, pinned=_manifest_on_node(store, name, version), stop=Stop(stop))
        report = stage_artifact(source, store, progress or NoProgress(), Throttle(), Stop(stop), trace)
        with trace.step("sync"):
            _sync(store, report)
    return report


@contextmanager
def _recorded(
    store: NodeStore, kind: str, outcome: str, trace: Trace, facts: Mapping[str, Any]
) -> Iterator[None]:
    """Write the ledger's row of a piece of work however it ends; what the disk refuses becomes our own error."""
    ended = "interrupted"
    try:
        yield
        ended = outcome
    except OSError as error:
        ended = str(error)
        raise disk_error(error, str(store.root)) from error
    except PrefetchError as error:
        ended = str(error)
        raise
    finally:
        ledger.append(store, kind, **facts, outcome=ended, seconds=round(trace.seconds, 3), steps=trace.steps)


def _sync(store: NodeStore, report: ArtifactReport) -> None:
    record = read_record(store, report.name, report.version)
    if record is not None:
        seal(store, record)


def _manifest_on_node(store: NodeStore, name: str, version: str) -> Manifest | None:
    """The manifest that the version was committed with, unless it is damaged itself."""
    path = store.manifest(name, version)
    try:
        found = parse_manifest(path.read_bytes(), str(path))
    except (OSError, PrefetchError):
        return None
    return found if found.version == version else None


def committed_manifests(store: NodeStore, report: StageReport) -> dict[str, Manifest]:
    """The manifests of what `report` says was staged, by artifact name.

    Raises:
        PrefetchError: one of them is damaged.
    """
    found = {}
    for artifact in report.artifacts:
        path = store.manifest(artifact.name, artifact.version)
        try:
            found[artifact.name] = parse_manifest(path.read_bytes(), str(path))
        except OSError as error:
            raise disk_error(error, str(path)) from error
    return found


def caches_left_out(store: NodeStore, deployment: str) -> frozenset[str]:
    """Names of the compile caches without which the newest staging of `deployment` made this node ready, as the ledger tells."""
    rows = [
        row
        for row in ledger.read(store, "stage")
        if row.get("deployment") == deployment and row.get("outcome") == _READY
    ]
    return frozenset(str(left["name"]) for left in rows[-1].get("left_out", ())) if rows else frozenset()
