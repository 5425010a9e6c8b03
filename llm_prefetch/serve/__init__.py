"""What runs inside a Ray Serve LLM replica. Name it in the Serve YAML as `llm_prefetch.serve.PrefetchCallback`.

The names are looked up when they are asked for: a process that needs only a module of this package, such as a
staging, does without Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llm_prefetch.serve.callback import PrefetchCallback
    from llm_prefetch.serve.lifecycle.callback import LifecycleCallback

__all__ = ["LifecycleCallback", "PrefetchCallback"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 (a class)
    if name == "PrefetchCallback":
        from llm_prefetch.serve.callback import PrefetchCallback

        return PrefetchCallback
    if name == "LifecycleCallback":
        from llm_prefetch.serve.lifecycle.callback import LifecycleCallback

        return LifecycleCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
