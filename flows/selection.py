"""What flows take that begin with a deployment that is staged already: which one, on which nodes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from llm_prefetch.paths import NAME_PATTERN
from llm_prefetch.spec import NodeSelector

Deployment = Annotated[str, Field(pattern=NAME_PATTERN, examples=["llama-3-8b"])]
EVERY_NODE = NodeSelector()
