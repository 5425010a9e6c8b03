"""The callback in the replica: check the node, point the engine at the staged files, or fall back.

All of it happens in `on_before_node_init`, before Ray would download. On a hit the engine is given the engine
path and Ray's node initialisation is skipped, which would cost a fresh worker process even with nothing to do.
On a miss the last rung decides: Ray downloads as if we were not there, or the start fails.

Ray pickles the instance into remote tasks, so nothing that holds a lock, a file or a thread lives on `self`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from typing import TYPE_CHECKING, Any

from llm_prefetch import ledger
from llm_prefetch.errors import DiskError, LockTimeoutError, NotReadyError, PrefetchError, SpecError
from llm_prefetch.live import DeploymentCheck, check_deployment, start_lock
from llm_prefetch.record import Verdict
from llm_prefetch.serve.ray_api import CallbackBase
from llm_prefetch.store import NodeStore, acquire, open_store, release

if TYPE_CHECKING:
    from pathlib import Path

    from llm_prefetch.serve.options import CallbackOptions

# Serve writes what is logged below its own name into the replica's log.
_log = logging.getLogger("ray.serve.llm_prefetch")
_LOCK_SECONDS = 5.0
_REASON_CHARACTERS = 500


class PrefetchCallback(CallbackBase):
    """Start vLLM from what was staged on this node.

    In the Serve YAML:

        callback_config:
          callback_class: llm_prefetch.serve.PrefetchCallback
          callback_kwargs: {deployment: stage/llama-3-8b, on_miss: [ray]}
    """

    def __init__(
        self,
        llm_config: Any,  # noqa: ANN401 (Ray's LLMConfig; importing it imports vLLM)
        raise_error_on_callback: bool = True,  # noqa: FBT001, FBT002 (Ray's signature)
        ctx_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,  # noqa: ANN401 (checked by `parse_options`)
    ) -> None:
        """Check the arguments; a misspelt one fails the deployment at once, by its YAML path."""
        # Defining a model loads the larger part of pydantic: not while this module is imported.
        from llm_prefetch.serve.options import parse_options

        super().__init__(
            llm_config, raise_error_on_callback=raise_error_on_callback, ctx_kwargs=ctx_kwargs, **kwargs
        )
        self.options: CallbackOptions = parse_options(kwargs)

    async def on_before_node_init(self) -> None:
        """Check the node and decide what the engine starts from.

        Raises:
            NotReadyError: the node is not ready and `on_miss` is `[fail]`.
        """
        start = _Start(self.options)
        check = start.check()
        start.record(check)
        task = asyncio.current_task()
        if task is not None:
            # This task runs all of the engine's start: when it is done, the engine is ready or has failed.
            task.add_done_callback(start.end)
        if check.ready:
            engine_path = str(start.engine_path(check))
            engine = self.llm_config.get_engine_config()
            engine.hf_model_id = engine_path
            engine.mirror_config = None
            self.ctx.run_init_node = False
            _log.info(
                "llm-prefetch: %s HIT in %.1f ms, engine path %s",
                check.deployment,
                start.milliseconds,
                engine_path,
            )
        else:
            _log.warning(
                "llm-prefetch: %s is %s on this node (%s); going on with: %s",
                check.deployment, check.verdict, check.reason, start.rung,
            )  # fmt: skip
        if not check.ready and start.rung == "fail":
            raise NotReadyError(
                f"{check.deployment} is {check.verdict} on this node: {check.reason}",
                where=str(start.root),
                hint="stage it, or allow a fallback with on_miss: [ray]",
            )


class _Start:
    """One start of a replica: the check, the lock it holds until the engine is up, and its rows in the ledger."""

    def __init__(self, options: CallbackOptions) -> None:
        self.options = options
        self.id = uuid.uuid4().hex[:12]
        self.rung = options.on_miss[0]
        self.root: object = options.root or "LLM_PREFETCH_ROOT"
        self._began = time.monotonic()
        self._checked = self._began
        self._store: NodeStore | None = None
        self._lock = -1

    @property
    def milliseconds(self) -> float:
        """How long the check took."""
        return (self._checked - self._began) * 1000

    def check(self) -> DeploymentCheck:
        """The quick check, under the lock that keeps a switch away; nothing that is wrong with the store is raised."""
        name = self.options.live_name
        try:
            self._store = open_store(self.options.root)
            self.root = self._store.root
            self._lock = self._share(start_lock(self._store, name))
            check = check_deployment(self._store, name)
        except PrefetchError as error:
            check = DeploymentCheck(name, "", Verdict.MISSING, str(error), (), ())
        except OSError as error:
            check = DeploymentCheck(name, "", Verdict.MISSING, f"the store cannot be read: {error}", (), ())
        except Exception as error:  # noqa: BLE001 (whatever lies there, it must not keep a replica from its fallback)
            _log.exception("llm-prefetch: the check of %s failed", name)
            check = DeploymentCheck(name, "", Verdict.MISSING, f"the check failed: {error!r}", (), ())
        self._checked = time.monotonic()
        if not check.ready:
            self._let_go()
        return check

    def engine_path(self, check: DeploymentCheck) -> os.PathLike[str]:
        """The engine path of the bundle's model.

        Raises:
            SpecError: the bundle holds no model, or several and `model` does not say which.
        """
        assert self._store is not None  # noqa: S101 (a hit comes from a store)
        models = [member.name for member in check.members if member.kind == "model"]
        if self.options.model in models:
            models = [self.options.model]
        if len(models) != 1 or self.options.model not in (None, models[0]):
            raise SpecError(
                f"which model? {check.deployment} holds {', '.join(models) or 'none'}",
                where="callback_config.callback_kwargs.model",
                hint="name one artifact of kind model",
            )
        return self._store.engine_path(check.deployment, models[0])

    def record(self, check: DeploymentCheck) -> None:
        """The ledger's row of the check."""
        if self._store is not None:
            ledger.append(
                self._store,
                "start",
                start=self.id,
                deployment=check.deployment,
                bundle=check.bundle,
                verdict=check.verdict,
                reason=check.reason,
                rung="hit" if check.ready else self.rung,
                seconds=round(self._checked - self._began, 6),
            )

    def end(self, task: asyncio.Task[Any]) -> None:
        """The engine is ready or its start has failed: let go of the generation and write it down.

        The event loop calls this, so nothing may be raised.
        """
        try:
            self._let_go()
            if self._store is not None:
                seconds = round(time.monotonic() - self._checked, 3)
                ledger.append(self._store, "engine", start=self.id, outcome=_outcome(task), seconds=seconds)
        except Exception:  # noqa: BLE001
            _log.exception("llm-prefetch: the end of start %s is not in the ledger", self.id)

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


def _outcome(task: asyncio.Task[Any]) -> str:
    if task.cancelled():
        return "cancelled"
    error = task.exception()
    if error is None:
        return "ready"
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return f"failed: {reason[:_REASON_CHARACTERS]}"
