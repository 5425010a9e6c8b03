"""Parsers and models from outside vLLM, with a real one: tried, and registered.

That each process of an engine uses them is in `test_replica.py` and `test_plugins_deployed.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from llm_prefetch.live import check_deployment
from llm_prefetch.plugins.names import KINDS, parse_plugin
from llm_prefetch.plugins.preflight import PASSED, preflight
from llm_prefetch.spec import Spec
from llm_prefetch.stage import stage
from llm_prefetch.store import NodeStore, open_store
from tests.real.checkpoint import write_checkpoint
from tests.samples import make_folder, make_manifest, make_published

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "deployments" / "serve" / "plugins"
SAYS = "Two and that make Answer: Four, surely!"
PARSERS = b"""
from vllm.reasoning import ReasoningParser, ReasoningParserManager
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser
from vllm.tool_parsers import ToolParser
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

class Good(DeepSeekR1ReasoningParser): pass

@ReasoningParserManager.register_module(["first_name", "second_name"])
class Decorated(DeepSeekR1ReasoningParser): pass

class Swapped(DeepSeekR1ReasoningParser):
    def extract_reasoning(self, output, request):
        return super().extract_reasoning(output, request)[::-1]

class Silent(DeepSeekR1ReasoningParser):
    def extract_reasoning_streaming(self, *texts_and_ids): return None

class Raises(DeepSeekR1ReasoningParser):
    def extract_reasoning_streaming(self, *texts_and_ids): raise KeyError("oh")

class OldFashioned(DeepSeekR1ReasoningParser):
    def __init__(self, tokenizer): super().__init__(tokenizer)

class Bare(ReasoningParser): pass

class GoodTool(Hermes2ProToolParser):
    PREFLIGHT_SAMPLE = '<tool_call>\\n{"name": "look_up", "arguments": {"word": "four"}}\\n</tool_call>'

class Deaf(Hermes2ProToolParser):
    PREFLIGHT_SAMPLE = "[look_up(word='four')]"

class BareTool(ToolParser): pass

class NoModel: pass
"""
FILES = {
    "parsers.py": PARSERS,
    "model.py": b"from vllm.model_executor.models.llama import LlamaForCausalLM\nclass Mine(LlamaForCausalLM): pass\n",
    "broken.py": b"raise RuntimeError('no such luck')\n",
    "hangs.py": b"import time\ntime.sleep(30)\nclass Slow: pass\n",
}


def _stage(
    root: Path, sources: Path, files: Mapping[str, bytes], checkpoint: Path | None = None
) -> NodeStore:
    """A node on which `toy` is live, with the plugins in `files` and perhaps a model."""
    artifacts = [
        {
            "name": "my-plugins",
            "kind": "plugin",
            "uri": make_published(sources, files),
            "version": make_manifest(files).version,
        }
    ]
    if checkpoint:
        artifacts.append({"name": "weights", "kind": "model", "uri": f"file://{checkpoint}"})
    store = open_store(root, create=True)
    stage(Spec.model_validate({"deployment": "toy", "artifacts": artifacts}), store)
    return store


def _python(*arguments: str, store: NodeStore, **environment: str) -> Any:
    """Run a module of `tests.real` and return the JSON on its last line."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        env={
            **os.environ, "PYTHONPATH": str(REPOSITORY), "LLM_PREFETCH_ROOT": str(store.root),
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **environment,
        },
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


# --- tried ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flaw(tmp_path_factory) -> Callable[[str, str], str]:
    """What a trial of all classes in FILES says about one of them."""
    folder = make_folder(tmp_path_factory.mktemp("tried"), FILES)
    targets = [
        *((kind, f"parsers.py:{name}") for kind, names in TRIED.items() for name in names),
        ("models", "model.py:Mine"),
    ]
    plugins = [parse_plugin(kind, target, kind, inside="tried") for kind, target in targets]  # type: ignore[arg-type]
    request, result = folder.with_suffix(".request"), folder.with_suffix(".result")
    body = {"plugins": [asdict(one) for one in plugins], "folders": {"tried": str(folder)}, "tokenizer": None}
    request.write_text(json.dumps(body))
    subprocess.run(
        [sys.executable, "-m", "llm_prefetch.plugins.trial", str(request), str(result)],
        check=True,
        cwd=REPOSITORY,
    )
    flaws = {(one["where"], one["target"]): one["reason"] for one in json.loads(result.read_text())}
    return lambda kind, target: flaws.get((kind, f"tried/{target}"), "")


