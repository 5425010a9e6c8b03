"""Staging on one node: plan, transfer, commit and verify each artifact, then switch the deployment to the bundle.

Safe to kill at any instruction and to run twice at once: the next run finishes what this one began, and of
two stagings of the same version one works while the other waits for it.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from llm_prefetch import ledger, settings
from llm_prefetch.commit import commit, seal, set_aside
from llm_prefetch.errors import DigestError, NotReadyError, PrefetchError, SpecError, disk_error
from llm_prefetch.journal import Journal
from llm_prefetch.ledger import Trace
from llm_prefetch.links import check_link, place_link
from llm_prefetch.live import Member, make_bundle, switch
from llm_prefetch.manifest import Listing, Manifest, parse_manifest
from llm_prefetch.plan import Plan, check_space, find_committed, make_plan
from llm_prefetch.progress import NoProgress, Progress
from llm_prefetch.record import CommitRecord, Verdict, check_record, read_record, records, write_record
from llm_prefetch.redact import redact
from llm_prefetch.resolve import Source, resolve
from llm_prefetch.reuse import reuse
from llm_prefetch.salvage import prepare_partial, seal_listing
from llm_prefetch.spec import Artifact, Spec
from llm_prefetch.store import NodeStore, locked
from llm_prefetch.transfer import Throttle, transfer
from llm_prefetch.verify import full_check, quick_check


@dataclass(frozen=True, slots=True)
class ArtifactReport:
    """What staging one artifact did: bytes by where they came from, and the verdict from the node's files."""

    name: str
    version: str
    verdict: Verdict
    total_bytes: int
    fetched_bytes: int
    reused_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StageReport:
    """What staging a deployment did on this node."""

    deployment: str
    bundle: str
    switched: bool
    artifacts: tuple[ArtifactReport, ...]
    seconds: float

    @property
    def fetched_bytes(self) -> int:
        """Bytes read from origins."""
        return sum(artifact.fetched_bytes for artifact in self.artifacts)

    @property
    def reused_bytes(self) -> int:
        """Bytes that were on this node already."""
        return sum(artifact.reused_bytes for artifact in self.artifacts)

    @property
    def verdict(self) -> Verdict:
        """The first verdict that is not `HIT`, or `HIT`."""
        return next((a.verdict for a in self.artifacts if a.verdict is not Verdict.HIT), Verdict.HIT)


def plan(spec: Spec, store: NodeStore) -> list[Plan]:
    """What `stage` would do on this node now.

    Raises:
        PrefetchError: as `stage`.
    """
    try:
        return [make_plan(store, resolve(artifact)) for artifact in spec.artifacts]
    except OSError as error:
        raise disk_error(error, str(store.root)) from error


def stage(
    spec: Spec,
    store: NodeStore,
    *,
    progress: Progress | None = None,
    manifests: Mapping[str, Manifest] | None = None,
    stop: threading.Event | None = None,
) -> StageReport:
    """Make the deployment of `spec` ready on this node and live.

    Args:
        spec: What to stage; its node selector is not looked at.
        store: Where.
        progress: Told of every byte.
        manifests: Manifests by artifact name that the run already knows; the others come from the origin.
        stop: When set, the transfer ends within a piece and what is done is kept.

    Raises:
        PrefetchError: see `errors`; nothing that was live or committed is lost.
    """
    progress, stop, trace = progress or NoProgress(), stop or threading.Event(), Trace()
    throttle = Throttle(spec.policy.bytes_per_second)
    linked = [artifact for artifact in spec.artifacts if artifact.link]
    reports: list[ArtifactReport] = []
    switched = False
    outcome = "interrupted"
    try:
        for artifact in linked:
            check_link(store, Path(artifact.link or ""))
        for artifact in spec.artifacts:
            with trace.step("resolve", artifact=artifact.name):
                source = resolve(artifact, pinned=(manifests or {}).get(artifact.name))
            reports.append(stage_artifact(source, store, progress, throttle, stop, trace))
        with trace.step("live"):
            kinds = {artifact.name: artifact.kind for artifact in spec.artifacts}
            bundle = make_bundle(store, [Member(r.name, kinds[r.name], r.version) for r in reports])
            switched = switch(store, spec.deployment, bundle, why="stage")
            for artifact in linked:
                place_link(store, spec.deployment, artifact.name, Path(artifact.link or ""))
        with trace.step("sync"):
            for report in reports:
                record = read_record(store, report.name, report.version)
                if record is not None:
                    seal(store, record)
        outcome = "ready"
    except OSError as error:
        outcome = str(error)
        raise disk_error(error, str(store.root)) from error
    except PrefetchError as error:
        outcome = str(error)
        raise
    finally:
        ledger.append(
            store,
            "stage",
            deployment=spec.deployment,
            outcome=outcome,
            artifacts=[{"name": r.name, "version": r.version, "fetched": r.fetched_bytes} for r in reports],
            seconds=round(trace.seconds, 3),
            steps=trace.steps,
        )
    return StageReport(spec.deployment, bundle.id, switched, tuple(reports), trace.seconds)


