"""Artifacts of kind `compile-cache` in a staging: left out where they are not trusted or do not fit, else installed.

A cache saves seconds; without it a replica compiles for itself. So none of this fails a staging, unless the spec says
that the cache is `required`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llm_prefetch.caches import KIND
from llm_prefetch.caches.compatible import Difference, compatible
from llm_prefetch.caches.identity import Identity, config_digest, parse_identity
from llm_prefetch.caches.install import install
from llm_prefetch.errors import ManifestError, MissingExtraError, NotReadyError, PrefetchError, TrustError
from llm_prefetch.manifest import Manifest
from llm_prefetch.progress import Progress
from llm_prefetch.record import Verdict
from llm_prefetch.redact import redact
from llm_prefetch.resolve import Source, resolve
from llm_prefetch.signatures import require_signature
from llm_prefetch.spec import Artifact, Spec
from llm_prefetch.stop import Stop
from llm_prefetch.store import NodeStore


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A cache that was not staged on this node, and why."""

    name: str
    verdict: Verdict
    reason: str
    differences: tuple[Difference, ...] = ()


def caches_last(artifacts: Sequence[Artifact]) -> list[Artifact]:
    """In their order, but for caches: whether they fit is known best when the model lies here."""
    return sorted(artifacts, key=lambda artifact: artifact.kind == KIND)


def find_source(
    artifact: Artifact,
    spec: Spec,
    store: NodeStore,
    versions: Mapping[str, str],
    *,
    pinned: Manifest | None = None,
    stop: Stop | None = None,
) -> Source | LeftOut:
    """What to stage of an artifact, or why a cache is not staged here: no byte of it is fetched before that is known.

    Args:
        artifact: Of the spec.
        spec: All of it.
        store: Where the others lie.
        versions: Those of the other artifacts that were staged already, by name.
        pinned: A manifest that the run already knows.
        stop: Ends it, also while the origin does not answer.

    Raises:
        TrustError: nothing vouches for a plugin, or for a cache that is required.
        NotReadyError: a cache that is required does not fit.
        PrefetchError: as `resolve`.
    """
    source = find_trusted(artifact, spec, pinned=pinned, stop=stop)
    return source if isinstance(source, LeftOut) else left_out(source, spec, store, versions) or source


def find_trusted(
    artifact: Artifact, spec: Spec, *, pinned: Manifest | None = None, stop: Stop | None = None
) -> Source | LeftOut:
    """As `find_source`, for a node that every cache fits. Code is pinned by the spec, or by a signature it trusts."""
    if not artifact.code or artifact.pinned:
        return resolve(artifact, pinned=pinned, stop=stop)
    if not spec.policy.trusted_keys:
        return _unpinned(artifact)
    source = resolve(artifact, pinned=pinned, stop=stop)
    try:
        return require_signature(source, spec.policy.trusted_keys, stop)
    except (TrustError, MissingExtraError) as error:
        if artifact.required or artifact.kind != KIND:
            raise
        return LeftOut(artifact.name, Verdict.UNTRUSTED, f"{error.message}: {error.hint}")


def left_out(source: Source, spec: Spec, store: NodeStore, versions: Mapping[str, str]) -> LeftOut | None:
    """Why what the origin holds is not staged on this node; `None` if it is. Arguments and errors as `find_source`."""
    artifact, where = source.artifact, redact(source.artifact.uri)
    if artifact.kind != KIND:
        return None
    identity = source.content.identity if isinstance(source.content, Manifest) else {}
    try:
        fit = compatible(parse_identity(identity, where), _here(spec, store, versions))
    except ManifestError as error:
        left = LeftOut(artifact.name, Verdict.INCOMPATIBLE, str(error))
    else:
        if fit.verdict is Verdict.HIT:
            return None
        left = LeftOut(artifact.name, fit.verdict, fit.reason, fit.differences)
    if artifact.required:
        raise NotReadyError(
            f"{artifact.name} is {left.verdict} on this node: {left.reason}",
            where=where,
            hint="select other nodes, or leave out `required: true`: then replicas compile for themselves",
        )
    return left


def told(left: LeftOut, facts: dict[str, Any], progress: Progress) -> LeftOut:
    """Say it, and add it to the `facts` of the ledger's row."""
    progress.say(
        f"{left.name} is {left.verdict} on this node, replicas compile for themselves: {left.reason}"
    )
    facts.setdefault("left_out", []).append(asdict(left))
    return left


def install_cache(store: NodeStore, deployment: str, name: str, version: str, progress: Progress) -> str:
    """Put a committed cache where replicas read; what was done, in words. A replica tries again what failed here."""
    try:
        done = install(store, deployment, name, version)
    except PrefetchError as error:
        progress.say(f"{name}: not installed: {error}")
        return str(error)
    return f"{len(done.added)} added, {len(done.kept)} there"


def _unpinned(artifact: Artifact) -> LeftOut:
    reason = "it is code, and the spec does not pin its version"
    if artifact.required or artifact.kind != KIND:
        raise TrustError(
            f"{artifact.name}: {reason}",
            where=redact(artifact.uri),
            hint="pin the version that `capture` or `publish` has printed, or sign it and name the key in policy.trusted_keys",
        )
    return LeftOut(artifact.name, Verdict.UNTRUSTED, reason)


def _here(spec: Spec, store: NodeStore, versions: Mapping[str, str]) -> Identity:
    """This node, and of the launch what the spec tells: the model's path, and its configuration as staged."""
    models = [artifact.name for artifact in spec.artifacts if artifact.kind == "model"]
    here = Identity.of_this_node()
    if len(models) != 1:
        return here
    model = models[0]
    facts: dict[str, str | None] = {"engine_path": str(store.engine_path(spec.deployment, model))}
    if model in versions:
        facts["config"] = config_digest(store.artifact(model, versions[model]))
    return here.model_copy(update=facts)
