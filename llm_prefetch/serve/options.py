"""The arguments of the callback, as they stand in the Serve YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from llm_prefetch.errors import SpecError
from llm_prefetch.names import is_uuid
from llm_prefetch.paths import NAME_PATTERN
from llm_prefetch.plugins.options import PluginNames

_YAML_PATH = "callback_config.callback_kwargs"
_FLOW_AND_NAME = NAME_PATTERN.replace("^", "^([A-Za-z0-9][A-Za-z0-9._-]{0,127}/)?", 1)
Rung = Literal["wait", "prefect", "stage", "ray", "fail"]
_LAST: tuple[Rung, ...] = ("ray", "fail")
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Deadlines(BaseModel):
    """How many seconds each rung has, and the check of the nodes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    check: _Seconds = Field(
        default=120,
        description="For the check of the other nodes of a placement group. The first one waits for a new process on each, "
        "and for the runtime_env; the next ones have at most 30.",
    )
    wait: _Seconds = Field(default=600, description="For a staging in progress on this node.")
    prefect: _Seconds = Field(
        default=900, description="For the flow run, from the first question to its end."
    )
    stage: _Seconds = Field(default=1800, description="For staging in the replica.")
    ray: _Seconds = Field(default=3600, description="For Ray's own download and its check.")


class PrefectOptions(BaseModel):
    """How the replica reaches Prefect. Secrets are better kept in the environment than in a YAML file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    deployment: str | None = Field(
        default=None,
        description="The Prefect deployment as flow/deployment or by its UUID, if `deployment` above does not name it.",
    )
    api_url: str | None = Field(
        default=None,
        pattern=r"^https?://.+",
        description="The API, such as http://prefect:4200/api; else PREFECT_API_URL.",
    )
    api_key: SecretStr | None = Field(
        default=None, description="Key for Prefect Cloud; else PREFECT_API_KEY."
    )
    auth_string: SecretStr | None = Field(
        default=None,
        description="user:password of a server with basic authentication; else PREFECT_API_AUTH_STRING.",
    )

    @field_validator("deployment")
    @classmethod
    def _flow_and_name_or_id(cls, name: str | None) -> str | None:
        if name is not None and not is_uuid(name) and not all(name.partition("/")):
            raise ValueError("neither flow/deployment nor a UUID")
        return name


class CallbackOptions(BaseModel):
    """`callback_kwargs` of `llm_prefetch.serve.PrefetchCallback`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    deployment: str = Field(
        pattern=_FLOW_AND_NAME,
        description="The deployment of the staging flow, such as stage/llama-3-8b, whose last part names live/<deployment>; "
        "or its UUID, which a node knows once a run of it has staged there.",
    )
    on_miss: Annotated[tuple[Rung, ...], Field(min_length=1)] = Field(
        default=("wait", "ray"),
        description="What to do when the node is not ready, in this order: `wait` for a staging in progress on this node, "
        "run the deployment in `prefect`, `stage` here, and at the end let `ray` download or `fail`.",
    )
    deadlines: Deadlines = Field(default=Deadlines(), description="Seconds for each rung; see below.")
    budget_seconds: _Seconds = Field(
        default=3000,
        description="Seconds for the whole ladder. Ray gives the start of an engine, of which this is a part, 3600 s "
        "(RAYLLM_ENGINE_START_TIMEOUT_S).",
    )
    spec: dict[str, Any] | str | None = Field(
        default=None,
        description="What the rung `stage` stages, and what the rung `ray` commits of it for the next replica: a SPEC, or "
        "the absolute path of a SPEC file on every node.",
    )
    prefect: PrefectOptions = Field(
        default=PrefectOptions(), description="How the rung `prefect` reaches the server; see below."
    )
    model: str | None = Field(
        default=None,
        pattern=NAME_PATTERN,
        description="The artifact that the engine loads; needed only when the bundle holds several of kind model.",
    )
    parsers: PluginNames | None = Field(
        default=None, description="Parsers and models that are not vLLM's own; see below."
    )
    root: Path | None = Field(default=None, description="Root of the node store; else LLM_PREFETCH_ROOT.")

    @field_validator("on_miss")
    @classmethod
    def _ends_in_one_last_rung(cls, rungs: tuple[Rung, ...]) -> tuple[Rung, ...]:
        if len(set(rungs)) != len(rungs):
            raise ValueError("each rung may stand there once")
        if [rung for rung in rungs if rung in _LAST] != [rungs[-1]]:
            raise ValueError("end it with one of ray and fail: each of them ends the ladder")
        return rungs

    @field_validator("spec")
    @classmethod
    def _fits_its_schema(cls, spec: dict[str, Any] | str | None) -> dict[str, Any] | str | None:
        if isinstance(spec, str) and not Path(spec).is_absolute():
            raise ValueError("not an absolute path; it is read on the replica's node")
        if isinstance(spec, dict):
            from llm_prefetch.spec import parse_spec

            try:
                parse_spec(spec, _YAML_PATH)
            except SpecError as error:
                raise ValueError(error.message) from error
        return spec

    @model_validator(mode="after")
    def _rungs_have_what_they_need(self) -> CallbackOptions:
        if "stage" in self.on_miss and self.spec is None:
            raise ValueError(
                "spec: on_miss names `stage`, so say what to stage: a SPEC, or the path of a SPEC file"
            )
        if isinstance(self.spec, dict) and not self.by_id and self.spec["deployment"] != self.live_name:
            raise ValueError(f"spec.deployment: {self.spec['deployment']!r} is not {self.live_name!r}")
        if (
            "prefect" in self.on_miss
            and "/" not in self.prefect_deployment
            and not is_uuid(self.prefect_deployment)
        ):
            raise ValueError(
                "deployment: on_miss names `prefect`, so write it as flow/deployment, such as stage/llama-3-8b"
            )
        return self

    @property
    def by_id(self) -> bool:
        """Whether `deployment` is a UUID."""
        return is_uuid(self.deployment)

    @property
    def live_name(self) -> str:
        """The name below `live/`, as far as the arguments alone tell: of a UUID, the node store knows it."""
        if self.by_id and isinstance(self.spec, dict):
            return str(self.spec["deployment"])
        return self.deployment.rpartition("/")[2]

    @property
    def prefect_deployment(self) -> str:
        """`flow/deployment` or a UUID."""
        return self.prefect.deployment or self.deployment


def parse_options(arguments: dict[str, Any]) -> CallbackOptions:
    """Check the arguments.

    Raises:
        SpecError: naming the YAML path of the first that does not fit.
    """
    try:
        return CallbackOptions.model_validate(arguments)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join([_YAML_PATH, *map(str, first["loc"])])
        message = first["msg"].removeprefix("Value error, ")
        raise SpecError(
            # What a rung needs is seen with all arguments at hand, so that message begins with the argument's name.
            f"{path}: {message}" if first["loc"] else f"{path}.{message}",
            where="the Serve YAML",
            hint=f"known: {', '.join(CallbackOptions.model_fields)}",
        ) from None  # what was given may hold a secret
