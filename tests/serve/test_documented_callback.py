"""The class and the YAML of the how-to page, as they stand there, in a start of a replica."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from llm_prefetch.serve import LifecycleCallback
from llm_prefetch.serve.lifecycle.hooks import load_class
from llm_prefetch.spec import Spec
from llm_prefetch.stage import stage
from tests.samples import make_published
from tests.serve.conftest import EngineConfig, LLMConfig

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "write-a-callback.md").read_text()
EngineConfig.actual_hf_model_id = property(lambda engine: engine.hf_model_id)


class Config(LLMConfig):
    """With what the chain asks of Ray's."""

    def update_engine_kwargs(self, **kwargs: Any) -> None:
        self.engine_kwargs.update(kwargs)


def shown(language: str) -> str:
    """The only block of this language."""
    (block,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return block


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The module, where the YAML finds it."""
    folder = tmp_path / "site" / "my_company"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "callbacks.py").write_text(shown("python"))
    monkeypatch.syspath_prepend(folder.parent)
    yield
    for name in ("my_company", "my_company.callbacks"):
        sys.modules.pop(name, None)


@pytest.fixture
def callback(installed, store, tmp_path):
    """As Ray makes it from the YAML, on a node where the deployment is live."""
    artifacts = [{"name": "weights", "uri": make_published(tmp_path / "origin")}]
    stage(Spec.model_validate({"deployment": "llama-3-8b", "artifacts": artifacts}), store)
    (llm,) = yaml.safe_load(shown("yaml"))["applications"][0]["args"]["llm_configs"]
    config = llm["callback_config"]
    kind = load_class(config["callback_class"], "callback_class")
    assert kind is LifecycleCallback
    return kind(
        llm_config=Config(),
        ctx_kwargs={"placement_group": None, "runtime_env": {}},
        **config["callback_kwargs"],
    )


def run(callback: LifecycleCallback) -> None:
    for hook in ("on_before_node_init", "on_after_node_init"):
        asyncio.run(callback.run_callback(hook))


def test_the_class_changes_the_engine_and_sees_what_it_was_loaded_from(callback, store, caplog):
    caplog.set_level(logging.INFO)
    callback.in_server = True  # what `server_cls` of the YAML adds
    run(callback)
    assert callback.llm_config.engine_kwargs == {"max_model_len": 8192}
    path = str(store.root / "live" / "llama-3-8b" / "weights")
    assert callback.llm_config.engine.hf_model_id == path
    asyncio.run(callback.run_phase("on_post_engine_init"))
    assert f"the engine is up, from {path}" in caplog.text


def test_without_the_server_class_the_hook_after_the_engine_is_named_as_one_that_is_not_called(
    callback, caplog
):
    run(callback)
    assert callback.llm_config.engine_kwargs == {"max_model_len": 8192}
    assert "ShortContext: on_post_engine_init are not called without server_cls" in caplog.text
    assert "the engine is up" not in caplog.text


def test_its_error_is_a_warning_and_the_check_beside_it_goes_on(callback, store, caplog):
    def fails(ctx: Any) -> None:
        raise ValueError("out of luck")

    callback.members[0].value.on_pre_download = fails
    run(callback)
    assert "ShortContext.on_pre_download failed; going on without it: ValueError: out of luck" in caplog.text
    assert callback.llm_config.engine.hf_model_id == str(store.root / "live" / "llama-3-8b" / "weights")
