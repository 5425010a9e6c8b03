"""Which deployment of Ray Serve gets more replicas, how many, and how long that may take: the form of a scale-up."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

_Amount = Annotated[float, Field(gt=0)]


class ServeTarget(BaseModel):
    """The deployment to scale; exactly one of `replicas` and `add` is given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    application: str = Field(
        min_length=1, description="Name of the application in Ray Serve.", examples=["llm"]
    )
    deployment: str = Field(
        min_length=1,
        description="Name of the deployment in it. Ray Serve LLM calls it LLMServer: and the model id, with -- for / "
        "and _ for a dot.",
        examples=["LLMServer:llama-3-8b"],
    )
    replicas: int = Field(
        default=0,
        ge=0,
        description="Replicas that there shall be at least: repeating the run changes nothing, and none is ever taken "
        "away. Exactly one of replicas and add is more than 0.",
    )
    add: int = Field(
        default=0,
        ge=0,
        description="Replicas on top of those that Serve is asked for when the run begins; repeating the run adds "
        "again. Exactly one of replicas and add is more than 0.",
    )
    shape: dict[str, _Amount] = Field(
        default={},
        description="What one replica takes of a node, such as GPU: 1. Empty: what Serve says that it takes.",
        examples=[{"GPU": 1}],
    )
    request_nodes: bool = Field(
        default=True,
        description="Ask Ray's autoscaler for the nodes that are missing. Off: only wait until they join.",
    )
    require_hit: bool = Field(
        default=True,
        description="Fail unless each new replica tells, in its node's ledger, that it started from what was staged. "
        "Off: for deployments without our callback.",
    )
    require_proof: bool = Field(
        default=False,
        description="Leave Serve as it is unless the flow prove has shown, on each node, that engines find the compile "
        "cache that is staged there.",
    )
    node_seconds: float = Field(
        default=900, ge=0, description="Seconds to wait for nodes; Serve is not touched when they pass."
    )
    replica_seconds: float = Field(
        default=1800, gt=0, description="Seconds from the scaling until all replicas run."
    )
    dashboard: str = Field(
        default="",
        pattern=r"^(https?://[^/\s]+.*)?$",
        description="Address of Ray's dashboard. Empty: RAY_DASHBOARD_ADDRESS, or what the cluster itself says.",
        examples=["http://10.0.0.1:8265"],
    )

    @model_validator(mode="after")
    def _one_number(self) -> ServeTarget:
        if bool(self.replicas) == bool(self.add):
            raise ValueError("give exactly one of replicas (at least so many) and add (so many more)")
        return self

    def wanted(self, now: int) -> int:
        """How many replicas there shall be where Serve is asked for `now`; never fewer."""
        return now + self.add if self.add else max(now, self.replicas)
