"""vLLM's own list of what its key was made of, without the values that are nobody's business.

Where the piecewise backend compiles, vLLM writes `cache_key_factors.json` beside the result: every environment variable
that it knows, with its value, and three hashes. The file itself never leaves the node. What is harmless stays readable
in ours; of anything else there is a hash, which is equal for equal values and says nothing more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from llm_prefetch.caches.evidence import PIECES
from llm_prefetch.manifest import canonical_json
from llm_prefetch.store import read_json

VLLMS_FILE = "cache_key_factors.json"
OURS_FILE = "key-factors.json"
"""At the top of a captured cache: the factors of each folder of the piecewise backend, by its name."""

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
_HARMLESS = re.compile(r"^-?\d{1,8}(\.\d{1,4})?$|^[A-Za-z][A-Za-z_]{0,23}$|^$")
_HASHES = ("config_hash", "code_hash", "compiler_hash")

Factors = dict[str, Any]
"""`env`, by the name of the variable, and vLLM's hashes of its configuration, the traced sources and the compiler."""


def read_factors(root: Path) -> dict[str, Factors]:
    """The factors of all folders of the piecewise backend below the cache root; of one rank, as all have the same."""
    found: dict[str, Factors] = {}
    for path in sorted((root / PIECES).glob(f"*/rank_*/*/{VLLMS_FILE}")):
        body = None if path.is_symlink() else read_json(path)
        if isinstance(body, Mapping):
            found.setdefault(path.relative_to(root / PIECES).parts[0], shown(body))
    return found


def shown(body: Mapping[str, Any]) -> Factors:
    """One of vLLM's lists, fit to be published."""
    environment = body.get("env")
    env = environment.items() if isinstance(environment, Mapping) else ()
    return {
        "env": {str(name): _shown(str(name), value) for name, value in env},
        **{name: str(body[name]) for name in _HASHES if isinstance(body.get(name), str)},
    }


def _shown(name: str, value: Any) -> Any:  # noqa: ANN401 (JSON)
    if value is None or (isinstance(value, bool | int | float) and not _SECRET.search(name)):
        return value
    if isinstance(value, str) and _HARMLESS.match(value) and not _SECRET.search(name):
        return value
    return f"blake3:{blake3(canonical_json(value)).hexdigest()[:16]}"
