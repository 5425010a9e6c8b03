"""Whether a compile cache fits a node and a launch, and if not, what differs and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llm_prefetch.caches.identity import Identity, ordinals
from llm_prefetch.record import Verdict

_CAPTURE = "capture a cache for these nodes"
_ENGINE = "run the same image here as where it was captured, or capture it again with this one"
_ARGUMENT = "serve with the arguments that it was captured with, or capture it again with these"
_VARIABLE = "set it as where it was captured (runtime_env.env_vars), or capture it again"
_FIXES: Mapping[str, str] = {
    "platform": _CAPTURE,
    "vllm": _ENGINE,
    "torch": _ENGINE,
    "cuda": _ENGINE,
    "triton": _ENGINE,
    "python": _ENGINE,
    "packages": _ENGINE,
    "site_packages": "install vLLM at the same path: it compares the paths of the sources that it traced",
    "gpu_name": _CAPTURE,
    "processor": _CAPTURE,
    "threads": "give the replica as many processors, or capture it again",
    "engine_path": "give every node the same root (LLM_PREFETCH_ROOT), deployment and artifact name",
    "config": "capture it again: the model's config.json is another one",
    "tp": _ARGUMENT,
    "pp": _ARGUMENT,
    "dp": _ARGUMENT,
    "arguments": _ARGUMENT,
    "environment": _VARIABLE,
}
"""By the fields that have to be equal, where both are known. The ordinals have a rule of their own."""
_WHOLE_NODES = "run replicas that have all GPUs of their node, or one GPU to a Ray node: the number of the GPU is compiled in"


@dataclass(frozen=True, slots=True)
class Difference:
    """A field that differs, what it was and what it is, for people, and what to do."""

    field: str
    produced: str
    here: str
    fix: str

    def __str__(self) -> str:
        """One line."""
        return f"{self.field}: {self.produced} -> {self.here} ({self.fix})"


@dataclass(frozen=True, slots=True)
class Compatibility:
    """`HIT`, or `INCOMPATIBLE` and why."""

    verdict: Verdict
    differences: tuple[Difference, ...] = ()

    @property
    def reason(self) -> str:
        """All differences on one line; empty without any."""
        return "; ".join(map(str, self.differences))


def compatible(produced: Identity, here: Identity) -> Compatibility:
    """Whether an engine here can be expected to load what was `produced`; what is not known is not compared."""
    differences = tuple(_differences(produced, here))
    return Compatibility(Verdict.INCOMPATIBLE if differences else Verdict.HIT, differences)


def _differences(produced: Identity, here: Identity) -> Iterator[Difference]:
    for name, fix in _FIXES.items():
        was, now = getattr(produced, name), getattr(here, name)
        if was is None or now is None or was == now:
            continue
        if isinstance(was, dict):
            yield from _inside(name, was, now, fix)
        else:
            yield Difference(name, _shown(was), _shown(now), fix)
    yield from _ordinals(produced, here)


def _inside(name: str, was: Mapping[str, Any], now: Mapping[str, Any], fix: str) -> Iterator[Difference]:
    for key in sorted(was.keys() | now.keys()):
        if was.get(key) != now.get(key):
            yield Difference(f"{name}.{key}", _shown(was.get(key)), _shown(now.get(key)), fix)


def _ordinals(produced: Identity, here: Identity) -> Iterator[Difference]:
    """An engine that loads what was compiled for another number of its GPU does not compile again: it dies."""
    if "cpu" in (produced.platform, here.platform):
        return
    now = here.ordinals
    if here.tp is None:  # a staging: could the layout that the cache was built on be had here at all?
        if here.gpu_count is None or produced.tp is None or produced.pp is None:
            now = produced.ordinals
        else:
            now = ordinals(here.gpu_count, tp=produced.tp, pp=produced.pp, dp=produced.dp or 1)
    if produced.ordinals is None or produced.ordinals != now:
        yield Difference("ordinals", _layout(produced.ordinals), _layout(now), _WHOLE_NODES)


def _layout(found: tuple[int, ...] | None) -> str:
    return "not known before the workers start" if found is None else ",".join(map(str, found))


def _shown(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return str(value) if value != "" else "none"
