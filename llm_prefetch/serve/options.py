"""The arguments of the callback, as they stand in the Serve YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from llm_prefetch.errors import SpecError
from llm_prefetch.paths import NAME_PATTERN

_YAML_PATH = "callback_config.callback_kwargs"
Rung = Literal["ray", "fail"]


class CallbackOptions(BaseModel):
    """`callback_kwargs` of `llm_prefetch.serve.PrefetchCallback`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    deployment: str = Field(
        pattern=NAME_PATTERN.replace("^", "^([A-Za-z0-9][A-Za-z0-9._-]{0,127}/)?", 1),
        description="The deployment of the staging flow, such as stage/llama-3-8b; its last part names live/<deployment>.",
    )
    on_miss: Annotated[tuple[Rung, ...], Field(min_length=1)] = Field(
        default=("ray",),
        description="What to do when the node is not ready: `ray` lets Ray download, `fail` stops the replica.",
    )
    model: str | None = Field(
        default=None,
        pattern=NAME_PATTERN,
        description="The artifact that the engine loads; needed only when the bundle holds several of kind model.",
    )
    root: Path | None = Field(default=None, description="Root of the node store; else LLM_PREFETCH_ROOT.")

    @field_validator("on_miss")
    @classmethod
    def _one_last_rung(cls, rungs: tuple[Rung, ...]) -> tuple[Rung, ...]:
        if len(rungs) != 1:
            raise ValueError("name one of ray and fail: each of them ends the ladder")
        return rungs

    @property
    def live_name(self) -> str:
        """The name below `live/`."""
        return self.deployment.rpartition("/")[2]


def parse_options(arguments: dict[str, Any]) -> CallbackOptions:
    """Check the arguments.

    Raises:
        SpecError: naming the YAML path of the first that does not fit.
    """
    try:
        return CallbackOptions.model_validate(arguments)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join([_YAML_PATH, *map(str, first["loc"])])
        raise SpecError(
            f"{path}: {first['msg'].removeprefix('Value error, ')}",
            where="the Serve YAML",
            hint=f"known: {', '.join(CallbackOptions.model_fields)}",
        ) from error
