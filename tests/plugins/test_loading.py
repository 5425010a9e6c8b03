"""Files of an artifact as modules: late, by name, and without a trace in the artifact."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from llm_prefetch.errors import PluginError
from llm_prefetch.plugins.loading import load_class, mount
from llm_prefetch.plugins.names import package_of, parse_plugin
from tests.samples import make_folder

FILES = {
    "parser.py": b"from .helper import VALUE\nclass Parser:\n    value = VALUE\n",
    "helper.py": b"VALUE = 1\n",
    "sub/deep.py": b"from ..helper import VALUE\nclass Deep:\n    value = VALUE\n",
    "package/__init__.py": b"from .inner import Inner\n",
    "package/inner.py": b"class Inner: pass\n",
    "broken.py": b"raise RuntimeError('no such luck')\n",
    "leaves.py": b"raise SystemExit(3)\n",
    "syntax.py": b"def\n",
    "value.py": b"Parser = 5\nclass Other: pass\n",
}


@pytest.fixture
def folder(tmp_path):
    """The folder of an artifact `plug-in`, whose files may be imported."""
    folder = make_folder(tmp_path / "artifact", FILES)
    mount({"plug-in": str(folder)})
    return folder


def _load(path, name="Parser"):
    return load_class(parse_plugin("reasoning", f"plug-in/{path}:{name}", "parsers.reasoning[0]"))


def _tree(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in [folder, *folder.rglob("*")])


@pytest.mark.parametrize(
    ("path", "name"), [("parser.py", "Parser"), ("sub/deep.py", "Deep"), ("package/inner.py", "Inner")]
)
def test_a_class_comes_from_its_file_and_may_use_the_files_beside_it(folder, path, name):
    found = _load(path, name)
    assert found.__name__ == name
    assert getattr(found, "value", 1) == 1
    assert sys.modules[found.__module__].__file__ == str(folder / path)


def test_importing_leaves_no_trace_in_the_artifact(folder, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    before = _tree(folder)
    _load("parser.py")
    _load("sub/deep.py", "Deep")
    assert _tree(folder) == before


def test_compiled_files_in_an_artifact_are_not_looked_at(folder):
    cached = Path(importlib.util.cache_from_source(str(folder / "parser.py")))
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(folder / "helper.py")], check=True)
    compiled = cached.with_name(cached.name.replace("parser", "helper"))
    for place in ("only", "package/only", "sub/only"):
        (folder / f"{place}.pyc").write_bytes(compiled.read_bytes())
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"{package_of('plug-in')}.{place.replace('/', '.')}")
    # As if compiled from another source of the same size and time.
    compiled.write_bytes(compiled.read_bytes().replace(b"VALUE", b"OTHER"))
    assert _load("parser.py").value == 1


def test_a_class_can_be_pickled_by_its_name(folder):
    found = _load("parser.py")
    assert pickle.loads(pickle.dumps(found)) is found


def test_a_module_is_found_without_being_run(folder):
    spec = importlib.util.find_spec(f"{package_of('plug-in')}.broken")
    assert spec is not None
    assert spec.origin == str(folder / "broken.py")


def test_another_version_of_the_artifact_takes_the_place_of_the_first(folder, tmp_path):
    assert _load("parser.py").value == 1
    make_folder(tmp_path / "newer", FILES | {"helper.py": b"VALUE = 2\n"})
    mount({"plug-in": str(tmp_path / "newer")})
    assert _load("parser.py").value == 2


@pytest.mark.parametrize(
    ("path", "name", "says"),
    [
        ("nothing.py", "Parser", "no file nothing.py on this node"),
        ("broken.py", "Parser", "cannot be imported: RuntimeError: no such luck"),
        ("leaves.py", "Parser", "cannot be imported: SystemExit: 3"),
        ("syntax.py", "Parser", "cannot be imported: SyntaxError"),
        ("value.py", "Parser", "there is no class Parser"),
        ("parser.py", "Missing", "there is no class Missing"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_with_its_place_in_the_yaml(folder, path, name, says):
    with pytest.raises(PluginError, match=says) as caught:
        _load(path, name)
    assert str(caught.value).startswith(f"parsers.reasoning[0]: plug-in/{path}:{name}")
    assert caught.value.hint


def test_a_class_that_is_not_there_comes_with_those_that_are(folder):
    with pytest.raises(PluginError) as caught:
        _load("value.py")
    assert "Other" in caught.value.hint


def test_a_module_that_is_not_installed_is_told_before_it_is_imported():
    with pytest.raises(PluginError, match=r"no module nowhere\.at\.all on this node"):
        load_class(parse_plugin("tool", "nowhere.at.all:Parser", "parsers.tool[0]"))


def test_an_artifact_that_is_not_mounted_has_no_files():
    with pytest.raises(PluginError, match=r"no file parser\.py"):
        load_class(parse_plugin("tool", "elsewhere/parser.py:Parser", "parsers.tool[0]"))
