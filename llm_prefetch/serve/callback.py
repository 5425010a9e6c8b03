"""The callback in the replica: check the node, point the engine at the staged files, or fall back.

On a hit the engine is given the engine path and Ray's node initialisation is skipped, which would cost a fresh worker
process even with nothing to do. On a miss the rungs of `on_miss` are tried, all of it in `on_before_node_init`, before
Ray would download. No engine starts on files that the check refused.

Ray pickles the instance into remote tasks, so nothing that holds a lock, a file or a thread lives on `self`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from llm_prefetch.errors import NotReadyError
from llm_prefetch.serve.ray_api import CallbackBase, replica_name
from llm_prefetch.serve.start import Start

if TYPE_CHECKING:
    from llm_prefetch.live import DeploymentCheck
    from llm_prefetch.serve.ladder import Ladder, Rung
    from llm_prefetch.serve.options import CallbackOptions
    from llm_prefetch.store import NodeStore

_log = logging.getLogger("ray.serve.llm_prefetch")


class PrefetchCallback(CallbackBase):
    """Start vLLM from what was staged on this node.

    In the Serve YAML:

        callback_config:
          callback_class: llm_prefetch.serve.PrefetchCallback
          callback_kwargs: {deployment: stage/llama-3-8b, on_miss: [wait, ray]}
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
        self._check: DeploymentCheck | None = None
        self._store: NodeStore | None = None

    async def on_before_node_init(self) -> None:
        """Check the node and decide what the engine starts from.

        Raises:
            NotReadyError: the node is not ready, and no rung of `on_miss` has helped.
        """
        start = Start(self.options, replica_name())
        first = check = start.check()
        task = asyncio.current_task()
        if task is not None:
            # This task runs all of the engine's start: when it is done, the engine is ready or has failed.
            task.add_done_callback(start.end)
        if check.ready:
            start.record(first, check.bundle, "hit", ())
            self._use(start, check)
            return
        from llm_prefetch.serve.ladder import Ladder

        _log.warning(
            "llm-prefetch: %s is %s on this node (%s); going on with: %s",
            check.deployment, check.verdict, check.reason, ", ".join(self.options.on_miss),
        )  # fmt: skip
        ladder, rung = Ladder(check.deployment, self.options.budget_seconds), "fail"
        try:
            check = await ladder.climb(self._rungs(start), start.check, check)
            if check.ready:
                rung = ladder.attempts[-1].rung
            elif self.options.on_miss[-1] == "ray" and not await self._download(ladder):
                rung = "ray"
        finally:
            start.record(first, check.bundle, rung, ladder.attempts)
        if check.ready:
            self._use(start, check)
        elif rung == "fail":
            raise self._not_ready(start, check, ladder)

    async def on_after_node_init(self) -> None:
        """Check what Ray has downloaded, where it was not checked yet, and register parsers and models.

        Raises:
            FallbackError: it is not a whole model.
            PluginError: a parser or a model cannot be used.
        """
        if self.ctx.run_init_node:
            from llm_prefetch.serve.rays_download import accept

            _log.info("llm-prefetch: %s: %s", self.options.live_name, await accept(self.llm_config, self.ctx))
        from llm_prefetch.serve.plugins import install_plugins

        await asyncio.to_thread(
            install_plugins,
            self.options.parsers,
            engine_kwargs=self.llm_config.engine_kwargs,
            runtime_env=self.ctx.runtime_env,
            check=self._check,
            store=self._store,
        )

    def _use(self, start: Start, check: DeploymentCheck) -> None:
        engine_path = str(start.engine_path(check))
        self._check, self._store = check, start.store
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

    def _rungs(self, start: Start) -> list[Rung]:
        """Those that the check of the node decides on: all but the last."""
        from llm_prefetch.serve.ladder import Note, Rung

        options = self.options

        async def wait(note: Note) -> str:
            from llm_prefetch.serve.waiting import wait_for_staging

            return await wait_for_staging(start.store, options.live_name, note, start.peek)

        async def prefect(note: Note) -> str:
            from llm_prefetch.serve.prefect_api import stage_by_prefect

            return await stage_by_prefect(options.prefect_deployment, options.prefect, note, start.peek)

        async def stage(note: Note) -> str:
            from llm_prefetch.serve.staging import stage_here

            assert options.spec is not None  # noqa: S101 (the options say so)
            return await stage_here(options.spec, options.live_name, options.root, note, start.peek)

        work = {"wait": wait, "prefect": prefect, "stage": stage}
        return [Rung(name, getattr(options.deadlines, name), work[name]) for name in options.on_miss[:-1]]

    async def _download(self, ladder: Ladder) -> bool:
        """Let Ray download and judge it; whether that failed."""
        from llm_prefetch.serve.ladder import Note, Rung
        from llm_prefetch.serve.rays_download import download

        engine = self.llm_config.get_engine_config()
        before = engine.hf_model_id

        async def ray(note: Note) -> str:
            return await download(self.llm_config, self.ctx, note)

        attempt = await ladder.attempt(Rung("ray", self.options.deadlines.ray, ray))
        if attempt.failed:
            engine.hf_model_id = before
        return attempt.failed

    def _not_ready(self, start: Start, check: DeploymentCheck, ladder: Ladder) -> NotReadyError:
        tried = "; ".join(f"{attempt.rung} {attempt.outcome}" for attempt in ladder.attempts)
        return NotReadyError(
            f"{check.deployment} is {check.verdict} on this node: {check.reason}{tried and f' [{tried}]'}",
            where=start.where,
            hint="stage it, or allow a fallback with on_miss: [ray]",
        )
