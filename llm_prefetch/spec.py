"""SPEC: what a deployment launches with, where it comes from and on which nodes it must lie.

The Pydantic models here are the edge of the program: YAML files, `prefect deploy` parameters and JSON all
enter through them. The constraints sit in the JSON schema (pattern, enum, minimum), because Prefect rejects
a bad parameter at submission only when the schema says so.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from llm_prefetch.errors import SpecError
from llm_prefetch.paths import NAME_PATTERN
from llm_prefetch.plugins.options import PluginFiles
from llm_prefetch.redact import redact_text

Kind = Literal["model", "compile-cache", "adapter", "plugin", "files"]
Transport = Literal["auto", "fsspec"]
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
_URI_PATTERN = r"^[a-z][a-z0-9+.-]*://.+"
_BYTES = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMGT]i?)?B/s$")
_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}

VERSION_PATTERN = r"^b3-[0-9a-f]{64}$"
KEY_PATTERN = r"^ed25519:[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=$"  # 32 bytes in base64
_MIN_READY_PATTERN = r"^(all|[1-9]\d*|(100|[1-9]?\d)%)$"
_IN_WORDS = {
    NAME_PATTERN: "a name of letters, digits, '.', '_' and '-'",
    _URI_PATTERN: "a URI such as s3://bucket/prefix",
    _BYTES.pattern: "a rate such as 2GB/s or 500MB/s",
    VERSION_PATTERN: "a version: b3- and 64 hexadecimal digits",
    KEY_PATTERN: "a public key: ed25519: and its 32 bytes in base64, 44 characters",
    _MIN_READY_PATTERN: "all, a number from 1, or a percentage such as 80%",
}
_SHOWN_CHARACTERS = 80


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Artifact(_Strict):
    """A named set of files at one origin."""

    name: Name = Field(
        description="Name of the artifact; the last part of the engine path.", examples=["weights"]
    )
    kind: Kind = Field(default="model", description="What the files are for.")
    uri: str = Field(
        pattern=_URI_PATTERN,
        description="Where the bytes come from: a prefix such as s3://bucket/models/llama-3-8b or file:///mnt/models/x, "
        "gs://bucket/x, abfss://container@account.dfs.core.windows.net/x, az://container/x; "
        "a model of the Hub such as hf://org/repo@revision; a published folder or a single file at https://host/path; "
        "or any other URL that fsspec knows, such as sftp://host/folder.",
    )
    transport: Transport = Field(
        default="auto",
        description="How the bytes are read. auto: by the quickest way for the scheme. fsspec: by its file system for "
        "it (s3fs, gcsfs, adlfs, ...), which is slower, for what only that one can do.",
    )
    version: str | None = Field(
        default=None,
        pattern=VERSION_PATTERN,
        description="Pin: stage exactly this version (b3-...) or fail. Empty: what the origin holds now. "
        "Artifacts of kind plugin and compile-cache are code, and need it, or a signature by one of policy.trusted_keys.",
    )
    include: list[str] = Field(
        default=[], description="Only paths that match one of these patterns. Empty: all."
    )
    exclude: list[str] = Field(default=[], description="Leave out paths that match one of these patterns.")
    link: str | None = Field(
        default=None,
        pattern=r"^/.*[^/]$",
        description="An absolute path that shall lead to the files too, for what looks in one fixed place.",
        examples=["/home/ray/.cache/tokenizers/llama-3-8b"],
    )
    plugins: PluginFiles | None = Field(
        default=None,
        description="Of an artifact of kind plugin: the parsers and models in its files. Each is imported and tried on "
        "each node that has vLLM, before anything is switched.",
        examples=[{"reasoning": ["my_parser.py:MyParser"]}],
    )
    required: bool = Field(
        default=False,
        description="Of an artifact of kind compile-cache: fail where it is not trusted or does not fit the node. Else it is "
        "left out there, and replicas compile for themselves.",
    )

    @property
    def code(self) -> bool:
        """Whether its files are run, so that something has to vouch for them."""
        return self.kind in ("plugin", "compile-cache")

    @property
    def pinned(self) -> bool:
        """Whether it is code, and of a version that is trusted."""
        return self.code and self.version is not None

    @model_validator(mode="after")
    def _required_caches(self) -> Artifact:
        if self.required and self.kind != "compile-cache":
            raise ValueError(
                f"required: {self.name!r} is of kind {self.kind}, which is never left out; only a compile-cache is"
            )
        return self

    @model_validator(mode="after")
    def _plugins_in_plugins(self) -> Artifact:
        if self.plugins is not None and self.kind != "plugin":
            raise ValueError(
                f"plugins: {self.name!r} is of kind {self.kind}; only an artifact of kind plugin holds any"
            )
        return self


class NodeSelector(_Strict):
    """Which Ray nodes to stage on; a node must satisfy everything that is given."""

    labels: dict[str, str] = Field(default={}, description="Ray node labels that must be equal.")
    resources: dict[str, float] = Field(
        default={}, description="Resources a node must have at least, e.g. GPU: 1."
    )
    ids: list[str] = Field(default=[], description="Ray node ids, IP addresses or host names. Empty: any.")


class Policy(_Strict):
    """How to stage, and when a run counts as done."""

    bandwidth: str | None = Field(
        default=None,
        pattern=_BYTES.pattern,
        description="Most bytes per second on one node, such as 2GB/s or 500MB/s.",
    )
    run_bandwidth: str | None = Field(
        default=None,
        pattern=_BYTES.pattern,
        description="Most bytes per second over all nodes of one run together; those at work share it equally.",
    )
    deadline_seconds: float | None = Field(
        default=None,
        gt=0,
        description="Seconds until a node gives up; what it has is kept. Empty: no deadline.",
    )
    min_ready: str = Field(
        default="all",
        pattern=_MIN_READY_PATTERN,
        description="Nodes that must be ready for success: all, a number, or a percentage such as 80%.",
    )
    make_room: bool = Field(
        default=True,
        description="Where it does not fit, delete what nothing needs, oldest first and no more than necessary: versions "
        "that are not live, not in use by a replica, not pinned and not what a rollback goes to, and unfinished work.",
    )
    trusted_keys: list[Annotated[str, Field(pattern=KEY_PATTERN)]] = Field(
        default=[],
        description="Public keys. Code (kind plugin or compile-cache) that one of them has signed needs no pinned version.",
        examples=[["ed25519:+HahwM+4p5Ij9jUudnPWOCf90qq4Jn4PqHGXgP4YQDs="]],
    )

    @field_validator("min_ready", mode="before")
    @classmethod
    def _number_as_text(cls, value: object) -> object:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("bandwidth", "run_bandwidth")
    @classmethod
    def _some_bandwidth(cls, value: str | None) -> str | None:
        if value is not None and not float(value.rstrip("KMGTiB/s ")):
            raise ValueError("nothing would ever arrive; leave it out for no limit")
        return value

    @property
    def bytes_per_second(self) -> float | None:
        """The bandwidth cap of one node in bytes per second; `None` without one."""
        return _bytes_per_second(self.bandwidth)

    @property
    def run_bytes_per_second(self) -> float | None:
        """The bandwidth cap of all nodes of a run in bytes per second; `None` without one."""
        return _bytes_per_second(self.run_bandwidth)

    def needed(self, nodes: int) -> int:
        """How many of `nodes` nodes must be ready."""
        if self.min_ready == "all":
            return nodes
        if self.min_ready.endswith("%"):
            return -(-nodes * int(self.min_ready[:-1]) // 100)
        return int(self.min_ready)


class Spec(_Strict):
    """One deployment: the artifacts it launches with, the nodes that need them and the policy."""

    deployment: Name = Field(
        description="Name of the deployment: its replicas read `ROOT/live/DEPLOYMENT`.",
        examples=["llama-3-8b"],
    )
    artifacts: list[Artifact] = Field(min_length=1, description="What a replica needs on its node.")
    nodes: NodeSelector = Field(
        default=NodeSelector(), description="Which Ray nodes; empty means every node."
    )
    policy: Policy = Field(default=Policy(), description="Bandwidth and what counts as success.")

    @field_validator("artifacts")
    @classmethod
    def _unique_names(cls, artifacts: list[Artifact]) -> list[Artifact]:
        seen: set[str] = set()
        for artifact in artifacts:
            if artifact.name in seen:
                raise ValueError(f"two artifacts are named {artifact.name!r}; give each its own name")
            seen.add(artifact.name)
        return artifacts

    @field_validator("artifacts")
    @classmethod
    def _unique_links(cls, artifacts: list[Artifact]) -> list[Artifact]:
        seen: dict[Path, str] = {}
        for artifact in artifacts:
            if artifact.link:
                first = seen.setdefault(Path(artifact.link), artifact.name)
                if first != artifact.name:
                    raise ValueError(f"{first!r} and {artifact.name!r} have the same link; give each its own")
        return artifacts


def _bytes_per_second(rate: str | None) -> float | None:
    if rate is None:
        return None
    number, unit = _BYTES.fullmatch(rate).groups()  # type: ignore[union-attr]  # the schema checked it
    return float(number) * _UNITS[unit or ""]


def load_spec(source: str) -> Spec:
    """Read a SPEC from a YAML (or JSON) file, or from standard input when `source` is `-`.

    Raises:
        SpecError: the file cannot be read, is not YAML, or does not fit the schema.
    """
    where = "standard input" if source == "-" else source
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise SpecError(
            f"cannot read the spec: {reason}", where=where, hint="name a YAML file, or - for stdin"
        ) from error
    try:
        data = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 (a SafeLoader that also refuses duplicate keys)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that does not exist
        raise SpecError(
            f"the spec is not YAML: {_one_line(error)}", where=where, hint="mend the line it names"
        ) from None  # it quotes the lines around, which may hold a secret
    return parse_spec(data, where)


def parse_spec(data: object, where: str) -> Spec:
    """Check `data` against the schema.

    Raises:
        SpecError: naming the first field that does not fit.
    """
    if not isinstance(data, dict):
        raise SpecError(
            "the spec is not a mapping", where=where, hint="it needs 'deployment:' and 'artifacts:'"
        )
    try:
        return Spec.model_validate(data)
    except ValidationError as error:
        # Not with its cause, which repeats what was given: that may hold a secret.
        raise SpecError(explain(error), where=where, hint="see docs/reference/spec.md") from None


def explain(error: ValidationError) -> str:
    """One line out of a Pydantic error: the field and what is wrong with it, and how many more there are."""
    details = error.errors(include_url=False)
    first = details[0]
    kind, message = first["type"], first["msg"].removeprefix("Value error, ")
    if kind == "string_pattern_mismatch":
        message = f"not {_IN_WORDS.get(first['ctx']['pattern'], 'of the form ' + first['ctx']['pattern'])}"
    else:
        message = {"missing": "is missing", "extra_forbidden": "there is no such field"}.get(kind, message)
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    given = first.get("input")
    shown = f", given {_short(given)}" if isinstance(given, str | int | float) else ""
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return f"{field or 'spec'}: {message}{shown}{more}"


def _short(given: object) -> str:
    text = repr(redact_text(given) if isinstance(given, str) else given)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _one_line(error: Exception) -> str:
    """What is wrong and where, without the lines around it, which may hold secrets."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    text = f"{problem}, line {mark.line + 1}, column {mark.column + 1}" if mark and problem else str(error)
    return redact_text(" ".join(text.split()))


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML lets the second of two equal keys win silently; a spec must not."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=deep)
            if not isinstance(key, Hashable):
                continue  # the base class says so in its own words
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} occurs twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)
