"""What the forms of several flows share.

Prefect takes the text of a field from the docstring of its flow and the place from the order of its parameters. It
shows that text as Markdown, and takes `<...>` in it for HTML. The form and its errors stumble over unions. The only ones
are "a value or nothing", which is shown as a field that may stay empty, and the entries of a plugin artifact's lists, a
text or `{name: text}`.
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
