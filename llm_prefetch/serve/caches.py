"""The staged compile cache in the replica: checked, installed if it is not, and made the engine's.

Whatever is wrong with it, the engine starts without and compiles for itself; the log and the ledger say why. A start
that used a cache and failed, or died, marks it: the next start on this node does without. Workers on other nodes read
the cache of their own node, from the same path: it is checked there, and what one of them may not use, none gets.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llm_prefetch.caches import KIND
from llm_prefetch.caches.compatible import compatible
from llm_prefetch.caches.identity import Identity, parse_identity
from llm_prefetch.caches.install import (
    HEADERS_VARIABLE,
    cache_environment,
    cache_root,
    check_installed,
    check_own,
    committed_manifest,
    install,
    set_environment,
)
from llm_prefetch.caches.places import CAPTURING
from llm_prefetch.caches.quarantine import Mark, begin, end, find_mark, mark_broken, mark_those_that_died
from llm_prefetch.errors import DiskError, NotReadyError, PrefetchError, TrustError
from llm_prefetch.live import UNVOUCHED, DeploymentCheck, Member
from llm_prefetch.record import Finding, Verdict
from llm_prefetch.redact import redact_text

if TYPE_CHECKING:
    from llm_prefetch.caches.this_node import Node
    from llm_prefetch.store import NodeStore

_log = logging.getLogger("ray.serve.llm_prefetch")
_REASON_CHARACTERS = 300
_INSTALL_SECONDS = 30.0  # for the end of another installation


@dataclass(frozen=True, slots=True)
class StartCache:
    """What a start has of the staged caches: a version, or why it has none."""

    verdict: Verdict
    name: str
    version: str = ""
    reason: str = ""
    start: str = ""
    deployment: str = ""
    held: int = -1
    environment: Mapping[str, str] = field(default_factory=dict)
    """What leads an engine to it."""

    @property
    def facts(self) -> dict[str, str]:
        """For the ledger's row."""
        return {"cache": self.version} if self.version else {"cache": "", "cache_reason": self.reason}

    def end(self, store: NodeStore, error: BaseException | None) -> dict[str, str]:
        """The engine is up, or its start has ended with `error`: then the cache is marked, if it may be its fault.

        Returns:
            The facts for the ledger's row.
        """
        if not self.version:
            return {"cache": "", "cache_reason": self.reason}
        if error is not None and _may_blame(error):
            self._mark(store, error)
        end(store, self.start, self.held)
        return {"cache": self.version}

    def _mark(self, store: NodeStore, error: BaseException) -> None:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:_REASON_CHARACTERS]
        reason = redact_text(f"the start {self.start} that used it failed: {said}")
        try:
            mark_broken(store, Mark(self.name, self.version, self.deployment, reason, self.start))
        except DiskError as unwritten:
            _log.error("llm-prefetch: %s cannot be quarantined: %s", self.name, unwritten)
            return
        _log.error(
            "llm-prefetch: %s is quarantined on this node, and the next start does without it; "
            "`llm-prefetch caches --clear %s` offers it again",
            self.name, self.name,
        )  # fmt: skip


def offer_cache(
    start: str,
    llm_config: Any,  # noqa: ANN401 (Ray's LLMConfig)
    generation: tuple[NodeStore, DeploymentCheck] | None,
    *,
    runtime_env: MutableMapping[str, Any] | None = None,
    environment: MutableMapping[str, str] | None = None,
    node: Node | None = None,
    elsewhere: Mapping[str, Finding] | None = None,
) -> StartCache | None:
    """Give the engine that is about to start the first cache of its bundle that fits. Never raises.

    It takes milliseconds, unless the cache has to be installed; call it in a thread.

    Args:
        start: The id of the start.
        llm_config: As the engine gets it.
        generation: What it starts from, where that was staged.
        runtime_env: The one of the callback's context: Ray makes the engine's configuration in a task that has it.
        environment: What the engine inherits: `os.environ`.
        node: What is asked for the facts of this node.
        elsewhere: The caches that workers on other nodes may not use, and why.

    Returns:
        What the start has of the caches; `None` where none is staged.
    """
    env = os.environ if environment is None else environment
    if generation is None or CAPTURING in env:
        return None
    store, check = generation
    members = [member for member in check.members if member.kind == KIND]
    if not members:
        return None
    refused: list[StartCache] = []
    for member in members:
        try:
            found = _try(start, store, check, member, llm_config, env, node, elsewhere or {})
        except Exception as error:  # noqa: BLE001 (a cache must not keep an engine from starting)
            why = _refusal(member, error)
            found = StartCache(why.verdict, member.name, reason=why.reason)
        if found.version:
            _log.info("llm-prefetch: compile cache %s %s offered", found.name, found.version[:15])
            if runtime_env is not None:
                set_environment(runtime_env.setdefault("env_vars", {}), found.environment)
            return found
        _log.log(
            logging.ERROR if found.verdict is Verdict.UNTRUSTED else logging.WARNING,
            "llm-prefetch: compile cache %s is %s, the engine compiles for itself: %s",
            found.name, found.verdict, found.reason,
        )  # fmt: skip
        refused.append(found)
    reason = "; ".join(f"{one.name} is {one.verdict}: {one.reason}" for one in refused)
    return StartCache(refused[0].verdict, refused[0].name, reason=reason)


