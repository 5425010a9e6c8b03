"""The form fields of the flows that boot a replica, and the launch that they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from llm_prefetch.capturing.launch import Launch, read_launch

ServeYaml = Annotated[str, Field(min_length=1, examples=["deployments/serve/tiny-llama-compiled.yaml"])]
Seconds = Annotated[float, Field(gt=0)]


def find_launch(serve_yaml: str, application: str, model: str) -> Launch:
    """What the fields mean.

    Raises:
        SpecError: the YAML does not say so.
    """
    return read_launch(Path(serve_yaml), application, model)
