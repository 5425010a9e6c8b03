"""Gives Ray's server an adapter from the node's disk, and leaves it to Ray where none is staged.

`llm_prefetch.serve.server.LLMServer` uses it. Importing this module imports what Ray's own loader does.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray.llm._internal.common.models import global_id_manager
from ray.llm._internal.common.utils.lora_utils import get_lora_id
from ray.llm._internal.serve.core.configs.llm_config import DiskMultiplexConfig
from ray.llm._internal.serve.utils.lora_serve_utils import LoraModelLoader

from llm_prefetch.errors import DiskError
from llm_prefetch.leases import hold
from llm_prefetch.live import DeploymentCheck
from llm_prefetch.serve.adapters import StagedAdapter, find_adapter
from llm_prefetch.serve.ray_api import replica_name
from llm_prefetch.store import NodeStore

_log = logging.getLogger("ray.serve.llm_prefetch")


class StagedAdapterLoader(LoraModelLoader):
    """Looks on this node before Ray's loader asks the bucket."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 (Ray's)
        """As Ray's."""
        super().__init__(*args, **kwargs)
        self._leases: dict[str, int] = {}

    async def load_model_from_config(self, lora_model_id: str, llm_config: Any) -> Any:  # noqa: ANN401 (Ray's)
        """Where the adapter lies, in Ray's terms."""
        generation = started_from(llm_config)
        if generation is None:
            return await super().load_model_from_config(lora_model_id, llm_config)
        adapter, (store, check) = get_lora_id(lora_model_id), generation
        try:
            found = await asyncio.to_thread(find_adapter, store, check.deployment, check.bundle, adapter)
        except OSError as error:  # the disk is no reason not to ask the bucket
            _log.warning("llm-prefetch: cannot look for the adapter %s: %s", adapter, error)
            found = None
        if found is None:
            _log.warning("llm-prefetch: the adapter %s is not staged on this node; Ray downloads it", adapter)
            return await super().load_model_from_config(lora_model_id, llm_config)
        if found.bundle != check.bundle:
            self._lease(store, check.deployment, found)
        _log.info("llm-prefetch: adapter %s from %s", adapter, found.folder)
        return DiskMultiplexConfig(
            model_id=lora_model_id,
            max_total_tokens=found.max_length,
            local_path=str(found.folder),
            lora_assigned_int_id=global_id_manager.next(),
        )

    def _lease(self, store: NodeStore, deployment: str, found: StagedAdapter) -> None:
        """Keep a later generation's files: vLLM reads an adapter again when it has pushed it out of its memory."""
        if found.bundle in self._leases:
            return
        try:
            self._leases[found.bundle] = hold(
                store, found.bundle, deployment=deployment, replica=replica_name()
            )
        except DiskError as error:
            _log.warning("llm-prefetch: using %s without a lease: %s", found.folder, error)


def started_from(llm_config: Any) -> tuple[NodeStore, DeploymentCheck] | None:  # noqa: ANN401 (Ray's LLMConfig)
    """The generation that this replica's engine started with; `None` where it was not staged."""
    callback = llm_config.get_or_create_callback()
    for each in (callback, *(member.value for member in getattr(callback, "members", ()))):
        generation: tuple[NodeStore, DeploymentCheck] | None = getattr(each, "generation", None)
        if generation is not None:
            return generation
    return None
