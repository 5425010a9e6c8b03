"""A server class for `LLMConfig.server_cls` that runs all eight hooks, and takes any class with some of them.

In the Serve YAML: `server_cls: llm_prefetch.serve.server.LLMServer`. To give another server class the hooks, derive
from both: `class MyServer(LifecycleMixin, DPServer)`. Importing this module imports vLLM, as Ray's own server does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.serve.llm.deployment import LLMServer as RayLLMServer

from llm_prefetch.serve.adapter_loader import StagedAdapterLoader
from llm_prefetch.serve.lifecycle.callback import LifecycleCallback, SkipEngineError
from llm_prefetch.serve.lifecycle.hooks import load_class
from llm_prefetch.serve.ray_api import CallbackBase

__all__ = ["LLMServer", "LifecycleMixin", "get_or_create_callback"]

_log = logging.getLogger("ray.serve.llm_prefetch")


class LifecycleMixin:
    """Puts the phases that Ray's callback cannot see around the start of the engine."""

    _llm_config: Any

    def _init_multiplex_loader(self, model_downloader_cls: Any = None) -> None:  # noqa: ANN401 (a class of Ray's kind)
        """Adapters come from the node's disk where they are staged."""
        super()._init_multiplex_loader(model_downloader_cls or StagedAdapterLoader)  # type: ignore[misc]

    async def _start_engine(self) -> None:
        """Run the hooks around Ray's start; all of it counts for Ray's limit of an engine's start."""
        callback = get_or_create_callback(self._llm_config)
        if not isinstance(callback, LifecycleCallback):
            await super()._start_engine()  # type: ignore[misc]
            return
        callback.in_server = True
        wanted = await callback.run_phase("on_pre_initialization")
        callback.ctx.run_init_node = callback.ctx.run_init_node and wanted
        if await callback.run_phase("on_pre_placement_group") and wanted:
            callback.ctx.placement_group = self._llm_config.get_engine_config().get_or_create_pg()
        await callback.run_phase("on_post_placement_group")
        try:
            await super()._start_engine()  # type: ignore[misc]
        except SkipEngineError:
            _log.warning("llm-prefetch: on_pre_engine_init returned False: this replica has no engine")
        else:
            await callback.run_phase("on_post_engine_init")
        await callback.run_phase("on_post_initialization")


class LLMServer(LifecycleMixin, RayLLMServer):
    """Ray's server with the hooks."""


def get_or_create_callback(llm_config: Any) -> CallbackBase:  # noqa: ANN401 (Ray's LLMConfig)
    """The one callback of this process; `llm_config.get_or_create_callback()` answers the same one from then on.

    Unlike there, a class that does not derive from Ray's is taken too, and with our own kind the placement group is
    left for the hooks to decide.
    """
    config = llm_config.callback_config
    kind = config.callback_class
    if isinstance(kind, str):
        kind = load_class(kind, "callback_config.callback_class")
    if not issubclass(kind, CallbackBase):
        member = {
            "callback_class": kind,
            "callback_kwargs": config.callback_kwargs,
            "raise_error_on_callback": config.raise_error_on_callback,
        }
        config.callback_class, config.callback_kwargs = LifecycleCallback, {"callbacks": [member]}
        kind = LifecycleCallback
    if not issubclass(kind, LifecycleCallback):
        return llm_config.get_or_create_callback()
    with _without_placement_group(type(llm_config.get_engine_config())):
        return llm_config.get_or_create_callback()


@contextmanager
def _without_placement_group(engine_config: Any) -> Iterator[None]:  # noqa: ANN401 (Ray's VLLMEngineConfig)
    """Ray makes the placement group when it makes the callback; the hooks come between."""
    original = engine_config.get_or_create_pg
    engine_config.get_or_create_pg = lambda _self: None
    try:
        yield
    finally:
        engine_config.get_or_create_pg = original
