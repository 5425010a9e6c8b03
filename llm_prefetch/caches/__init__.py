"""Compile caches: what one was built for, whether it fits here, and how it gets to where vLLM reads it.

What vLLM makes of one, and why it misses, is here too: `evidence`, `explain`, `proof`; and from a start's leftovers to
what is published: `harvest`.
"""

from __future__ import annotations

KIND = "compile-cache"
"""Of the artifacts that hold one."""
