"""The arguments of `LifecycleCallback`, as they stand in the Serve YAML."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llm_prefetch.errors import SpecError

_YAML_PATH = "callback_config.callback_kwargs"


class MemberOptions(BaseModel):
    """One of the callbacks; the fields are those of Ray's `callback_config`."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    callback_class: str | type = Field(
        description="A callback of Ray's kind, or any class with some of the hooks."
    )
    callback_kwargs: dict[str, Any] = Field(default={}, description="Arguments of the class.")
    raise_error_on_callback: bool = Field(
        default=True, description="Whether its errors end the start; else they are logged."
    )


class LifecycleOptions(BaseModel):
    """`callback_kwargs` of `llm_prefetch.serve.LifecycleCallback`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    callbacks: list[MemberOptions] = Field(min_length=1, description="The callbacks, in order.")


def parse_members(arguments: dict[str, Any]) -> list[MemberOptions]:
    """Check the arguments.

    Raises:
        SpecError: naming the YAML path of the first that does not fit.
    """
    try:
        return LifecycleOptions.model_validate(arguments).callbacks
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join([_YAML_PATH, *(str(part) for part in first["loc"] if part not in ("str", "type"))])
        raise SpecError(
            f"{path}: {first['msg']}",
            where="the Serve YAML",
            hint="each of callbacks has callback_class, callback_kwargs and raise_error_on_callback",
        ) from None  # what was given may hold a secret