TRIED: Mapping[str, Mapping[str, str]] = {
    "reasoning": {
        "Good": "",
        "Decorated": "",
        "Swapped": "extract_reasoning makes ('The answer is four.', 'I look at the question first.')",
        "Silent": "extract_reasoning_streaming makes ('', '')",
        "Raises": "extract_reasoning_streaming raised KeyError: 'oh'",
        "OldFashioned": "unexpected keyword argument 'model_config'",
        "Bare": "extract_reasoning returned None",
        "GoodTool": "is no reasoning parser",
        "Missing": "there is no class Missing",
    },
    "tool": {
        "GoodTool": "",
        "Deaf": "no call of a tool is found",
        "BareTool": "extract_tool_calls raised NotImplementedError",
        "Good": "is no tool parser",
    },
    "models": {"NoModel": "is no torch.nn.Module"},
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in TRIED[kind]])
def test_a_trial_tells_what_a_class_does_wrong(flaw, kind, name):
    said, expected = flaw(kind, f"parsers.py:{name}"), TRIED[kind][name]
    assert expected in said
    assert bool(said) == bool(expected)


def test_a_trial_of_a_model_asks_vllm_what_it_can_do(flaw):
    assert flaw("models", "model.py:Mine") == ""


def test_the_preflight_tries_a_parser_with_its_models_tokenizer(tmp_path):
    folder, model = make_folder(tmp_path / "plugins", FILES), write_checkpoint(tmp_path / "model", says=SAYS)
    good = [parse_plugin("reasoning", "parsers.py:Good", "plugins.reasoning[0]", inside="mine")]
    assert preflight(good, {"mine": folder}) == PASSED
    # The model's tokenizer has no <think>, so the parser would fail with the first request.
    with pytest.raises(Exception, match="could not locate think start/end tokens in the tokenizer"):
        preflight(good, {"mine": folder}, tokenizer=model)
    shipped = [parse_plugin("reasoning", "answer_after.py:AnswerAfterParser", "plugins", inside="mine")]
    assert preflight(shipped, {"mine": EXAMPLES}, tokenizer=model) == PASSED


# --- registered ----------------------------------------------------------------------------------------------------

