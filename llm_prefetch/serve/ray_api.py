"""Ray's callback classes and its node initialisation, from where this Ray keeps them.

Ray's guide documents `ray.serve.llm.callbacks` (ray#61095); Ray 2.60 does not have it and keeps the classes in
`ray.llm._internal.common.callbacks`. The public classes derive from the internal ones, so a subclass of either
works in both. Looking for the file rather than importing keeps `ray.serve.llm`, which imports vLLM, out of a
process that does not need it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import ray

if (Path(ray.__file__).parent / "serve" / "llm" / "callbacks.py").is_file():
    from ray.serve.llm.callbacks import CallbackBase, CallbackCtx
else:
    from ray.llm._internal.common.callbacks.base import CallbackBase, CallbackCtx

__all__ = ["CallbackBase", "CallbackCtx", "node_initialization", "replica_name"]


def node_initialization() -> Callable[[Any], Awaitable[None]] | None:
    """What Ray does to download: `await it(llm_config)`; `None` where this Ray keeps it elsewhere.

    A replica has imported its module already.
    """
    try:
        from ray.llm._internal.serve.utils.node_initialization_utils import initialize_node
    except ImportError:
        return None
    return initialize_node  # type: ignore[no-any-return]


def replica_name() -> str:
    """Serve's name of the replica that this process is, or an empty text."""
    return (ray.get_runtime_context().get_actor_name() or "") if ray.is_initialized() else ""
