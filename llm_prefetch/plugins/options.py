"""Parsers and models as they stand in YAML: in the callback's arguments, and in the spec of a plugin artifact."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from llm_prefetch.plugins.names import KINDS, Kind, Plugin, parse_plugin

Entry = str | dict[str, str]
_ANY_ARTIFACT = "artifact"


class PluginNames(BaseModel):
    """`parsers` of the callback: what to register in every process of the engine, or only to check."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    only_files: ClassVar[bool] = False

    reasoning: tuple[Entry, ...] = Field(
        default=(),
        description="Reasoning parsers: my_pkg.parsers:MyParser, my-plugins/my_parser.py:MyParser (a file of the artifact "
        "my-plugins, of kind plugin), one of them under a name {my_name: my_pkg.parsers:MyParser}, or a built-in name.",
    )
    tool: tuple[Entry, ...] = Field(default=(), description="Tool parsers, named in the same ways.")
    models: tuple[Entry, ...] = Field(
        default=(),
        description="Model classes from outside vLLM; the name is the architecture in config.json, else the class's own.",
    )

    @field_validator("reasoning", "tool", "models", mode="before")
    @classmethod
    def _each_of_a_known_form(cls, value: Any) -> Any:  # noqa: ANN401 (whatever the YAML holds)
        if not isinstance(value, list | tuple):
            raise ValueError("not a list")  # noqa: TRY004 (pydantic's)
        for number, entry in enumerate(value):
            try:
                parse_plugin("reasoning", entry, "", inside=_ANY_ARTIFACT if cls.only_files else None)
            except ValueError as error:
                raise ValueError(f"[{number}]: {error}") from error
        return value

    def plugins(self, where: str, *, inside: str | None = None) -> tuple[Plugin, ...]:
        """All of them; `where` is the YAML path of this mapping, `inside` the artifact whose files they are."""
        return tuple(
            parse_plugin(kind, entry, f"{where}.{kind}[{number}]", inside=inside)
            for kind in KINDS
            for number, entry in enumerate(self._of(kind))
        )

    def _of(self, kind: Kind) -> tuple[Entry, ...]:
        entries: tuple[Entry, ...] = getattr(self, kind)
        return entries


class PluginFiles(PluginNames):
    """`plugins` of an artifact: the parsers and models in its files, each tried when it is staged."""

    only_files: ClassVar[bool] = True

    reasoning: tuple[Entry, ...] = Field(
        default=(),
        description="Reasoning parsers, such as my_parser.py:MyParser or {my_name: my_parser.py:MyParser}.",
    )
    tool: tuple[Entry, ...] = Field(default=(), description="Tool parsers, named in the same ways.")
    models: tuple[Entry, ...] = Field(default=(), description="Model classes, named in the same ways.")
