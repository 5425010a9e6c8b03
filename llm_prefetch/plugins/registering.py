"""Register parsers and models with vLLM in this process.

The replica imports its parsers at once, so that what is wrong with one shows before the engine starts, and
learns their names. Every other process is told what was decided and registers by module and class, which
imports nothing until vLLM asks for it. Models are always registered that way: importing one may initialise
CUDA, and an engine that is forked afterwards would fail.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from llm_prefetch.errors import PluginError
from llm_prefetch.plugins.loading import check_found, load_class
from llm_prefetch.plugins.names import Kind, Plugin

_T = TypeVar("_T")
_SECONDS = 300.0
_WHAT: Mapping[Kind, str] = {"reasoning": "reasoning parser", "tool": "tool parser", "models": "model class"}
_USED_AS: Mapping[Kind, str] = {"reasoning": "reasoning_parser", "tool": "tool_call_parser"}
_SHOWN_NAMES = 60


def register_parser(plugin: Plugin, *, seconds: float = _SECONDS) -> list[Plugin]:
    """Import a parser, register it, and return it once for each name that it has; a built-in is only looked up.

    Raises:
        PluginError: it cannot be imported in so many seconds, is no parser of its kind, or is not registered
            afterwards.
    """
    manager, base = _manager(plugin.kind)
    if not plugin.module:
        _check_registered(plugin.kind, plugin.name, plugin.where)
        return []
    try:
        found = _within(seconds, lambda: load_class(plugin))
    except TimeoutError:
        raise _takes_long(plugin, seconds) from None
    if not issubclass(found, base):
        raise PluginError(
            f"{plugin.where}: {plugin.target} is no {_WHAT[plugin.kind]}",
            where=found.__module__,
            hint=f"derive it from {base.__module__}.{base.__name__}, or list it under its own kind",
        )
    names = [plugin.name] if plugin.name else _own_names(manager, found)
    for name in names:
        manager.register_module(name, force=True, module=found)
        _check_registered(plugin.kind, name, plugin.where)
    return [replace(plugin, name=name) for name in names]


def register_lazily(plugin: Plugin) -> None:
    """Register a class by its module and name.

    Raises:
        PluginError: there is no such module on this node.
    """
    check_found(plugin)
    if plugin.kind == "models":
        _model_registry().register_model(plugin.name, f"{plugin.module}:{plugin.class_name}")
    # Nothing but the API layer looks up a tool parser, and importing theirs takes an engine seconds.
    elif plugin.kind == "reasoning" or "vllm.tool_parsers" in sys.modules:
        manager, _ = _manager(plugin.kind)
        manager.register_lazy_module(plugin.name, plugin.module, plugin.class_name)


def check_model(plugin: Plugin, *, seconds: float = _SECONDS) -> None:
    """Let vLLM look at a model class, in a process of its own; it keeps the answer for when it needs it itself.

    Raises:
        PluginError: the class is not registered, cannot be imported or is no model, or the answer takes too long.
    """
    models = _model_registry().models
    if plugin.name not in models:
        raise _unregistered(plugin.kind, plugin.name, models, plugin.where)
    if not plugin.module:
        return
    try:
        info = _within(seconds, models[plugin.name].inspect_model_cls)
    except TimeoutError:
        raise _takes_long(plugin, seconds) from None
    except Exception as error:
        raise _broken(plugin, f"it cannot be imported: {_last_line(error)}") from error
    if not is_model(info):
        raise _broken(
            plugin, "vLLM finds no model in it: neither text generation, nor pooling, nor transcription"
        )


def is_model(info: Any) -> bool:  # noqa: ANN401 (vLLM's)
    """Whether what vLLM found out about a class makes it a model that it can run."""
    return bool(info.is_text_generation_model or info.is_pooling_model or info.supports_transcription)


def check_used(engine_kwargs: Mapping[str, Any]) -> None:
    """Check that the parsers which the engine's arguments name are registered in this process.

    Raises:
        PluginError: one of them is not.
    """
    for kind, argument in _USED_AS.items():
        name = engine_kwargs.get(argument)
        if name:
            _check_registered(kind, str(name), f"engine_kwargs.{argument}")


def _own_names(manager: Any, found: type) -> list[str]:  # noqa: ANN401 (vLLM's)
    """The names that the module gave the class with vLLM's decorator, else the class's own."""
    place = (found.__module__, found.__name__)
    decorated = [name for name, lazy in manager.lazy_parsers.items() if tuple(lazy) == place]
    return decorated or [found.__name__]


def _check_registered(kind: Kind, name: str, where: str) -> None:
    manager, _ = _manager(kind)
    if name not in manager.list_registered():
        raise _unregistered(kind, name, manager.list_registered(), where)


def _unregistered(kind: Kind, name: str, known: Iterable[str], where: str) -> PluginError:
    names = sorted(known)
    near = [other for other in names if other.lower().startswith(name[:3].lower())] or names
    return PluginError(
        f"{where}: vLLM has no {_WHAT[kind]} {name!r}",
        where="the replica",
        hint=f"list its class in callback_kwargs.parsers.{kind}, or name one of: {', '.join(near[:_SHOWN_NAMES])}",
    )


def _manager(kind: Kind) -> tuple[Any, type]:
    """VLLM's registry of one kind of parser, and what its parsers derive from."""
    if kind == "tool":
        from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

        return ToolParserManager, ToolParser
    from vllm.reasoning.abs_reasoning_parsers import ReasoningParser, ReasoningParserManager

    return ReasoningParserManager, ReasoningParser


def _model_registry() -> Any:  # noqa: ANN401 (vLLM's)
    from vllm.model_executor.models.registry import ModelRegistry

    return ModelRegistry


def _within(seconds: float, work: Callable[[], _T]) -> _T:
    """Do it in a thread that nobody has to wait for: foreign code may never come back.

    Raises:
        TimeoutError: it has not come back.
    """
    done: queue.SimpleQueue[_T | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put(work())
        except BaseException as error:  # noqa: BLE001 (raised below, in the thread that waits)
            done.put(error)

    threading.Thread(target=run, name="llm-prefetch-plugin", daemon=True).start()
    try:
        answer = done.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _takes_long(plugin: Plugin, seconds: float) -> PluginError:
    return _broken(plugin, f"importing it takes longer than {seconds:g} s")


def _broken(plugin: Plugin, reason: str) -> PluginError:
    return PluginError(
        f"{plugin.where}: {plugin.target}: {reason}",
        where=plugin.module,
        hint="mend the module, publish it, and stage its new version",
    )


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
