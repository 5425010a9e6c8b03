"""Import the files of a staged artifact as modules, in whichever process asks for them.

An artifact's folder becomes the package `llm_prefetch_plugins.<artifact>`, found by a finder of ours. So the
modules can be imported late and by name, as vLLM's lazy registries do; they can be pickled by reference; and
one file can import another with `from . import`.

Nothing is written into the artifact and no compiled file is taken from it: a `__pycache__` would change the
folder, and the quick check would rightly call it `CORRUPT`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from llm_prefetch.errors import PluginError
from llm_prefetch.plugins.names import PACKAGE, Plugin, package_of


def mount(folders: Mapping[str, str]) -> None:
    """Let the files of these artifacts be imported: a folder for each name. May be called again."""
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)
    for artifact, folder in folders.items():
        package = package_of(artifact)
        if _finder.folders.get(package) != Path(folder):
            _finder.folders[package] = Path(folder)
            for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
                del sys.modules[name]


def load_class(plugin: Plugin) -> type:
    """Import the class that `plugin` names.

    Raises:
        PluginError: the module is not there, raises, or has no such class.
    """
    check_found(plugin)
    try:
        module = importlib.import_module(plugin.module)
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{plugin.where}: {plugin.target} cannot be imported: {type(error).__name__}: {error}",
            where=_place(plugin),
            hint="mend the module, publish it, and stage its new version",
        ) from error
    found = getattr(module, plugin.class_name, None)
    if not isinstance(found, type):
        raise PluginError(
            f"{plugin.where}: {plugin.target}: there is no class {plugin.class_name}",
            where=_place(plugin),
            hint=f"it has {', '.join(_classes_of(module)) or 'no class at all'}",
        )
    return found


def check_found(plugin: Plugin) -> None:
    """Look for the module without running it.

    Raises:
        PluginError: it is not on this node.
    """
    try:
        spec = importlib.util.find_spec(plugin.module)
    except (ImportError, ValueError):  # a parent is missing, or not a package
        spec = None
    if spec is None:
        where = f"no file {plugin.path}" if plugin.artifact else f"no module {plugin.module}"
        hint = (
            f"stage the artifact {plugin.artifact} with that file, or name one that it has"
            if plugin.artifact
            else "install it on every node of the replica, or stage it as an artifact of kind plugin"
        )
        raise PluginError(
            f"{plugin.where}: {plugin.target}: {where} on this node", where=_place(plugin), hint=hint
        )


def _place(plugin: Plugin) -> str:
    folder = _finder.folders.get(package_of(plugin.artifact)) if plugin.artifact else None
    return str(folder / plugin.path) if folder else plugin.module


def _classes_of(module: ModuleType) -> list[str]:
    return sorted(
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__
    )


class _SourceOnly(SourceFileLoader):
    """Compiles the source each time: no compiled file is read or written."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


class _Finder:
    """Finds `llm_prefetch_plugins.<artifact>` and what is below it in the artifacts' folders."""

    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname.partition(".")[0] != PACKAGE:
            return None
        if fullname == PACKAGE:
            return ModuleSpec(fullname, None, is_package=True)
        _, artifact, *below = fullname.split(".")
        folder = self.folders.get(f"{PACKAGE}.{artifact}")
        if folder is None:
            return None
        place = folder.joinpath(*below)
        if place.is_dir():
            init = place / "__init__.py"
            return _module(fullname, init) if init.is_file() else ModuleSpec(fullname, None, is_package=True)
        file = place.with_name(f"{place.name}.py")
        return _module(fullname, file) if file.is_file() else None


def _module(name: str, file: Path) -> ModuleSpec | None:
    spec = importlib.util.spec_from_file_location(name, file, loader=_SourceOnly(name, str(file)))
    if spec is not None and spec.submodule_search_locations:
        spec.submodule_search_locations = []  # Python's own finder shall not look there: it would take compiled files
    return spec


_finder = _Finder()
