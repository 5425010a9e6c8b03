"""The preflight as staging calls it: its process, and what it says where there is nothing to try."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from llm_prefetch.errors import OriginUnavailableError, PluginError
from llm_prefetch.plugins.names import parse_plugin
from llm_prefetch.plugins.preflight import NO_VLLM, PASSED, preflight
from llm_prefetch.plugins.stand_in import StandInTokenizer
from llm_prefetch.stop import Stop
from tests.samples import make_folder

# Of vLLM, as much as a trial of a model would import; so this needs no engine.
SLEEP = f"987654.{os.getpid()}"  # tests of this file run in several processes at once
HANGS = f"import subprocess, sys, time\nsubprocess.Popen(['sleep', '{SLEEP}'])\ntime.sleep(987654)\n".encode()


@pytest.fixture
def stand_in_vllm(tmp_path, monkeypatch):
    """A vLLM and a torch of two names, in place of an installed one."""
    folder = make_folder(
        tmp_path / "vllm-of-two-names",
        {
            "vllm/__init__.py": b"",
            "vllm/model_executor/__init__.py": b"",
            "vllm/model_executor/models/__init__.py": b"",
            "vllm/model_executor/models/registry.py": b"class _ModelInfo: pass\n",
            "torch/__init__.py": b"",
            "torch/nn.py": b"class Module: pass\n",
        },
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))


def _model(path):
    return parse_plugin("models", f"{path}:Model", "plugins.models[0]", inside="plug-in")


def _left() -> str:
    """Processes that the hanging plugin started."""
    return subprocess.run(
        ["pgrep", "-f", f"sleep {SLEEP}"], capture_output=True, text=True, check=False
    ).stdout


def test_where_vllm_is_not_installed_nothing_is_tried_and_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert preflight([_model("nothing_there.py")], {"plug-in": tmp_path}) == NO_VLLM


def test_built_in_names_need_no_trial(tmp_path, stand_in_vllm):
    assert preflight([parse_plugin("tool", "hermes", "parsers.tool[0]")], {}, seconds=0) == PASSED


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            b"raise RuntimeError('no such luck')\n",
            "is broken: cannot be imported: RuntimeError: no such luck",
        ),
        (b"class Model: pass\n", r"is broken: is no torch\.nn\.Module"),
        (b"import os; os._exit(7)\n", "ended with 7: it said nothing"),
        (b"import os; print('I give up', flush=True); os.abort()\n", "ended with -6: .*I give up"),
    ],
)
def test_a_broken_plugin_is_told_by_its_place_and_what_it_did(tmp_path, stand_in_vllm, source, says):
    make_folder(tmp_path / "plugins", {"model.py": source})
    with pytest.raises(PluginError, match=says) as caught:
        preflight([_model("model.py")], {"plug-in": tmp_path / "plugins"})
    assert "plug-in/model.py:Model" in caught.value.message
    assert list((tmp_path / "plugins").iterdir()) == [tmp_path / "plugins" / "model.py"]


def test_a_plugin_that_hangs_is_ended_with_all_that_it_started(tmp_path, stand_in_vllm):
    make_folder(tmp_path / "plugins", {"model.py": HANGS})
    with pytest.raises(PluginError, match="did not end within 3 s"):
        preflight([_model("model.py")], {"plug-in": tmp_path / "plugins"}, seconds=3)
    assert not _left()


def test_a_staging_that_is_cancelled_does_not_wait_for_the_trial(tmp_path, stand_in_vllm):
    make_folder(tmp_path / "plugins", {"model.py": HANGS})
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(OriginUnavailableError, match="was cancelled"):
        preflight([_model("model.py")], {"plug-in": tmp_path / "plugins"}, stop=Stop(cancelled))
    assert not _left()


def test_the_trial_sees_neither_gpus_nor_a_decision_of_a_replica(tmp_path, stand_in_vllm, monkeypatch):
    monkeypatch.setenv("LLM_PREFETCH_PLUGINS", "of a replica")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    source = b"import os\nraise ValueError([os.environ.get(n) for n in ('LLM_PREFETCH_PLUGINS', 'CUDA_VISIBLE_DEVICES')])\n"
    make_folder(tmp_path / "plugins", {"model.py": source})
    with pytest.raises(PluginError, match=r"ValueError: \[None, ''\]"):
        preflight([_model("model.py")], {"plug-in": tmp_path / "plugins"})


def test_the_path_of_a_folder_may_be_relative(tmp_path, stand_in_vllm, monkeypatch):
    make_folder(tmp_path / "plugins", {"model.py": b"class Model: pass\n"})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PluginError, match=r"is no torch\.nn\.Module"):
        preflight([_model("model.py")], {"plug-in": Path("plugins")})


def test_a_tokenizer_that_cannot_be_loaded_is_not_the_plugins_fault(tmp_path, stand_in_vllm):
    make_folder(tmp_path / "plugins", {"model.py": b"class Model: pass\n"})
    make_folder(tmp_path / "model", {"tokenizer.json": b"{"})
    with pytest.raises(PluginError, match=r"is no torch\.nn\.Module"):
        preflight([_model("model.py")], {"plug-in": tmp_path / "plugins"}, tokenizer=tmp_path / "model")


def test_the_stand_in_tokenizer_gives_back_what_it_took_and_knows_every_token_it_was_asked_for():
    tokenizer = StandInTokenizer()
    text = "Let me see.</think> It is  four,\n</think>surely."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    end = tokenizer.get_vocab().get("</think>")
    assert tokenizer.encode(text).count(end) == 2
    assert tokenizer.decode(end) == "</think>"
    assert tokenizer.encode(text) == tokenizer.encode(text)
