"""The eight hooks, and how one of them is called: where it exists, sync or async, its errors kept or raised."""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from llm_prefetch.errors import SpecError
from llm_prefetch.redact import redact_text
from llm_prefetch.serve.lifecycle.context import NodeInitializationContext

_log = logging.getLogger("ray.serve.llm_prefetch")


class NodeInitializationCallback(Protocol):
    """All methods are optional: any class with some of them works, derived from this or not.

    Each may be a coroutine. One that returns `False` skips the default of its phase.
    """

    def on_pre_initialization(self, ctx: NodeInitializationContext) -> bool | None:
        """Before anything; `False` skips Ray's placement group and download."""

    def on_pre_download(self, ctx: NodeInitializationContext) -> bool | None:
        """Before Ray downloads; `False` skips that."""

    def on_post_download(self, ctx: NodeInitializationContext) -> None:
        """The files are there: `ctx.download_result`."""

    def on_pre_placement_group(self, ctx: NodeInitializationContext) -> bool | None:
        """Before the placement group is made or found; `False` skips that: `ctx.placement_group` is used as it is."""

    def on_post_placement_group(self, ctx: NodeInitializationContext) -> None:
        """`ctx.placement_group` is there."""

    def on_pre_engine_init(self, ctx: NodeInitializationContext) -> bool | None:
        """Before the engine starts, the last chance for `ctx.extra_init_kwargs`; `False` starts no engine."""

    def on_post_engine_init(self, ctx: NodeInitializationContext) -> None:
        """The engine is ready."""

    def on_post_initialization(self, ctx: NodeInitializationContext) -> None:
        """The replica is about to be ready."""


HOOKS = (
    "on_pre_initialization",
    "on_pre_placement_group",
    "on_post_placement_group",
    "on_pre_download",
    "on_post_download",
    "on_pre_engine_init",
    "on_post_engine_init",
    "on_post_initialization",
)
"""In the order in which they are called."""
_RAYS = ("on_before_node_init", "on_after_node_init", "on_before_download_model_files_distributed")


@dataclass(frozen=True)
class Member:
    """One callback of several: `value` has some hooks; its errors end the start, or are only logged."""

    value: Any
    raise_errors: bool

    @property
    def name(self) -> str:
        """Its class."""
        return type(self.value).__name__

    def has(self, hook: str) -> bool:
        """Whether it wants to be called."""
        return callable(getattr(self.value, hook, None))

    async def call(self, hook: str, ctx: NodeInitializationContext) -> bool:
        """Call `hook` if it is there; `False` only if it says so.

        Raises:
            RuntimeError: it failed, and that is to end the start.
        """
        if not self.has(hook):
            return True
        try:
            answer = getattr(self.value, hook)(ctx)
            if inspect.isawaitable(answer):
                answer = await answer
        except Exception as error:
            if self.raise_errors:
                raise RuntimeError(f"{self.name}.{hook}: {type(error).__name__}: {error}") from error
            _log.warning(
                "llm-prefetch: %s.%s failed; going on without it: %s: %s",
                self.name, hook, type(error).__name__, redact_text(str(error)),
            )  # fmt: skip
            return True
        return answer is not False


def load_class(name: str, where: str) -> type:
    """The class behind a dotted name.

    Raises:
        SpecError: there is none; `where` is the YAML path.
    """
    module, _, attribute = name.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SpecError(
            f"{where}: {name!r} cannot be imported: {error}",
            where="the Serve YAML",
            hint="write module.Class, and ship the module with the runtime_env or the image",
        ) from error
    if not isinstance(found, type):
        raise SpecError(f"{where}: {name!r} is not a class", where="the Serve YAML", hint="name the class")
    return found


def make_plain(kind: type, kwargs: Mapping[str, Any], where: str) -> Any:  # noqa: ANN401 (any class)
    """An instance of a class with some of the hooks; a misspelt hook is warned of, since it is never called.

    Raises:
        SpecError: it takes other arguments, or has no hook at all.
    """
    known = (*HOOKS, *_RAYS)
    hooks = [name for name in dir(kind) if name.startswith("on_")]
    if not any(name in known for name in hooks):
        raise SpecError(
            f"{where}: {kind.__name__} has none of the hooks",
            where="the Serve YAML",
            hint=f"define some of {', '.join(HOOKS)}",
        )
    for name in hooks:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            _log.warning("llm-prefetch: %s.%s is not a hook and is never called%s", kind.__name__, name, hint)
    try:
        return kind(**kwargs)
    except TypeError as error:
        raise SpecError(f"{where}: {error}", where="the Serve YAML", hint="mend callback_kwargs") from error
