"""How a parser or a model is named: built in, by import string, or by a file of a staged artifact.

    deepseek_r1                           built into vLLM; only checked
    my_pkg.parsers:MyParser               a class of an installed module
    my-plugins/my_parser.py:MyParser      a class in a file of the artifact `my-plugins`, of kind `plugin`
    {my_name: my_pkg.parsers:MyParser}    any of the last two under a name of its own

Without a name of its own a class is registered as vLLM would: under the names that its module gives it with
vLLM's decorator, else under its own name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["reasoning", "tool", "models"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PACKAGE = "llm_prefetch_plugins"
"""The package as whose modules the files of artifacts are imported."""

_WORD = "[A-Za-z_][A-Za-z0-9_]*"
_NAME = re.compile("[A-Za-z0-9_][A-Za-z0-9_-]*")
_FILE = re.compile(rf"((?:{_WORD}/)*{_WORD})\.py:({_WORD})")
_IN_ARTIFACT = re.compile(rf"([A-Za-z0-9][A-Za-z0-9._-]{{0,127}})/{_FILE.pattern}")
_IN_MODULE = re.compile(rf"({_WORD}(?:\.{_WORD})*):({_WORD})")


@dataclass(frozen=True, slots=True)
class Plugin:
    """One parser or model as the user names it."""

    kind: Kind
    where: str
    """The YAML path that names it."""
    name: str = ""
    """What the engine looks it up by; empty: what its module or its class says."""
    artifact: str = ""
    """The artifact that its file is in; empty: none."""
    path: str = ""
    """The file's path in that artifact."""
    module: str = ""
    """What to import; empty: it is built into vLLM."""
    class_name: str = ""

    @property
    def target(self) -> str:
        """The class as the user wrote it."""
        return (
            f"{self.artifact}/{self.path}:{self.class_name}"
            if self.artifact
            else f"{self.module}:{self.class_name}"
        )


def parse_plugin(kind: Kind, entry: object, where: str, *, inside: str | None = None) -> Plugin:
    """Read one entry of a list of parsers or models.

    Args:
        kind: Which list.
        entry: A string, or a mapping of one name to a string.
        where: The entry's YAML path.
        inside: The artifact that the files belong to; then only files may be named, without their artifact.

    Raises:
        ValueError: the entry has none of the forms; the message says which one it is nearest to.
    """
    name = ""
    if isinstance(entry, dict) and len(entry) == 1:
        [(name, entry)] = entry.items()
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot be a name: use letters, digits, '_' and '-'")
    if not isinstance(entry, str):
        raise ValueError(f"{entry!r} is not a string, nor a mapping of one name to one")  # noqa: TRY004 (pydantic's)
    if inside is not None:
        found = _FILE.fullmatch(entry)
        if not found:
            raise ValueError(f"{entry!r} names no class of a file: write my_parser.py:MyParser")
        return _in_file(kind, where, name, inside, found[1], found[2])
    if found := _IN_ARTIFACT.fullmatch(entry):
        return _in_file(kind, where, name, found[1], found[2], found[3])
    if (found := _IN_MODULE.fullmatch(entry)) and not _FILE.fullmatch(entry):
        return Plugin(kind, where, name, module=found[1], class_name=found[2])
    if not name and _NAME.fullmatch(entry):
        return Plugin(kind, where, entry)
    raise ValueError(f"{entry!r} {_nearest(entry)}")


def _in_file(kind: Kind, where: str, name: str, artifact: str, stem: str, class_name: str) -> Plugin:
    module = f"{package_of(artifact)}.{stem.replace('/', '.')}"
    return Plugin(kind, where, name, artifact, f"{stem}.py", module, class_name)


def _nearest(entry: str) -> str:
    if _FILE.fullmatch(entry):
        return f"does not say which artifact: write ARTIFACT/{entry}"
    if entry.endswith(".py"):
        return f"names no class: write {entry}:MyClass"
    if ":" not in entry and "." in entry:
        module, _, name = entry.rpartition(".")
        return f"names no class: write {module}:{name}"
    return "is not a built-in name, my_pkg.module:MyClass or artifact/file.py:MyClass"


def package_of(artifact: str) -> str:
    """The package that stands for an artifact's folder; no two artifacts have the same."""
    escaped = re.sub("[^A-Za-z0-9]", lambda found: f"_{ord(found[0]):02x}", artifact)
    return f"{PACKAGE}.{escaped}"
