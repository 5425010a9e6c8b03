"""What a replica decided to register, and how the other processes of its engine learn of it.

The decision goes into an environment variable. EngineCore inherits it as a child of the replica, vLLM copies it to
its Ray workers, and the task in which Ray makes the engine's configuration has it from the callback's
`runtime_env`. In each of them vLLM runs our entry point, `vllm_entry`, before it looks anything up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points

from llm_prefetch.errors import PluginError
from llm_prefetch.plugins.loading import mount
from llm_prefetch.plugins.names import Plugin
from llm_prefetch.plugins.registering import register_lazily
from llm_prefetch.plugins.vllm_entry import GROUP, NAME, VARIABLE

_FILTER = "VLLM_PLUGINS"


@dataclass(frozen=True, slots=True)
class Decision:
    """Plugins under their final names, and the folders of the artifacts that they are in."""

    plugins: tuple[Plugin, ...]
    folders: Mapping[str, str]

    def to_json(self) -> str:
        """The value of the environment variable."""
        return json.dumps(
            {"folders": dict(self.folders), "plugins": [asdict(plugin) for plugin in self.plugins]}
        )


def hand_over(decision: Decision, *environments: MutableMapping[str, str]) -> None:
    """Write the decision into these environments."""
    for environment in environments:
        environment[VARIABLE] = decision.to_json()


def register_decided(text: str) -> None:
    """Register what the replica decided; `text` is the value of the environment variable.

    Raises:
        PluginError: it cannot be read, or names what is not on this node.
    """
    decision = _parse(text)
    mount(decision.folders)
    for plugin in decision.plugins:
        register_lazily(plugin)


def check_entry_point(environment: Mapping[str, str] = os.environ) -> None:
    """Check that vLLM will run our entry point in the processes that it starts.

    Raises:
        PluginError: this installation has none, or `VLLM_PLUGINS` leaves it out.
    """
    if NAME not in {point.name for point in entry_points(group=GROUP)}:
        raise PluginError(
            f"this installation of llm-prefetch has no entry point {NAME!r} of {GROUP}",
            where="the replica's Python environment",
            hint="install llm-prefetch again, on every node; a copied folder is not enough",
        )
    allowed = environment.get(_FILTER)
    if allowed is not None and NAME not in allowed.split(","):
        raise PluginError(
            f"{_FILTER}={allowed} keeps parsers and models from vLLM's processes",
            where="the environment of the replica (runtime_env.env_vars)",
            hint=f"add {NAME} to it: {_FILTER}={','.join([*filter(None, allowed.split(',')), NAME])}",
        )


def _parse(text: str) -> Decision:
    try:
        data = json.loads(text)
        return Decision(tuple(Plugin(**plugin) for plugin in data["plugins"]), dict(data["folders"]))
    except (ValueError, TypeError, KeyError) as error:
        raise PluginError(
            f"{VARIABLE} cannot be read: {error}",
            where="the environment of a vLLM process",
            hint="it is set by the callback: unset it elsewhere, and install one llm-prefetch on all nodes",
        ) from error
