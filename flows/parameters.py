"""What the forms of several flows share.

Prefect takes the text of a field from the docstring of its flow and the place from the order of its parameters. No
unions: the form and its errors stumble over them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from llm_prefetch.paths import NAME_PATTERN
from llm_prefetch.spec import NodeSelector

Deployment = Annotated[str, Field(pattern=NAME_PATTERN, examples=["llama-3-8b"])]
EVERY_NODE = NodeSelector()


def as_path(root: str) -> Path | None:
    """The root that was named, or `None`."""
    return Path(root) if root else None
