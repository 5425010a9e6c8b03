"""The callback in the replica: check its nodes, point the engine at the staged files, or fall back.

On a hit the engine is given the engine path and Ray's node initialisation is skipped, which would cost a fresh worker
process even with nothing to do. On a miss the rungs of `on_miss` are tried, all of it in `on_before_node_init`, before
Ray would download. No engine starts on files that the check refused.

Ray pickles the instance into remote tasks, so nothing that holds a lock, a file or a thread lives on `self`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_prefetch.caches import KIND as COMPILE_CACHE
from llm_prefetch.caches.places import CAPTURING
from llm_prefetch.errors import NotReadyError
from llm_prefetch.serve.group import Group, running
from llm_prefetch.serve.group_node import Download, refused_caches
from llm_prefetch.serve.ladder import Ladder, Note, Rung, followed
from llm_prefetch.serve.loading import point_engine
from llm_prefetch.serve.ray_api import CallbackBase, replica_name
from llm_prefetch.serve.start import Start, starting

if TYPE_CHECKING:
    from llm_prefetch.live import DeploymentCheck
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
        self._code: tuple[NodeStore, DeploymentCheck] | None = None
        self._start = ""

    @property
    def generation(self) -> tuple[NodeStore, DeploymentCheck] | None:
        """What the engine starts from, and where it lies; `None` where it was not staged."""
        return None if self._store is None or self._check is None else (self._store, self._check)

    async def on_before_node_init(self) -> None:
        """Check the nodes and decide what the engine starts from.

        Raises:
            NotReadyError: a node is not ready, and no rung of `on_miss` has helped.
        """
        start = Start(self.options, replica_name())
        group = self._group(start)
        task = asyncio.current_task()
        if task is not None:
            # This task runs all of the engine's start: when it is done, the engine is ready or has failed.
            task.add_done_callback(group.end)
        first = check = await group.check()
        if check.ready:
            group.record(first, check.bundle, "hit", ())
            self._use(start, check)
            return
        _log.warning(
            "llm-prefetch: %s is %s %s (%s); going on with: %s",
            check.deployment, check.verdict, group.where, check.reason, ", ".join(self.options.on_miss),
        )  # fmt: skip
        ladder, rung = Ladder(check.deployment, self.options.budget_seconds), "fail"
        try:
            check = await ladder.climb(self._rungs(group), group.check, check)
            if check.ready:
                rung = ladder.attempts[-1].rung
            elif self.options.on_miss[-1] == "ray" and not await self._download(ladder, group):
                rung = "ray"
        finally:
            group.record(first, check.bundle, rung, ladder.attempts)
            self._tell_prefect(start, first, rung)
        if check.ready:
            self._use(start, check)
        elif rung == "fail":
            raise self._not_ready(group, check, ladder)

    async def on_after_node_init(self) -> None:
        """Check what Ray has downloaded, where it was not checked yet, and register parsers and models.

        Raises:
            FallbackError: it is not a whole model.
            PluginError: a parser or a model cannot be used.
        """
        if self.ctx.run_init_node and self._check is None:  # on a hit, Ray had only extra files to bring
            from llm_prefetch.serve.rays_download import accept, keep

            note = Note()
            judged = accept(self.llm_config, self.ctx, partial(keep, self.options), note)
            how = await followed(judged, self.options.live_name, note)
            group = running(self._start)
            if group is not None:
                judged = self._accept_elsewhere(group, note)
                how += await followed(judged, self.options.live_name, note)
            _log.info("llm-prefetch: %s: %s", self.options.live_name, how)
        from llm_prefetch.serve.plugins import install_plugins

        store, check = self.generation or self._code or (None, None)
        installed = asyncio.to_thread(
            install_plugins,
            self.options.parsers,
            engine_kwargs=self.llm_config.engine_kwargs,
            runtime_env=self.ctx.runtime_env,
            check=check,
            store=store,
        )
        note = Note(lambda: "imports and registers parsers and models")
        await followed(installed, self.options.live_name, note)
        await self._offer_cache()

    async def _offer_cache(self) -> None:
        """Give the engine its compile cache, if one is staged, and note what there was before it starts."""
        start, staged = starting(self._start), self.generation
        members = staged[1].members if staged else ()
        names = [member.name for member in members if member.kind == COMPILE_CACHE]
        if start is None or (not names and CAPTURING not in os.environ):
            return  # and nothing is imported for it
        from llm_prefetch.serve.caches import offer_cache
        from llm_prefetch.serve.compile_watch import watch_compile

        group = running(self._start)
        start.cache = await asyncio.to_thread(
            offer_cache,
            start.id,
            self.llm_config,
            staged,
            runtime_env=self.ctx.runtime_env,
            elsewhere={} if group is None else await refused_caches(group.others.values(), names),
        )
        refused = start.cache.reason if start.cache is not None else ""
        start.watch = await asyncio.to_thread(watch_compile, self.llm_config, staged, refused)

    def _use(self, start: Start, check: DeploymentCheck) -> None:
        assert start.store is not None  # noqa: S101 (a hit comes from a store)
        engine_path = start.engine_path(check)
        point_engine(self.llm_config, self.ctx, Path(engine_path), start.store.root)
        self._check, self._store = check, start.store
        _log.info(
            "llm-prefetch: %s HIT in %.1f ms, engine path %s",
            check.deployment,
            start.milliseconds,
            engine_path,
        )

    def _tell_prefect(self, start: Start, first: DeploymentCheck, rung: str) -> None:
        from llm_prefetch.serve.fallback_event import Fallback, post_fallback

        fallback = Fallback(start.name, str(first.verdict), first.reason, rung, start.replica)
        post_fallback(fallback, self.options.prefect)

    def _wants_files(self) -> bool:
        """Whether a parser or a model is a file of a staged artifact."""
        parsers = self.options.parsers
        return parsers is not None and any(plugin.artifact for plugin in parsers.plugins("parsers"))

    def _group(self, start: Start) -> Group:
        """The nodes of the replica's placement group, or its own alone."""
        self._start = start.id
        if self.ctx.placement_group is None:
            return Group(start)
        from llm_prefetch.serve.placement import RayPlacement

        return Group(start, RayPlacement(self.ctx.placement_group, self.ctx.runtime_env))

    def _rungs(self, group: Group) -> list[Rung]:
        """Those that the check of the nodes decides on: all but the last."""

        async def prefect(note: Note) -> str:
            from llm_prefetch.serve.prefect_api import stage_by_prefect

            async with group.watching("prefect") as ready:
                return await stage_by_prefect(
                    self.options.prefect_deployment, self.options.prefect, note, ready
                )

        return [
            Rung(
                name,
                getattr(self.options.deadlines, name),
                prefect if name == "prefect" else partial(group.run, name),
            )
            for name in self.options.on_miss[:-1]
        ]

    async def _download(self, ladder: Ladder, group: Group) -> bool:
        """Let Ray download on all nodes and judge it; whether that failed."""
        from llm_prefetch.serve.rays_download import download, keep

        engine = self.llm_config.get_engine_config()
        before, wanted = engine.hf_model_id, self.ctx.run_init_node

        async def ray(note: Note) -> str:
            how = await download(self.llm_config, self.ctx, note, partial(keep, self.options))
            return how if self.ctx.run_init_node else how + await self._accept_elsewhere(group, note)

        attempt = await ladder.attempt(Rung("ray", self.options.deadlines.ray, ray))
        if attempt.failed:
            engine.hf_model_id, self.ctx.run_init_node = before, wanted
        elif self._wants_files():
            # The model came by another way, but the plugins may be here.
            start, check = group.start, group.start.check_plugins()
            self._code = None if start.store is None else (start.store, check)
        return attempt.failed

    async def _accept_elsewhere(self, group: Group, note: Note) -> str:
        """Judge on the other nodes, too, what Ray has downloaded; nothing to say where there are none."""
        if not group.others:
            return ""
        engine = self.llm_config.get_engine_config()
        mirror = getattr(engine.mirror_config, "bucket_uri", engine.mirror_config)
        download = Download(
            engine.hf_model_id,
            None if mirror is None else str(mirror),
            getattr(self.ctx.worker_node_download_model, "name", "MODEL_AND_TOKENIZER"),
            getattr(engine, "engine_kwargs", {}).get("load_format"),
        )
        return await group.accept(download, note)

    def _not_ready(self, group: Group, check: DeploymentCheck, ladder: Ladder) -> NotReadyError:
        tried = "; ".join(f"{attempt.rung} {attempt.outcome}" for attempt in ladder.attempts)
        return NotReadyError(
            f"{check.deployment} is {check.verdict} {group.where}: {check.reason}{tried and f' [{tried}]'}",
            where=group.start.where,
            hint="stage it, or allow a fallback with on_miss: [ray]",
        )
