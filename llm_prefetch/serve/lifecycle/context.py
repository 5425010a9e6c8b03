"""What the hooks read and change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llm_prefetch.serve.ray_api import CallbackCtx


@dataclass
class NodeInitializationContext(CallbackCtx):
    """Ray's context and more; one object for all hooks of one replica start.

    New fields always have defaults, so that a callback written for fewer keeps working. Inherited from Ray:
    `worker_node_download_model`, `placement_group`, `runtime_env` (of the download and the engine-config tasks),
    `custom_data` (for the callbacks themselves) and `run_init_node` (whether Ray downloads).
    """

    llm_config: Any = None
    """Ray's LLMConfig; to be read."""
    local_node_download_model: Any = None
    """What to download on the replica's own node, if not what `worker_node_download_model` says: a
    `NodeModelDownloadable`, or its name. Set it before or in `on_pre_download`."""
    download_result: str | None = None
    """Where the engine loads from, a path or a Hub id; known from `on_post_download` on."""
    extra_init_kwargs: dict[str, Any] = field(default_factory=dict)
    """Merged into `engine_kwargs`. Those that shape the placement group (tensor_parallel_size) must be set in
    `on_pre_initialization` or `on_pre_placement_group`, the others at the latest in `on_pre_engine_init`."""
    replica_node_id: str = ""
    """Ray's id of the node that the replica runs on."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Ray pickles this into a task on each node of the placement group and reads what to download there.

        Its own `initialize_remote_node` knows only `worker_node_download_model` (Ray 2.60,
        `llm/_internal/serve/utils/node_initialization_utils.py`), so that is what tells the replica's node apart.
        """
        self.__dict__.update(state)
        if self.local_node_download_model is not None and _this_node() == self.replica_node_id:
            self.worker_node_download_model = self.local_node_download_model


def _this_node() -> str:
    import ray

    return ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
