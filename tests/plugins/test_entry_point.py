"""The entry point that vLLM runs in each of its processes, and how a decision of a replica gets there."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from llm_prefetch.errors import PluginError
from llm_prefetch.plugins.decision import Decision, check_entry_point, hand_over
from llm_prefetch.plugins.names import parse_plugin
from llm_prefetch.plugins.vllm_entry import GROUP, NAME, VARIABLE, register


def test_vllm_finds_it():
    [point] = [point for point in entry_points(group=GROUP) if point.name == NAME]
    assert point.load() is register


def test_without_a_decision_it_imports_nothing_of_ours_and_nothing_heavy():
    code = (
        "import sys; from llm_prefetch.plugins.vllm_entry import register; register();"
        "print(sorted(name for name in sys.modules if name.startswith('llm_prefetch')),"
        "[name for name in ('ray', 'vllm', 'torch', 'pydantic', 'json') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout.strip() == (
        "['llm_prefetch', 'llm_prefetch.plugins', 'llm_prefetch.plugins.vllm_entry'] []"
    )


def test_a_decision_is_handed_over_whole(tmp_path):
    plugin = parse_plugin("models", {"Arch": "plug-in/model.py:Model"}, "parsers.models[0]")
    first: dict[str, str] = {}
    second: dict[str, str] = {}
    hand_over(Decision((plugin,), {"plug-in": str(tmp_path)}), first, second)
    assert first == second
    body = json.loads(first[VARIABLE])
    assert body["folders"] == {"plug-in": str(tmp_path)}
    assert body["plugins"][0]["name"] == "Arch"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"folders": {}, "plugins": [{"no": "plugin"}]}'])
def test_a_decision_that_cannot_be_read_ends_the_process(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(PluginError, match=f"{VARIABLE} cannot be read"):
        register()


def test_a_file_that_is_missing_on_a_workers_node_ends_the_process(monkeypatch, tmp_path):
    plugin = parse_plugin("reasoning", {"mine": "plug-in/parser.py:Parser"}, "parsers.reasoning[0]")
    monkeypatch.setenv(VARIABLE, Decision((plugin,), {"plug-in": str(tmp_path)}).to_json())
    with pytest.raises(PluginError, match=r"no file parser\.py on this node"):
        register()


@pytest.mark.parametrize("allowed", ["", "other", "other,another"])
def test_a_filter_that_leaves_it_out_is_told_with_the_value_to_set(allowed):
    with pytest.raises(PluginError) as caught:
        check_entry_point({"VLLM_PLUGINS": allowed})
    assert f"VLLM_PLUGINS={','.join(filter(None, [allowed, NAME]))}" in caught.value.hint


@pytest.mark.parametrize("environment", [{}, {"VLLM_PLUGINS": NAME}, {"VLLM_PLUGINS": f"other,{NAME}"}])
def test_no_filter_or_one_with_it_is_fine(environment):
    check_entry_point(environment)