def caches_for_workers(
    store: NodeStore, check: DeploymentCheck, node: Node | None = None
) -> dict[str, Finding]:
    """On another node of a replica: whether its workers here may use each cache of the bundle. Never raises.

    As `offer_cache`, but for what only the replica knows of the launch.
    """
    found = {}
    for member in check.members:
        if member.kind == KIND:
            try:
                found[member.name] = _usable(store, check, member, node)
            except Exception as error:  # noqa: BLE001 (as above)
                found[member.name] = _refusal(member, error)
    return found


def _try(
    start: str,
    store: NodeStore,
    check: DeploymentCheck,
    member: Member,
    llm_config: Any,  # noqa: ANN401 (as above)
    env: MutableMapping[str, str],
    node: Node | None,
    elsewhere: Mapping[str, Finding],
) -> StartCache:
    finding = _staged(store, check, member)
    if finding.verdict is not Verdict.HIT:
        return StartCache(finding.verdict, member.name, reason=finding.reason)
    produced = _produced(store, member)
    root = cache_root(store, check.deployment)
    values = _as_captured(cache_environment(root, produced.platform), produced)
    wanted = dict(env)
    set_environment(wanted, values)
    model = llm_config.get_engine_config().hf_model_id
    fit = compatible(produced, Identity.of_this_node(model, llm_config.engine_kwargs, wanted, node=node))
    if fit.verdict is not Verdict.HIT:
        return StartCache(fit.verdict, member.name, reason=fit.reason)
    refused = elsewhere.get(member.name)
    if refused is not None:
        return StartCache(refused.verdict, member.name, reason=refused.reason)
    _make_installed(store, check, member)
    held = begin(store, Mark(member.name, member.version, check.deployment, "", start))
    set_environment(env, values)
    return StartCache(
        Verdict.HIT,
        member.name,
        member.version,
        start=start,
        deployment=check.deployment,
        held=held,
        environment=values,
    )


def _usable(store: NodeStore, check: DeploymentCheck, member: Member, node: Node | None) -> Finding:
    finding = _staged(store, check, member)
    if finding.verdict is not Verdict.HIT:
        return finding
    fit = compatible(_produced(store, member), Identity.of_this_node(node=node))
    if fit.verdict is Verdict.HIT:
        _make_installed(store, check, member)
    return Finding(fit.verdict, fit.reason)


def _produced(store: NodeStore, member: Member) -> Identity:
    where = str(store.manifest(member.name, member.version))
    return parse_identity(committed_manifest(store, member.name, member.version).identity, where)


def _make_installed(store: NodeStore, check: DeploymentCheck, member: Member) -> None:
    if check_installed(store, check.deployment, member.version):
        install(store, check.deployment, member.name, member.version, seconds=_INSTALL_SECONDS)
    check_own(cache_root(store, check.deployment))


def _refusal(member: Member, error: Exception) -> Finding:
    """What an error says of a cache."""
    if isinstance(error, TrustError):
        return Finding(Verdict.UNTRUSTED, str(error))
    if isinstance(error, NotReadyError):  # it cannot be installed now
        return Finding(Verdict.MISSING, str(error))
    if isinstance(error, PrefetchError | OSError):
        return Finding(Verdict.CORRUPT, str(error))
    _log.error("llm-prefetch: the compile cache %s cannot be used", member.name, exc_info=error)
    return Finding(Verdict.CORRUPT, f"{type(error).__name__}: {error}")


def _staged(store: NodeStore, check: DeploymentCheck, member: Member) -> Finding:
    """Whether the cache is what was staged, trusted, and has broken no start."""
    if not member.pinned:
        return Finding(Verdict.UNTRUSTED, UNVOUCHED)
    for one in check.checks:
        if one.name == member.name and not one.ready:
            return Finding(one.verdict, one.reason)
    mark_those_that_died(store)
    mark = find_mark(store, member.version)
    if mark is not None:
        return Finding(Verdict.UNTRUSTED, f"it is quarantined on this node: {mark.reason}")
    return Finding(Verdict.HIT)


def _as_captured(values: Mapping[str, str], produced: Identity) -> dict[str, str]:
    """Precompiled headers are a part of the key, so they are switched off only where they were for the capture."""
    then = (produced.environment or {}).get(HEADERS_VARIABLE)
    return {name: value for name, value in values.items() if name != HEADERS_VARIABLE or value == then}


def _may_blame(error: BaseException) -> bool:
    """Not for what we have refused ourselves, nor for arguments that are wrong; for a start that never ended, too."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, PrefetchError) or type(seen).__name__ == "ValidationError":
            return False
        seen = seen.__cause__ or seen.__context__
    return True
