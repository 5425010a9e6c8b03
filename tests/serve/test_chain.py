"""Our callback beside others of Ray's kind: what they have to do in Ray's download tasks is done on a hit, too."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from ray.llm._internal.common.callbacks.base import CallbackBase

from llm_prefetch.serve import LifecycleCallback, PrefetchCallback
from tests.serve.conftest import UNTOUCHED, LLMConfig


class Downloads(CallbackBase):
    """Has work in Ray's download tasks, as `CloudDownloader` has."""

    def on_before_download_model_files_distributed(self):
        self.ctx.custom_data["downloaded"] = self.ctx.custom_data.get("downloaded", 0) + 1


class OnlyLooks(CallbackBase):
    async def on_after_node_init(self):
        self.ctx.custom_data["looked"] = True


class DoesWithout(CallbackBase):
    async def on_before_node_init(self):
        self.ctx.run_init_node = False


def started(*kinds: type[CallbackBase], deployment: str = "llama") -> LifecycleCallback:
    """The chain after its first hook, ours at the end of it."""
    kwargs: dict[str, Any] = {"deployment": deployment, "on_miss": ["ray"]}
    members = [{"callback_class": kind} for kind in kinds]
    callback = LifecycleCallback(
        llm_config=LLMConfig(),
        ctx_kwargs={"placement_group": None, "runtime_env": {}},
        callbacks=[*members, {"callback_class": PrefetchCallback, "callback_kwargs": kwargs}],
    )
    asyncio.run(callback.run_callback("on_before_node_init"))
    return callback


def test_on_a_hit_rays_tasks_run_for_those_who_have_work_in_them_and_bring_no_model(staged, caplog):
    caplog.set_level(logging.WARNING, logger="ray.serve.llm_prefetch")
    callback = started(OnlyLooks, Downloads)
    assert callback.ctx.run_init_node is True
    engine = callback.llm_config.engine
    assert engine.hf_model_id == str(staged.root / "live" / "llama" / "weights")
    assert engine.mirror_config is None
    assert "Downloads has work in Ray's download tasks" in caplog.text
    callback.run_callback_sync("on_before_download_model_files_distributed")
    assert callback.ctx.custom_data == {"downloaded": 1}


@pytest.mark.parametrize("others", [(), (OnlyLooks,), (DoesWithout, Downloads)])
def test_on_a_hit_rays_tasks_are_skipped_otherwise(staged, others):
    callback = started(*others)
    assert callback.ctx.run_init_node is False
    assert callback.llm_config.engine != UNTOUCHED


def test_after_rays_own_download_its_tasks_are_not_run_again(store, ray):
    callback = started(Downloads, deployment="elsewhere")
    assert ray.calls == 1
    assert callback.ctx.run_init_node is False
