"""The form fields of the flows that boot a replica, and the launch that they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from llm_prefetch.cluster.launch import Launch, read_launch

ServeYaml = Annotated[
    str,
    Field(
        min_length=1,
        description="Path of the Serve YAML on the worker's machine, the one that `serve deploy` is given; a relative one "
        "is below the flow's working directory.",
        examples=["deployments/serve/llama-3-8b.yaml"],
    ),
]
Application = Annotated[str, Field(description="The application; needed only if the YAML holds several.")]
Model = Annotated[str, Field(description="The model_id; needed only if the application serves several.")]
Seconds = Annotated[float, Field(gt=0, description="For the start of a replica.")]


def find_launch(serve_yaml: str, application: str, model: str) -> Launch:
    """What the fields mean.

    Raises:
        SpecError: the YAML does not say so.
    """
    return read_launch(Path(serve_yaml), application, model)