def repair(
    store: NodeStore,
    name: str,
    version: str,
    *,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> ArtifactReport:
    """Make a damaged version what its manifest says again, by fetching its wrong chunks alone.

    Replicas that run on it keep the files they have open: the mended ones are new files.

    Raises:
        SpecError: nothing tells where it came from.
        PrefetchError: as `stage`.
    """
    record = read_record(store, name, version)
    if record is None:
        raise SpecError(
            f"no record of {name} {version[:15]}", where=str(store.root), hint="stage it by its spec"
        )
    artifact, trace, outcome = Artifact(name=name, uri=record.uri, version=version), Trace(), "interrupted"
    try:
        with trace.step("resolve", artifact=name):
            source = resolve(artifact, pinned=_manifest_on_node(store, name, version))
        report = stage_artifact(
            source, store, progress or NoProgress(), Throttle(None), stop or threading.Event(), trace
        )
        mended = read_record(store, name, version)
        if mended is not None:
            seal(store, mended)
        outcome = "repaired"
    except OSError as error:
        outcome = str(error)
        raise disk_error(error, str(store.root)) from error
    except PrefetchError as error:
        outcome = str(error)
        raise
    finally:
        ledger.append(store, "repair", artifact=name, version=version, outcome=outcome, steps=trace.steps)
    return report


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


def stage_artifact(
    source: Source,
    store: NodeStore,
    progress: Progress,
    throttle: Throttle,
    stop: threading.Event,
    trace: Trace,
) -> ArtifactReport:
    """Make one artifact a committed version on this node, if it is not one; `trace` gets its steps.

    Raises:
        PrefetchError: as `stage`.
        OSError: the disk refused.
    """
    begin = time.monotonic()
    name = source.artifact.name
    record = find_committed(store, source)
    fetched = 0
    if record is None:
        waiting = f"another staging of {name} {source.key[:15]}"
        with (
            trace.step("lock", artifact=name),
            locked(
                store.lock(f"stage-{source.key}"), seconds=settings.LOCK_SECONDS.get(), waiting_for=waiting
            ),
        ):
            record = find_committed(store, source) or _proven_again(source, store, progress)
            if record is None:
                record, fetched = _fetch_and_commit(source, store, progress, throttle, stop, trace)
    _check_pin(source, record.version)
    with trace.step("verify", artifact=name):
        check = quick_check(store, name, record.version)
    if not check.ready:
        raise NotReadyError(
            f"{name} is {check.verdict} right after its commit: {check.reason}",
            where=str(store.artifact(name, record.version)),
            hint="something else changes this folder; find it, then stage again",
        )
    reused = record.bytes - fetched
    return ArtifactReport(
        name, record.version, check.verdict, record.bytes, fetched, reused, time.monotonic() - begin
    )


def _check_pin(source: Source, version: str) -> None:
    if source.artifact.version not in (None, version):
        raise DigestError(
            f"the origin holds {version}, the spec pins {source.artifact.version}",
            where=redact(source.artifact.uri),
            hint="pin the version that is there, or put the pinned one back",
        )


def _proven_again(source: Source, store: NodeStore, progress: Progress) -> CommitRecord | None:
    """A version that is complete but in doubt, because of a reboot or a touched file, once its bytes are proven."""
    for record in records(store, source.artifact.name):
        wanted = (
            record.version == source.content.version
            if isinstance(source.content, Manifest)
            else record.listing == source.key
        )
        if wanted:
            progress.say(
                f"{record.name}: {check_record(store, record.name, record.version).reason}; reading every byte"
            )
            if full_check(store, record.name, record.version, progress).ready:
                return read_record(store, record.name, record.version)
    return None


def _fetch_and_commit(
    source: Source,
    store: NodeStore,
    progress: Progress,
    throttle: Throttle,
    stop: threading.Event,
    trace: Trace,
) -> tuple[CommitRecord, int]:
    """Returns the record and the bytes that were fetched."""
    name, key = source.artifact.name, source.key
    with trace.step("prepare", artifact=name):
        journal = prepare_partial(store, source)
        todo = make_plan(store, source, journal)
        if todo.committed is not None:  # meanwhile, by one that our lock did not keep out
            return todo.committed, 0
        check_space(store, todo)
    progress.start(name, todo.total_bytes)
    progress.advance(todo.reuse_bytes)
    tree = store.partial(key) / "tree"
    with trace.step("transfer", artifact=name, bytes=todo.fetch_bytes):
        journal.open()
        try:
            todo = reuse(todo, tree, journal)
            inodes = transfer(todo, tree, journal, progress, throttle=throttle, stop=stop)
        finally:
            journal.close()
    with trace.step("commit", artifact=name):
        record = _commit(source, store, journal, inodes)
    return record, todo.fetch_bytes


def _commit(source: Source, store: NodeStore, journal: Journal, inodes: Mapping[str, int]) -> CommitRecord:
    """Commit what was transferred; if the same version is here by another way, that one serves."""
    name, content = source.artifact.name, source.content
    listing = content.key if isinstance(content, Listing) else ""
    manifest = seal_listing(content, journal) if isinstance(content, Listing) else content
    _check_pin(source, manifest.version)
    if listing and check_record(store, name, manifest.version).verdict is not Verdict.HIT:
        old = set_aside(store, name, manifest.version)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
    try:
        return commit(
            store, name, source.key, manifest, inodes, uri=redact(source.artifact.uri), listing=listing
        )
    except OSError:
        record = read_record(store, name, manifest.version)
        if record is None or check_record(store, name, manifest.version).verdict is not Verdict.HIT:
            raise
    record = replace(record, listing=listing or record.listing)
    write_record(store, record)
    shutil.rmtree(store.partial(source.key), ignore_errors=True)
    return record
