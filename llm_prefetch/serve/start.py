"""One start of a replica: its check, the lock and the lease that it holds, and its rows in the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_prefetch import ledger, settings
from llm_prefetch.caches import KIND
from llm_prefetch.errors import DiskError, LockTimeoutError, PrefetchError, SpecError
from llm_prefetch.leases import hold
from llm_prefetch.live import DeploymentCheck, check_deployment, start_lock
from llm_prefetch.names import resolve_name
from llm_prefetch.record import Verdict
from llm_prefetch.redact import redact_text
from llm_prefetch.serve.ladder import told
from llm_prefetch.serve.metrics import count_start
from llm_prefetch.serve.start_log import startup_phases
from llm_prefetch.store import NodeStore, acquire, open_store, release

if TYPE_CHECKING:
    from llm_prefetch.serve.caches import StartCache
    from llm_prefetch.serve.compile_watch import CompileWatch
    from llm_prefetch.serve.ladder import Attempt
    from llm_prefetch.serve.options import CallbackOptions
    from llm_prefetch.serve.start_phases import Step

# Serve writes what is logged below its own name into the replica's log.
_log = logging.getLogger("ray.serve.llm_prefetch")
_LOCK_SECONDS = 5.0
_REASON_CHARACTERS = 500
_CHECK = "verify"
"""What the check is called among the steps."""


class Start:
    """Holds a lock that keeps a switch away until the engine is up, and a lease until the process ends."""

    def __init__(self, options: CallbackOptions, replica: str = "") -> None:
        """Nothing is looked at yet."""
        self.options = options
        self.replica = replica
        self.id = uuid.uuid4().hex[:12]
        self.name = options.live_name
        """The name below `live/`; a UUID as long as nothing on this node knows whose it is."""
        self.store: NodeStore | None = None
        self.steps: list[Step] = []
        """What this start did by our own clock: name, wall time and seconds."""
        self.cache: StartCache | None = None
        """What the engine has of the staged compile caches; set just before it starts."""
        self.watch: CompileWatch | None = None
        """What the engine makes of its compile cache; set just before it starts."""
        self._began_wall = time.time()
        self._began = self._checked = time.monotonic()
        self._told: tuple[str, str, float] | None = None
        self._seconds = 0.0
        self._lock = self._lease = -1
        _starts[self.id] = self

    @property
    def where(self) -> str:
        """The root of the store, as far as it is known."""
        return str(self.store.root if self.store else self.options.root or "LLM_PREFETCH_ROOT")

    @property
    def root(self) -> Path:
        """The root of the store as an absolute path, whether or not there is a store."""
        root = self.store.root if self.store else self.options.root or settings.ROOT.get()
        # Not by pathlib, which raises for a user without a home.
        return Path(os.path.abspath(os.path.expanduser(root)))  # noqa: PTH100, PTH111

    @property
    def milliseconds(self) -> float:
        """How long the last check took."""
        return self._seconds * 1000

    def check(self) -> DeploymentCheck:
        """The quick check, under the lock that keeps a switch away; nothing that is wrong with the store is raised.

        On a hit the lock is kept, and there is a lease on the generation.
        """
        began = time.monotonic()
        check = self._answer(locked=True)
        if check.ready:
            self._take_lease(check)
        else:
            self._let_go()
        self._checked = time.monotonic()
        self._seconds = self._checked - began
        self.steps.append((_CHECK, time.time() - self._seconds, self._seconds))
        return check

    def check_plugins(self) -> DeploymentCheck:
        """The check for an engine that has its model from elsewhere, but its plugins from here.

        Whatever it says of the model, the lock is kept, and there is a lease on what is live.
        """
        check = self._answer(locked=True)
        if check.bundle:
            self._take_lease(check)
        return check

    def look(self) -> DeploymentCheck:
        """The check as it is now; holds nothing."""
        return self._answer(locked=False)

    def peek(self) -> bool:
        """Whether the node is ready now; holds nothing."""
        return self.look().ready

    def let_go(self) -> None:
        """The node is ready, but the replica is not to start from it now: hold nothing until the next check."""
        self._let_go()
        self._end_lease()

    def engine_path(self, check: DeploymentCheck) -> os.PathLike[str]:
        """The engine path of the bundle's model.

        Raises:
            SpecError: the bundle holds no model, or several and `model` does not say which.
        """
        assert self.store is not None  # noqa: S101 (a hit comes from a store)
        models = [member.name for member in check.members if member.kind == "model"]
        if self.options.model in models:
            models = [self.options.model]
        if len(models) != 1 or self.options.model not in (None, models[0]):
            raise SpecError(
                f"which model? {check.deployment} holds {', '.join(models) or 'none'}",
                where="callback_config.callback_kwargs.model",
                hint="name one artifact of kind model",
            )
        return self.store.engine_path(check.deployment, models[0])

    def record(
        self,
        first: DeploymentCheck,
        bundle: str,
        rung: str,
        attempts: Sequence[Attempt],
        **facts: Any,  # noqa: ANN401 (any JSON value)
    ) -> None:
        """The ledger's row: what the `first` check said, the rung that the replica starts by, and other `facts`."""
        checked = next((seconds for step, _, seconds in self.steps if step == _CHECK), 0.0)
        if self.store is None:  # nobody has looked at this node, or there was no store then
            with contextlib.suppress(PrefetchError):
                self.store = open_store(self.options.root)
        self.steps += [(attempt.rung, attempt.began, attempt.seconds) for attempt in attempts]
        self._told = (first.verdict, rung, checked)
        if self.store is not None:
            ledger.append(
                self.store,
                "start",
                start=self.id,
                replica=self.replica,
                deployment=first.deployment,
                bundle=bundle,
                verdict=first.verdict,
                reason=first.reason,
                rung=rung,
                seconds=round(self._seconds, 6),
                ladder=[
                    {"rung": attempt.rung, "outcome": attempt.outcome, "seconds": attempt.seconds}
                    for attempt in attempts
                ],
                **facts,
            )

    def end(self, task: asyncio.Task[Any]) -> None:
        """The engine is ready or its start has failed: let a switch happen again, and write it down.

        The event loop calls this, so nothing may be raised.
        """
        try:
            self._let_go()
            outcome = outcome_of(task)
            if outcome != "ready":
                self._end_lease()
            took = time.monotonic() - self._began
            seconds = round(time.monotonic() - self._checked, 3)
            facts = startup_phases(self._began_wall, self._began_wall, self.steps)
            facts |= self.watch.end(outcome) if self.watch is not None else {}
            if self.store is not None and self.cache is not None:
                facts |= self.cache.end(self.store, error_of(task))
            if self.store is not None:
                ledger.append(self.store, "engine", start=self.id, outcome=outcome, seconds=seconds, **facts)
            if self._told is not None:
                count_start(*self._told, took if outcome == "ready" else None, self.name)
        except Exception as error:  # noqa: BLE001
            _log.error("llm-prefetch: the end of start %s is not in the ledger: %s", self.id, told(error))

    def end_as_worker(self, outcome: str) -> None:
        """As `end`, on a node that is not the replica's: its phases are those of its own workers, and it counts no start."""
        self._let_go()
        if outcome != "ready":
            self._end_lease()
        if self.store is not None:
            facts = startup_phases(self._began_wall, self._began_wall, self.steps, then="engine")
            facts |= {"seconds": round(time.monotonic() - self._checked, 3), "role": "worker"}
            ledger.append(self.store, "engine", start=self.id, outcome=outcome, **facts)

    def _answer(self, *, locked: bool) -> DeploymentCheck:
        try:
            self.store = open_store(self.options.root)
            name = self.name = self._find_name(self.store)
            if locked and self._lock < 0:
                self._lock = self._share(start_lock(self.store, name))
            return _deciding(check_deployment(self.store, name))
        except PrefetchError as error:
            reason = str(error)
        except OSError as error:
            reason = f"the store cannot be read: {error}"
        except Exception as error:  # noqa: BLE001 (whatever lies there, it must not keep a replica from its fallback)
            _log.log(
                logging.ERROR if locked else logging.DEBUG,
                "llm-prefetch: the check of %s failed: %s", self.name, told(error),
            )  # fmt: skip
            reason = f"the check failed: {redact_text(repr(error))}"
        return DeploymentCheck(self.name, "", Verdict.MISSING, reason, (), ())

    def _find_name(self, store: NodeStore) -> str:
        """What the store knows `deployment` by; else the spec may say it.

        Raises:
            SpecError: a UUID that nobody on this node knows.
        """
        spec = self.options.spec
        if isinstance(spec, dict):
            return self.options.live_name
        try:
            return resolve_name(store, self.options.deployment)
        except SpecError:
            if not spec:
                raise
        from llm_prefetch.spec import load_spec  # it loads YAML, which a replica does without

        return load_spec(spec).deployment

    def _take_lease(self, check: DeploymentCheck) -> None:
        """While the lock keeps a switch away: a live generation is not deleted, so there is no gap."""
        if self.store is None or self._lease >= 0:
            return
        try:
            self._lease = hold(self.store, check.bundle, deployment=check.deployment, replica=self.replica)
        except DiskError as error:
            _log.warning("llm-prefetch: starting without a lease: %s", error)

    @staticmethod
    def _share(lock: Path) -> int:
        """Keep a switch away; where no lock can be had the start goes on without, as no check rests on it.

        Raises:
            LockTimeoutError: a switch is in progress and does not end.
        """
        try:
            return acquire(lock, shared=True, seconds=_LOCK_SECONDS, waiting_for="a switch of generations")
        except LockTimeoutError:
            raise
        except DiskError as error:  # a store that this user may only read, or a full disk
            _log.debug("llm-prefetch: starting without a lock: %s", error)
            return -1

    def _let_go(self) -> None:
        fd, self._lock = self._lock, -1
        if fd >= 0:
            release(fd)

    def _end_lease(self) -> None:
        fd, self._lease = self._lease, -1
        if fd >= 0:
            release(fd)


_starts: weakref.WeakValueDictionary[str, Start] = weakref.WeakValueDictionary()
"""Those of this process whose engine is not up yet: not on the callback, which Ray pickles into tasks."""


def starting(start: str) -> Start | None:
    """The start with this id, until it has ended."""
    return _starts.get(start)


def outcome_of(task: asyncio.Task[Any]) -> str:
    """How the task of an engine's start has ended, in one short line."""
    if task.cancelled():
        return "cancelled"
    error = task.exception()
    if error is None:
        return "ready"
    reason = redact_text(" ".join(f"{type(error).__name__}: {error}".split()))
    return f"failed: {reason[:_REASON_CHARACTERS]}"


def error_of(task: asyncio.Task[Any]) -> BaseException | None:
    """What has ended the task of an engine's start; `None` if the engine is ready."""
    return asyncio.CancelledError() if task.cancelled() else task.exception()


def _deciding(check: DeploymentCheck) -> DeploymentCheck:
    """The check as it decides on a start: a compile cache that is damaged costs seconds, not the start."""
    caches = {member.name for member in check.members if member.kind == KIND}
    if check.ready or not caches or not all(one.ready for one in check.checks if one.name not in caches):
        return check
    return replace(check, verdict=Verdict.HIT, reason="")
