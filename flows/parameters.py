"""The fields that the forms of all flows share. No unions: Prefect's form and its errors stumble over them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

Address = Annotated[
    str,
    Field(
        description="Address of the Ray cluster; empty means RAY_ADDRESS, or the cluster on the worker's machine.",
        json_schema_extra={"position": 90},
    ),
]
Root = Annotated[
    str,
    Field(
        description="Root of the node store on every node; empty leaves it to the nodes' own LLM_PREFETCH_ROOT.",
        json_schema_extra={"position": 91},
    ),
]


def as_path(root: str) -> Path | None:
    """The root that was named, or `None`."""
    return Path(root) if root else None
