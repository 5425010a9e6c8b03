"""One LLMConfig of a Serve YAML: what a replica of it would be started with."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llm_prefetch.errors import SpecError

_OPTIONS = ("proxy_location", "http_options", "grpc_options")
_HINT = "name the YAML that `serve deploy` is given"


@dataclass(frozen=True, slots=True)
class Launch:
    """What the replicas of one model are started with."""

    deployment: str
    """The name below `live/` that its callback starts from."""
    llm_config: Mapping[str, Any]
    runtime_env: Mapping[str, Any]
    """Of the whole application."""
    serve_options: Mapping[str, Any]
    """What Serve is started with, if it does not run: `proxy_location` and `http_options`, where they are given."""

    def with_environment(self, variables: Mapping[str, str]) -> dict[str, Any]:
        """The LLMConfig for one replica more, with these variables in its environment."""
        config = copy.deepcopy(dict(self.llm_config))
        own = config.get("runtime_env") or {}
        env_vars = {**(self.runtime_env.get("env_vars") or {}), **(own.get("env_vars") or {}), **variables}
        config["runtime_env"] = {**self.runtime_env, **own, "env_vars": env_vars}
        options = dict(config.get("deployment_config") or {})
        options.pop("autoscaling_config", None)
        config["deployment_config"] = {**options, "num_replicas": 1, "max_constructor_retry_count": 1}
        return config


def read_launch(path: Path, application: str = "", model: str = "") -> Launch:
    """The LLMConfig of `model` in `application`; where there is one of either it need not be named.

    Raises:
        SpecError: the file cannot be read, or it is not clear which is meant.
    """
    try:
        config = yaml.safe_load(path.read_text("utf-8"))
        applications = [dict(app) for app in config["applications"]]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise SpecError(f"that is no Serve YAML: {reason}", where=str(path), hint=_HINT) from None
    app = _one(applications, "name", application, "application", path)
    configs = [dict(one) for one in _llm_configs(app, path)]
    for one in configs:
        one["id"] = (one.get("model_loading_config") or {}).get("model_id")
    chosen = _one(configs, "id", model, "model", path)
    model = chosen.pop("id")
    deployments = list(_deployments(chosen))
    if len(deployments) != 1:
        raise SpecError(
            f"{model} does not start by our callback",
            where=str(path),
            hint="its callback_config names llm_prefetch.serve.PrefetchCallback with a deployment",
        )
    name = deployments[0].rpartition("/")[2]
    options = {key: config[key] for key in _OPTIONS if config.get(key)}
    return Launch(name, chosen, dict(app.get("runtime_env") or {}), options)


def _llm_configs(app: Mapping[str, Any], path: Path) -> Iterator[Mapping[str, Any]]:
    """Those in the file, and those in files of their own."""
    args = app.get("args") or {}
    for given in args.get("llm_configs") or [args.get("llm_config") or args.get("prefill_config") or {}]:
        if isinstance(given, Mapping):
            yield given
            continue
        try:
            yield dict(yaml.safe_load((path.parent / str(given)).read_text("utf-8")))
        except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError, ValueError):
            raise SpecError(f"the LLMConfig {given!r} cannot be read", where=str(path), hint=_HINT) from None


def _deployments(llm_config: Mapping[str, Any]) -> Iterator[str]:
    """What our callback is told to start from, alone or in a chain."""
    kwargs = (llm_config.get("callback_config") or {}).get("callback_kwargs") or {}
    for one in (
        kwargs,
        *((member or {}).get("callback_kwargs") or {} for member in kwargs.get("callbacks") or ()),
    ):
        if isinstance(one.get("deployment"), str):
            yield one["deployment"]


def _one(found: list[dict[str, Any]], key: str, wanted: str, what: str, path: Path) -> dict[str, Any]:
    names = [str(one.get(key)) for one in found]
    if not wanted and len(found) == 1:
        return found[0]
    if names.count(wanted) == 1:
        return found[names.index(wanted)]
    raise SpecError(
        f"no {what} {wanted!r}" if wanted else f"which {what}?",
        where=str(path),
        hint=f"name one of {', '.join(names) or 'none'}",
    )
