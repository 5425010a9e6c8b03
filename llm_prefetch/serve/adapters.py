"""LoRA adapters on this node: which folder holds the one that a request names.

Ray asks the bucket for an adapter at its first request, on every replica anew. A staged one is an artifact of kind
`adapter`: its name is the adapter's id, or it holds a folder of that name, as `dynamic_lora_loading_path` does.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llm_prefetch.errors import UnsafePathError
from llm_prefetch.live import Bundle, Member, current_bundle, read_bundle
from llm_prefetch.paths import check_relative_path
from llm_prefetch.store import NodeStore
from llm_prefetch.verify import quick_check

CONFIG = "adapter_config.json"
_KIND = "adapter"
_log = logging.getLogger("ray.serve.llm_prefetch")


@dataclass(frozen=True, slots=True)
class StagedAdapter:
    """An adapter that a quick check has found whole."""

    folder: Path
    """Through the bundle, which does not change as `live/` does."""
    bundle: str
    max_length: int | None
    """The longest sequence, where its configuration says one; Ray reads the same field."""


def find_adapter(store: NodeStore, deployment: str, bundle: str, adapter: str) -> StagedAdapter | None:
    """The adapter, from the generation that the replica started with, or from a later one with the same model.

    Args:
        store: The node's store.
        deployment: The name below `live/`.
        bundle: What the replica started with.
        adapter: The adapter's id, such as `my-lora` of the model `llama:my-lora`.
    """
    own = read_bundle(store, bundle)
    if own is None or not _is_folder_name(adapter):
        return None
    generations = [own]
    live = current_bundle(store, deployment)
    later = read_bundle(store, live) if live and live != bundle else None
    if later is not None and _models(later) == _models(own):
        generations.append(later)
    for generation in generations:
        for member, folder in _folders(store, generation, adapter):
            check = quick_check(store, member.name, member.version)
            if check.ready:
                return StagedAdapter(folder, generation.id, _max_length(folder))
            _log.warning(
                "llm-prefetch: the staged adapter %s is %s on this node: %s",
                adapter,
                check.verdict,
                check.reason,
            )
    return None


def _folders(store: NodeStore, bundle: Bundle, adapter: str) -> Iterator[tuple[Member, Path]]:
    for member in bundle.members:
        if member.kind == _KIND:
            base = store.bundle(bundle.id) / member.name
            folder = base if member.name == adapter else base / adapter
            if (folder / CONFIG).is_file():
                yield member, folder


def _models(bundle: Bundle) -> set[tuple[str, str]]:
    return {(member.name, member.version) for member in bundle.members if member.kind == "model"}


def _is_folder_name(adapter: str) -> bool:
    """It comes from a request."""
    try:
        return "/" not in check_relative_path(adapter, "an adapter's id")
    except UnsafePathError:
        return False


def _max_length(folder: Path) -> int | None:
    try:
        found = json.loads((folder / CONFIG).read_bytes()).get("max_length")
    except (OSError, ValueError, AttributeError):
        return None  # vLLM reads the file too, and says what is wrong with it
    return found if isinstance(found, int) else None
