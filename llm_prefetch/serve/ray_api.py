"""Ray's callback classes, from where this Ray keeps them.

Ray's guide documents `ray.serve.llm.callbacks` (ray#61095); Ray 2.60 does not have it and keeps the classes in
`ray.llm._internal.common.callbacks`. The public classes derive from the internal ones, so a subclass of either
works in both. Looking for the file rather than importing keeps `ray.serve.llm`, which imports vLLM, out of a
process that does not need it.
"""

from __future__ import annotations

from pathlib import Path

import ray

if (Path(ray.__file__).parent / "serve" / "llm" / "callbacks.py").is_file():
    from ray.serve.llm.callbacks import CallbackBase
else:
    from ray.llm._internal.common.callbacks.base import CallbackBase

__all__ = ["CallbackBase"]
