"""A node's part in a capture: make room for an engine that compiles, and publish what it has left.

The cache root is a function of the deployment's name, and what an engine compiles may hold its path. So the capture has
that very folder for itself, and what was there is set aside until it ends. No replica of the deployment may run there;
one that starts meanwhile compiles elsewhere, for itself.

Whoever calls this is the only capture of the deployment in the cluster (`llm_prefetch.capturing.turn`), so what another
one has left here is that of one that is over, whatever its mark says. Stagings and replicas cannot know that, so for
them the mark holds until its time has passed.
"""

from __future__ import annotations

import shutil
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llm_prefetch import ledger, settings
from llm_prefetch.caches.aside import prolong, put_back, set_aside
from llm_prefetch.caches.harvest import harvest
from llm_prefetch.caches.identity import Identity
from llm_prefetch.caches.install import cache_environment, cache_root, install_lock
from llm_prefetch.caches.places import CAPTURING
from llm_prefetch.caches.this_node import ThisNode
from llm_prefetch.errors import ClusterError, NotReadyError
from llm_prefetch.leases import running
from llm_prefetch.live import check_deployment
from llm_prefetch.publish import PublishReport, publish
from llm_prefetch.signatures import is_outdated
from llm_prefetch.store import NodeStore, locked, open_store, read_json

PUBLISH_SECONDS = 3600.0
"""What a node has, at most, for what follows when the engine is up."""
_REPORT_SECONDS = 15.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a node says of itself: a replica of the deployment may be started there if `reason` is empty."""

    reason: str
    bundle: str
    running: int
    """Replicas of the deployment that run there."""
    identity: Identity
    """As far as it can be told without an engine: of nodes with the same one, one speaks for all."""


@dataclass(frozen=True, slots=True)
class Captured:
    """What was published, and what the start was like that it came from."""

    published: PublishReport
    families: dict[str, tuple[int, int]]
    """Files and bytes of each kind of cache."""
    evidence: dict[str, Any]
    identity: dict[str, Any]
    overhead_seconds: float = 0.0
    """What it took on the node beyond the replica's start: to collect and to publish."""
    outdated_signature: bool = False
    """Whether a signature of an earlier capture lies there."""


def look(deployment: str, root: Path | None) -> Candidate:
    """Whether a replica of `deployment` may start here."""
    store = open_store(root)
    check = check_deployment(store, deployment)
    models = [member.name for member in check.members if member.kind == "model"]
    path = store.engine_path(deployment, models[0]) if len(models) == 1 else None
    reason = "" if check.ready else f"{check.verdict}: {check.reason}"
    return Candidate(reason, check.bundle, len(running(store, deployment)), Identity.of_this_node(path))


def begin(deployment: str, root: Path | None, seconds: float) -> dict[str, str]:
    """Set aside what is there, for so many seconds at most; the variables of an engine that is to compile.

    Raises:
        NotReadyError: replicas of the deployment run here.
        LockTimeoutError: an installation did not end.
    """
    store = open_store(root)
    place = cache_root(store, deployment)
    with _alone(store, deployment):
        _check_none_runs(store, deployment)
        _put_away(store, deployment)  # of a capture that was killed
        set_aside(place, seconds)
        try:
            _check_none_runs(store, deployment)  # with what it has found there just before
        except NotReadyError:
            put_back(place)
            raise
    environment = cache_environment(place, ThisNode().platform())
    return {**environment, CAPTURING: str(_report(store, deployment))}


def collect(deployment: str, root: Path | None, uri: str) -> Captured:
    """Publish what the engine has left.

    Raises:
        NotReadyError: the replica did not start from what is staged here.
        ClusterError: the replica has not said what it was.
        UsageError: its engine has compiled nothing.
        OriginError: the origin refused.
    """
    began, store = time.monotonic(), open_store(root)
    report = _read_report(_report(store, deployment))
    path = str(report["identity"].get("engine_path"))
    if not path.startswith(f"{store.live(deployment)}/"):
        raise NotReadyError(
            f"the replica did not start from what is staged, but from {path}",
            where=str(store.root),
            hint="its path is part of the key; see the ledger's row of the start for what was wrong",
        )
    prolong(cache_root(store, deployment), PUBLISH_SECONDS)
    target = _harvested(store, deployment)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(mode=0o700)
    try:
        found = harvest(cache_root(store, deployment), target)
        published = publish(target, uri, identity=report["identity"])
    finally:
        shutil.rmtree(target, ignore_errors=True)
    seconds = round(time.monotonic() - began, 3)
    ledger.append(
        store, "capture", deployment=deployment, published=asdict(published), compile=report["compile"], seconds=seconds
    )  # fmt: skip
    outdated = is_outdated(uri, published.version)
    return Captured(published, dict(found.families), report["compile"], report["identity"], seconds, outdated)


def finish(deployment: str, root: Path | None) -> None:
    """Put back what was set aside; harmless where nothing was.

    Raises:
        LockTimeoutError: an installation did not end.
    """
    store = open_store(root)
    with _alone(store, deployment):
        _put_away(store, deployment)


def _alone(store: NodeStore, deployment: str) -> AbstractContextManager[None]:
    """No installation sees half of it."""
    seconds = settings.LOCK_SECONDS.get()
    return locked(install_lock(store, deployment), seconds=seconds, waiting_for="an installation")


def _check_none_runs(store: NodeStore, deployment: str) -> None:
    if running(store, deployment):
        raise NotReadyError(
            f"replicas of {deployment} run on this node, with the cache that would be set aside",
            where=str(store.root),
            hint="capture on a node without, by --node",
        )


def _put_away(store: NodeStore, deployment: str) -> None:
    _report(store, deployment).unlink(missing_ok=True)
    shutil.rmtree(_harvested(store, deployment), ignore_errors=True)
    put_back(cache_root(store, deployment))


def _harvested(store: NodeStore, deployment: str) -> Path:
    return cache_root(store, deployment).with_name(f".{deployment}.harvest")


def _report(store: NodeStore, deployment: str) -> Path:
    return cache_root(store, deployment).with_name(f".{deployment}.report.json")


def _read_report(path: Path) -> dict[str, Any]:
    """The callback writes it when the engine is up, which may be a moment after Serve has heard of that."""
    deadline = time.monotonic() + _REPORT_SECONDS
    while time.monotonic() < deadline:
        report = read_json(path)
        if isinstance(report, dict):
            return report
        time.sleep(_POLL_SECONDS)
    raise ClusterError(
        "the replica has not said what it was started with",
        where=str(path),
        hint="does its node run this version of llm-prefetch, with LLM_PREFETCH_ROOT as here?",
    )
