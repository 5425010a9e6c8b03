"""Several callbacks in one LLMConfig: Ray's kind with three hooks, and any class with some of the eight.

In the Serve YAML, in the order in which they run:

    server_cls: llm_prefetch.serve.server.LLMServer     # for the placement group and what follows the engine
    callback_config:
      callback_class: llm_prefetch.serve.LifecycleCallback
      callback_kwargs:
        callbacks:
          - {callback_class: my_company.callbacks.Metrics, raise_error_on_callback: false}
          - {callback_class: llm_prefetch.serve.PrefetchCallback, callback_kwargs: {deployment: stage/llama-3-8b}}

`PrefetchCallback` comes last: on a miss it runs Ray's download itself, so who wants a word before that stands above.
"""

from __future__ import annotations

import logging
from typing import Any

from llm_prefetch.serve.lifecycle.context import NodeInitializationContext
from llm_prefetch.serve.lifecycle.hooks import Member, load_class, make_plain
from llm_prefetch.serve.ray_api import CallbackBase

_log = logging.getLogger("ray.serve.llm_prefetch")
_YAML_PATH = "callback_config.callback_kwargs.callbacks"


class SkipEngineError(Exception):
    """`on_pre_engine_init` returned `False`: no error, but the way out of Ray's start."""


class LifecycleCallback(CallbackBase):
    """Runs `callbacks` one after the other in each phase; they share one context."""

    def __init__(
        self,
        llm_config: Any,  # noqa: ANN401 (Ray's LLMConfig; importing it imports vLLM)
        raise_error_on_callback: bool = True,  # noqa: FBT001, FBT002 (Ray's signature)
        ctx_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,  # noqa: ANN401 (checked by `parse_members`)
    ) -> None:
        """Make the callbacks.

        Raises:
            SpecError: an argument does not fit, by its YAML path.
        """
        from llm_prefetch.serve.lifecycle.options import parse_members

        super().__init__(llm_config, raise_error_on_callback=raise_error_on_callback, ctx_kwargs={}, **kwargs)
        self.ctx = NodeInitializationContext(llm_config=llm_config, **(ctx_kwargs or {}))
        self.ctx.replica_node_id = _node_id()
        self.members = []
        for number, options in enumerate(parse_members(kwargs)):
            where = f"{_YAML_PATH}.{number}"
            given = options.callback_class
            kind = load_class(given, f"{where}.callback_class") if isinstance(given, str) else given
            if issubclass(kind, CallbackBase):
                value: Any = kind(
                    llm_config=llm_config,
                    raise_error_on_callback=options.raise_error_on_callback,
                    ctx_kwargs=ctx_kwargs,
                    **options.callback_kwargs,
                )
                value.ctx = self.ctx
            else:
                value = make_plain(kind, options.callback_kwargs, where)
            self.members.append(Member(value, options.raise_error_on_callback and raise_error_on_callback))
        self.in_server = False
        """Whether a server of ours runs the phases that Ray's callback cannot see."""

    async def on_before_node_init(self) -> None:
        """Ray's first hook: everything before the download."""
        if not self.in_server:
            self._warn_of_deaf_hooks()
            if not await self.run_phase("on_pre_initialization"):
                self.ctx.run_init_node = False
        for member in self.members:
            if isinstance(member.value, CallbackBase):
                wanted = self.ctx.run_init_node
                await member.value.run_callback("on_before_node_init")
                if wanted and getattr(member.value, "generation", None) is not None:
                    self.ctx.run_init_node = self.ctx.run_init_node or self._has_work_in_downloads()
            elif not await member.call("on_pre_download", self.ctx):
                self.ctx.run_init_node = False

    async def on_after_node_init(self) -> None:
        """Ray's second hook: the files are there, the engine is next.

        Raises:
            SkipEngineError: a callback says that no engine is to be started.
        """
        self.ctx.download_result = self.llm_config.get_engine_config().actual_hf_model_id
        for member in self.members:
            if isinstance(member.value, CallbackBase):
                await member.value.run_callback("on_after_node_init")
            else:
                await member.call("on_post_download", self.ctx)
        if not await self.run_phase("on_pre_engine_init"):
            raise SkipEngineError

    def on_before_download_model_files_distributed(self) -> None:
        """Ray's third hook, in a copy of this object on each node that downloads: only Ray's kind knows it."""
        for member in self.members:
            if isinstance(member.value, CallbackBase):
                member.value.run_callback_sync("on_before_download_model_files_distributed")

    async def run_callback(self, method_name: str) -> None:
        """As Ray's, but lets `SkipEngineError` through to the server."""
        try:
            await getattr(self, method_name)()
        except SkipEngineError:
            if self.in_server:
                raise
            _log.warning(
                "llm-prefetch: on_pre_engine_init returned False, but only server_cls: "
                "llm_prefetch.serve.server.LLMServer can do without the engine; it starts"
            )
        except Exception as error:  # noqa: BLE001 (Ray's own handling)
            self._handle_callback_error(method_name, error)

    async def run_phase(self, hook: str) -> bool:
        """Call one of the eight hooks on all who have it; whether the default of the phase is wanted."""
        wanted = True
        for member in self.members:
            if not isinstance(member.value, CallbackBase):
                wanted = await member.call(hook, self.ctx) and wanted
        if self.ctx.extra_init_kwargs:
            self.llm_config.update_engine_kwargs(**self.ctx.extra_init_kwargs)
        return wanted

    def _has_work_in_downloads(self) -> bool:
        """Whether a callback is to be asked in Ray's download tasks; with the model staged they do nothing else."""
        hook = "on_before_download_model_files_distributed"
        busy = [
            member.name
            for member in self.members
            if isinstance(member.value, CallbackBase)
            and getattr(type(member.value), hook) is not getattr(CallbackBase, hook)
        ]
        if busy:
            _log.warning(
                "llm-prefetch: %s has work in Ray's download tasks, which cost a process on each node; "
                "an artifact with a link: does without",
                ", ".join(busy),
            )
        return bool(busy)

    def _warn_of_deaf_hooks(self) -> None:
        deaf = (
            "on_pre_placement_group",
            "on_post_placement_group",
            "on_post_engine_init",
            "on_post_initialization",
        )
        for member in self.members:
            missed = [hook for hook in deaf if member.has(hook)]
            if missed:
                _log.warning(
                    "llm-prefetch: %s: %s are not called without server_cls: llm_prefetch.serve.server.LLMServer",
                    member.name, ", ".join(missed),
                )  # fmt: skip


def _node_id() -> str:
    import ray

    return ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