IN = "my-plugins"
CASES: Mapping[str, tuple[dict[str, Any], str, list[str]]] = {
    "a class under its own name": (
        {"parsers": {"reasoning": [f"{IN}/parsers.py:Good"]}, "engine_kwargs": {"reasoning_parser": "Good"}},
        "", ["Good"],
    ),
    "the names that its module gives it": (
        {"parsers": {"reasoning": [f"{IN}/parsers.py:Decorated"]}, "engine_kwargs": {"reasoning_parser": "second_name"}},
        "", ["first_name", "second_name"],
    ),
    "a name that the user gives it": (
        {
            "parsers": {"tool": [{"mine": f"{IN}/parsers.py:GoodTool"}]},
            "engine_kwargs": {"tool_call_parser": "mine", "enable_auto_tool_choice": True},
        },
        "", ["mine"],
    ),
    "an installed class, and a built-in name": (
        {
            "parsers": {
                "reasoning": [{"other": "vllm.reasoning.deepseek_r1_reasoning_parser:DeepSeekR1ReasoningParser"}, "deepseek_r1"]
            }
        },
        "", ["other"],
    ),
    "a built-in name alone needs nobody else": ({"engine_kwargs": {"reasoning_parser": "deepseek_r1"}}, "", []),
    "a wrong built-in name": (
        {"parsers": {"reasoning": ["deepseek_r2"]}},
        "parsers.reasoning[0]: vLLM has no reasoning parser 'deepseek_r2'", [],
    ),
    "a name in engine_kwargs that nobody registered": (
        {"parsers": {"reasoning": [f"{IN}/parsers.py:Good"]}, "engine_kwargs": {"reasoning_parser": "good"}},
        "engine_kwargs.reasoning_parser: vLLM has no reasoning parser 'good'", [],
    ),
    "a tool parser that nobody registered": (
        {"engine_kwargs": {"tool_call_parser": "hermis"}},
        "engine_kwargs.tool_call_parser: vLLM has no tool parser 'hermis'", [],
    ),
    "a class of the wrong kind": (
        {"parsers": {"tool": [f"{IN}/parsers.py:Good"]}},
        f"parsers.tool[0]: {IN}/parsers.py:Good is no tool parser", [],
    ),
    "a module that raises": (
        {"parsers": {"reasoning": [f"{IN}/broken.py:Any"]}},
        "cannot be imported: RuntimeError: no such luck", [],
    ),
    "a file that is not there": ({"parsers": {"reasoning": [f"{IN}/nothing.py:Any"]}}, "no file nothing.py", []),
    "a filter on vLLM's plugins without ours": (
        {"parsers": {"reasoning": [f"{IN}/parsers.py:Good"]}, "env": {"VLLM_PLUGINS": "other"}},
        "VLLM_PLUGINS=other,llm_prefetch", [],
    ),
    "a model": ({"parsers": {"models": [f"{IN}/model.py:Mine"]}}, "", ["Mine"]),
    "a model that cannot be imported": (
        {"parsers": {"models": [f"{IN}/broken.py:Any"]}},
        "it cannot be imported: RuntimeError: no such luck", [],
    ),
    "a class that is no model": (
        {"parsers": {"models": [f"{IN}/parsers.py:NoModel"]}}, "vLLM finds no model in it", [],
    ),
    "a model that takes for ever": (
        {"parsers": {"models": [f"{IN}/hangs.py:Slow"]}, "seconds": 1},
        "importing it takes longer than 1 s", [],
    ),
    "a parser that takes for ever": (
        {"parsers": {"reasoning": [f"{IN}/hangs.py:Slow"]}, "seconds": 1},
        "importing it takes longer than 1 s", [],
    ),
    "a built-in architecture": ({"parsers": {"models": ["LlamaForCausalLM"]}}, "", []),
    "an architecture that vLLM does not have": (
        {"parsers": {"models": ["LlamaForCausalLLM"]}}, "vLLM has no model class 'LlamaForCausalLLM'", [],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def registered(tmp_path_factory) -> dict[str, Any]:
    """What becomes of each case, in one process; under `at last`, what vLLM knows then."""
    folder = tmp_path_factory.mktemp("registered")
    store = _stage(folder / "store", folder / "plugins", FILES)
    answers = _python(
        "tests.real.vllm_plugins",
        json.dumps([case for case, *_ in CASES.values()]),
        store=store,
        VLLM_CACHE_ROOT=str(folder / "cache"),
    )
    assert check_deployment(store, "toy").ready  # no import has left anything in the artifact
    return dict(zip([*CASES, "at last"], answers, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_what_is_named_is_registered_or_told_before_an_engine_starts(registered, name):
    _, error, told = CASES[name]
    answer = registered[name]
    assert error in answer["error"]
    assert bool(answer["error"]) == bool(error)
    assert answer["type"] == ("PluginError" if error else "")
    # EngineCore and the workers are told by the environment, the task that makes the configuration by its runtime_env;
    # of what went wrong they are told nothing.
    assert answer["told"] == told
    assert answer["same"]


def test_models_are_not_imported_in_the_replica_and_parsers_are(registered):
    last = registered["at last"]
    assert {"Good", "first_name", "second_name", "other"} <= set(last["reasoning"])
    assert "mine" in last["tool"]
    imported = {name.rpartition(".")[2] for name in last["imported"]}
    assert "parsers" in imported
    assert "model" not in imported
