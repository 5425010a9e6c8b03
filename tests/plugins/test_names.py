"""How parsers and models are named in YAML."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from llm_prefetch.plugins.names import package_of, parse_plugin
from llm_prefetch.plugins.options import PluginFiles, PluginNames

WHERE = "parsers.reasoning[0]"


def test_a_built_in_is_a_bare_name():
    plugin = parse_plugin("reasoning", "deepseek_r1", WHERE)
    assert (plugin.name, plugin.module, plugin.artifact) == ("deepseek_r1", "", "")


def test_a_class_of_an_installed_module_is_an_import_string():
    plugin = parse_plugin("tool", "my_pkg.parsers:MyParser", WHERE)
    assert (plugin.kind, plugin.module, plugin.class_name) == ("tool", "my_pkg.parsers", "MyParser")
    assert (plugin.name, plugin.target) == ("", "my_pkg.parsers:MyParser")


def test_a_class_in_a_file_of_an_artifact_is_a_path_below_the_artifacts_name():
    plugin = parse_plugin("reasoning", "my-plugins/sub/my_parser.py:MyParser", WHERE)
    assert (plugin.artifact, plugin.path, plugin.class_name) == ("my-plugins", "sub/my_parser.py", "MyParser")
    assert plugin.module == f"{package_of('my-plugins')}.sub.my_parser"
    assert plugin.target == "my-plugins/sub/my_parser.py:MyParser"


def test_a_mapping_gives_it_a_name_of_its_own():
    plugin = parse_plugin("models", {"MyArch": "my_pkg:MyModel"}, WHERE)
    assert (plugin.name, plugin.class_name) == ("MyArch", "MyModel")


def test_in_the_spec_of_an_artifact_a_file_needs_no_artifact():
    plugin = parse_plugin("reasoning", "my_parser.py:MyParser", WHERE, inside="my-plugins")
    assert plugin == parse_plugin("reasoning", "my-plugins/my_parser.py:MyParser", WHERE)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("my_parser.py:MyParser", "write ARTIFACT/my_parser.py:MyParser"),
        ("my-plugins/my_parser.py", "write my-plugins/my_parser.py:MyClass"),
        ("my_pkg.parsers.MyParser", "write my_pkg.parsers:MyParser"),
        ("../secrets/my_parser.py:MyParser", "not a built-in name"),
        ("/etc/my_parser.py:MyParser", "not a built-in name"),
        ("my-plugins/../x.py:MyParser", "not a built-in name"),
        ("my-plugins/a.b.py:MyParser", "not a built-in name"),
        ("", "not a built-in name"),
        (5, "not a string"),
        ({}, "not a string"),
        ({"a": "m:A", "b": "m:B"}, "not a string"),
        ({"a b": "m:A"}, "cannot be a name"),
        ({"a": "deepseek_r1"}, "not a built-in name"),
    ],
)
def test_anything_else_is_refused_and_told_what_to_write(entry, says):
    with pytest.raises(ValueError, match=says):
        parse_plugin("reasoning", entry, WHERE)


@pytest.mark.parametrize("entry", ["deepseek_r1", "my_pkg:MyParser", "../x.py:A", "my_parser.py"])
def test_the_spec_of_an_artifact_names_nothing_but_its_own_files(entry):
    with pytest.raises(ValidationError, match=r"my_parser\.py:MyParser") as caught:
        PluginFiles(reasoning=("ok.py:Ok", entry))
    [error] = caught.value.errors()
    assert error["loc"] == ("reasoning",)
    assert "[1]" in error["msg"]


def test_artifacts_with_similar_names_have_packages_of_their_own():
    names = ["a-b", "a.b", "a_b", "ab", "a2db"]
    assert len({package_of(name) for name in names}) == len(names)


def test_every_plugin_knows_its_place_in_the_yaml():
    names = PluginNames(reasoning=("deepseek_r1", "m:A"), models=({"Arch": "m:B"},))
    assert [(plugin.where, plugin.name) for plugin in names.plugins("callback_kwargs.parsers")] == [
        ("callback_kwargs.parsers.reasoning[0]", "deepseek_r1"),
        ("callback_kwargs.parsers.reasoning[1]", ""),
        ("callback_kwargs.parsers.models[0]", "Arch"),
    ]


def test_a_misspelt_kind_is_refused():
    with pytest.raises(ValidationError, match="Extra inputs"):
        PluginNames.model_validate({"reasoners": []})
