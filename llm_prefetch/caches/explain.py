"""Why a start missed its compile cache: what differs from the start that built it, and what to do about it.

Two lists are compared where there are two: what we know of the launch (`Identity`), and vLLM's own factors, which it
writes only for the piecewise backend.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from llm_prefetch.caches.compatible import Difference, compatible
from llm_prefetch.caches.factors import Factors
from llm_prefetch.caches.identity import Identity

_SHOWN_CHARACTERS = 80
_EACH_RANK = "it differs per data-parallel rank, and so does the key: such replicas compile for themselves"
# The first pattern that fits a variable says what to do about it.
_VARIABLES = (
    ("VLLM_NIXL_SIDE_CHANNEL_*", "it differs per replica: pin it (runtime_env.env_vars)"),
    ("VLLM_RAY_BUNDLE_INDICES", _EACH_RANK),
    ("VLLM_DP_*", _EACH_RANK),
    ("VLLM_RAY_PER_WORKER_GPUS", "give the replica the share of a GPU that the cache was built with"),
    ("RAY_EXPERIMENTAL_NOSET_*", "Ray sets it: capture with `llm-prefetch capture`, not by `vllm serve`"),
    ("CUDA_HOME", "use one image for all nodes"),
    ("OMP_NUM_THREADS", "set it (runtime_env.env_vars): loops are compiled for a number of threads"),
    ("*", "set it as where it was captured (runtime_env.env_vars), or capture it again"),
)
_HASHES = {
    "config_hash": ("vLLM's configuration", "compare the engine's arguments and the model's config.json"),
    "code_hash": ("the traced sources", "capture again with this vLLM, these plugins and this model"),
    "compiler_hash": ("the compiler", "capture again with this torch, on this kind of GPU"),
}


def explain(
    built: Identity,
    here: Identity,
    built_factors: Mapping[str, Factors] | None = None,
    here_factors: Mapping[str, Factors] | None = None,
) -> tuple[Difference, ...]:
    """What differs; empty where nothing that is written down does.

    Args:
        built: Of the start that the cache was captured from.
        here: Of the start that missed it.
        built_factors: vLLM's own, of the folders in the cache.
        here_factors: Those of the folders that this start added.
    """
    found = [
        replace(one, fix=_variable(one.field.partition(".")[2]))
        if one.field.startswith("environment.")
        else one
        for one in compatible(built, here).differences
    ]
    known = {one.field for one in found}
    more = _factors(built_factors or {}, here_factors or {})
    return (*found, *(one for one in more if one.field not in known))


def _factors(built: Mapping[str, Factors], here: Mapping[str, Factors]) -> Iterator[Difference]:
    """Between the folders that have the most in common: a cache may hold those of several launches."""
    pairs = [(was, now) for was in built.values() for now in here.values()]
    if not pairs:
        return
    was, now = min(pairs, key=lambda pair: len(_apart(*pair)))
    for name in _apart(was, now):
        here_is, was_there = _text(now["env"].get(name)), _text(was["env"].get(name))
        yield Difference(f"environment.{name}", was_there, here_is, _variable(name))
    for name, (what, fix) in _HASHES.items():
        if was.get(name) != now.get(name):
            yield Difference(what, _text(was.get(name)), _text(now.get(name)), fix)


def _apart(was: Factors, now: Factors) -> list[str]:
    names = was["env"].keys() | now["env"].keys()
    return sorted(name for name in names if was["env"].get(name) != now["env"].get(name))


def _variable(name: str) -> str:
    return next(fix for pattern, fix in _VARIABLES if fnmatch.fnmatchcase(name, pattern))


def _text(value: Any) -> str:  # noqa: ANN401 (JSON)
    text = "not set" if value is None or value == "" else str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
