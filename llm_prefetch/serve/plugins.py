"""Parsers and models in the replica: check them, register them here, and tell the engine's other processes."""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llm_prefetch.errors import PluginError, TrustError
from llm_prefetch.live import DeploymentCheck
from llm_prefetch.plugins.names import Plugin
from llm_prefetch.plugins.vllm_entry import VARIABLE
from llm_prefetch.record import Verdict
from llm_prefetch.store import NodeStore

if TYPE_CHECKING:
    from llm_prefetch.plugins.options import PluginNames

WHERE = "callback_config.callback_kwargs.parsers"
_log = logging.getLogger("ray.serve.llm_prefetch")
_SECONDS = 300.0


def install_plugins(
    options: PluginNames | None,
    *,
    engine_kwargs: Mapping[str, Any],
    runtime_env: MutableMapping[str, Any] | None = None,
    check: DeploymentCheck | None = None,
    store: NodeStore | None = None,
    seconds: float = _SECONDS,
) -> tuple[str, ...]:
    """Register the parsers and models of a replica, and see that its engine's arguments name none that is missing.

    Call it before the engine starts, in a thread: a model is looked at in a process of its own. It costs nothing
    where neither `options` nor the engine's arguments name anything.

    Args:
        options: `parsers` of the callback.
        engine_kwargs: Those of the LLMConfig.
        runtime_env: The one of the callback's context: Ray makes the engine's configuration in a task that has it.
        check: The last check of the deployment; needed where a plugin is a file of an artifact.
        store: Where that artifact lies.
        seconds: How long one import may take.

    Returns:
        The names that were registered, each with its kind, such as `reasoning my_parser`.

    Raises:
        PluginError: a plugin is missing, broken, or not of its kind.
        TrustError: a file is of an artifact that nothing vouches for.
    """
    plugins = options.plugins(WHERE) if options else ()
    if not plugins and not any(engine_kwargs.get(name) for name in ("reasoning_parser", "tool_call_parser")):
        return ()
    folders = _folders(plugins, check, store)
    _check_vllm()
    began = time.monotonic()
    environments = [os.environ, *([] if runtime_env is None else [runtime_env.setdefault("env_vars", {})])]
    try:
        registered = _install(plugins, folders, engine_kwargs, environments, seconds)
    except BaseException:
        for environment in environments:  # it must not reach an engine that is started nevertheless
            environment.pop(VARIABLE, None)
        raise
    if registered:
        milliseconds = (time.monotonic() - began) * 1000
        _log.info("llm-prefetch: registered %s in %.1f ms", ", ".join(registered), milliseconds)
    return registered


def _install(
    plugins: tuple[Plugin, ...],
    folders: Mapping[str, str],
    engine_kwargs: Mapping[str, Any],
    environments: Sequence[MutableMapping[str, str]],
    seconds: float,
) -> tuple[str, ...]:
    # Not at the top: a replica without plugins does not need them.
    from vllm.plugins import load_general_plugins

    from llm_prefetch.plugins.decision import Decision, check_entry_point, hand_over
    from llm_prefetch.plugins.loading import mount
    from llm_prefetch.plugins.registering import check_model, check_used, register_lazily, register_parser

    load_general_plugins()  # what others register counts, and with GPUs nothing else loads it in this process
    mount(folders)
    models = [
        replace(plugin, name=plugin.name or plugin.class_name)
        for plugin in plugins
        if plugin.kind == "models"
    ]
    decided = [
        one
        for plugin in plugins
        if plugin.kind != "models"
        for one in register_parser(plugin, seconds=seconds)
    ]
    decided += [model for model in models if model.module]
    if decided:
        check_entry_point()
        hand_over(Decision(tuple(decided), folders), *environments)
    for model in models:
        if model.module:
            register_lazily(model)
        check_model(model, seconds=seconds)
    check_used(engine_kwargs)
    return tuple(f"{plugin.kind} {plugin.name}" for plugin in decided)


def _folders(
    plugins: tuple[Plugin, ...], check: DeploymentCheck | None, store: NodeStore | None
) -> dict[str, str]:
    """The engine path of each artifact that a plugin is a file of, once it is known to be what was staged."""
    folders: dict[str, str] = {}
    for plugin in plugins:
        if plugin.artifact and plugin.artifact not in folders:
            if check is None or store is None:
                raise _not_staged(plugin, "nothing is staged on this node")
            _check_staged(plugin, check)
            folders[plugin.artifact] = str(store.engine_path(check.deployment, plugin.artifact))
    return folders


def _check_staged(plugin: Plugin, check: DeploymentCheck) -> None:
    member = next((member for member in check.members if member.name == plugin.artifact), None)
    if member is None:
        held = ", ".join(member.name for member in check.members if member.kind == "plugin")
        raise _not_staged(
            plugin, f"{check.deployment} has no artifact {plugin.artifact} (of kind plugin: {held or 'none'})"
        )
    if member.kind != "plugin":
        raise TrustError(
            f"{plugin.where}: the artifact {plugin.artifact} is of kind {member.kind}; code is taken from kind plugin alone",
            where=check.bundle,
            hint="give it `kind: plugin` and pin its `version:` in the spec or sign it, and stage it again",
        )
    verdict, reason = next(
        ((one.verdict, one.reason) for one in check.checks if one.name == plugin.artifact),
        (Verdict.MISSING, "it was not checked"),
    )
    if verdict is Verdict.UNTRUSTED:
        raise TrustError(
            f"{plugin.where}: {plugin.artifact} is {verdict}: {reason}",
            where=check.bundle,
            hint="pin its `version:` in the spec or sign it, and stage it again",
        )
    if verdict is not Verdict.HIT:
        raise _not_staged(plugin, f"{plugin.artifact} is {verdict} on this node: {reason}")


def _not_staged(plugin: Plugin, reason: str) -> PluginError:
    return PluginError(
        f"{plugin.where}: {plugin.target}: {reason}",
        where="the replica's node",
        hint=f"stage the deployment with its artifact {plugin.artifact} on every node of the replica",
    )


def _check_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise PluginError(
            f"{WHERE}: vLLM is not installed",
            where="the replica's Python environment",
            hint="install vllm there",
        )
