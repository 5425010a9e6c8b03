"""Where Ray has put a replica's placement group, and how to get an actor of ours onto one of its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import ray

from llm_prefetch.errors import ClusterError
from llm_prefetch.serve.group_node import NodeActor

if TYPE_CHECKING:
    from llm_prefetch.serve.options import CallbackOptions


class RayPlacement:
    """A placement group."""

    def __init__(self, group: Any, runtime_env: Mapping[str, Any] | None = None) -> None:  # noqa: ANN401 (Ray's)
        """The actors get `runtime_env`, as Ray's own tasks for this replica do."""
        self._group = group
        self._runtime_env = dict(runtime_env or {})

    @cached_property
    def own(self) -> str:
        """Ray's id of the node that this process runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def nodes(self) -> dict[str, str]:
        """The address of each node of the group, and of the own one, by Ray's id; blocks for some milliseconds.

        Raises:
            ClusterError: the group is not placed, or not all of it.
        """
        table = ray.util.placement_group_table(self._group)
        if table.get("state") != "CREATED":
            raise ClusterError(
                f"the placement group is {table.get('state', 'not known')}",
                where=str(table.get("placement_group_id", "")),
                hint="does the cluster have the nodes that it asks for?",
            )
        ids = {self.own, *table["bundles_to_node_id"].values()}
        if len(ids) == 1:
            return {self.own: ""}
        addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
        return {node: addresses.get(node, node) for node in sorted(ids)}

    def join(self, node: str, options: CallbackOptions, replica: str, start: str) -> Any:  # noqa: ANN401
        """A new actor on `node`, which ends when its handle is dropped and with this process at the latest."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        settings: dict[str, Any] = {
            "num_cpus": 0,
            "max_restarts": 0,
            "lifetime": "non_detached",
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        if self._runtime_env:
            settings["runtime_env"] = self._runtime_env
        return self._actor.options(**settings).remote(options, replica, start)

    @cached_property
    def _actor(self) -> Any:  # noqa: ANN401 (made once, as each would be sent to the cluster)
        return ray.remote(NodeActor)
