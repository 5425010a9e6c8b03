"""Eight hooks for any class: called in order, each optional, and what they change is what Ray then uses."""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from ray import cloudpickle
from ray.llm._internal.common.callbacks.base import CallbackBase, CallbackConfig

from llm_prefetch.errors import SpecError
from llm_prefetch.serve.lifecycle import HOOKS, LifecycleCallback, NodeInitializationCallback, context
from llm_prefetch.serve.lifecycle.callback import SkipEngineError
from llm_prefetch.serve.lifecycle.options import parse_members
from tests.serve.conftest import EngineConfig


@dataclass
class LLMConfig:
    """Of Ray's `LLMConfig`, which imports vLLM, what the hooks use."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    engine_kwargs: dict[str, Any] = field(default_factory=dict)

    def get_engine_config(self):
        return self.engine

    def update_engine_kwargs(self, **kwargs):
        self.engine_kwargs.update(kwargs)


EngineConfig.actual_hf_model_id = property(lambda engine: engine.hf_model_id)


class Recorder:
    """Has all hooks."""

    def __init__(self, calls=None):
        self.calls = [] if calls is None else calls


for _hook in HOOKS:
    setattr(Recorder, _hook, lambda self, ctx, hook=_hook: self.calls.append(hook))


class OfRay(CallbackBase):
    """Of Ray's own kind."""

    calls: ClassVar[list[str]] = []

    async def on_before_node_init(self):
        self.calls.append("before")
        self.ctx.custom_data["seen"] = True

    async def on_after_node_init(self):
        self.calls.append("after")

    def on_before_download_model_files_distributed(self):
        self.calls.append("distributed")


def make(*members, raise_error=True):
    """As Ray makes it; a member is a class or a dict as in the YAML."""
    callbacks = [member if isinstance(member, dict) else {"callback_class": member} for member in members]
    return LifecycleCallback(
        llm_config=LLMConfig(),
        raise_error_on_callback=raise_error,
        ctx_kwargs={"worker_node_download_model": "MODEL", "placement_group": "pg", "runtime_env": {}},
        callbacks=callbacks,
    )


def run(callback):
    """The two hooks around Ray's download."""
    asyncio.run(callback.run_callback("on_before_node_init"))
    asyncio.run(callback.run_callback("on_after_node_init"))
    return callback


def given(calls):
    return {"callback_class": Recorder, "callback_kwargs": {"calls": calls}}


def test_the_hooks_are_called_in_order():
    calls = []
    run(make(given(calls)))
    assert calls == ["on_pre_initialization", "on_pre_download", "on_post_download", "on_pre_engine_init"]


def test_a_class_with_one_hook_is_enough():
    """Written for a version that had fewer hooks and fewer fields."""

    class Old:
        def on_pre_download(self, ctx):
            ctx.custom_data["old"] = ctx.llm_config.engine.hf_model_id

    assert run(make(Old)).ctx.custom_data == {"old": "meta-llama/Llama-3-8B"}


def test_a_class_for_more_hooks_than_there_are_works_and_is_told(caplog):
    class New:
        def on_pre_download(self, ctx):
            ctx.custom_data["new"] = getattr(ctx, "a_field_of_tomorrow", "absent")

        def on_pre_teleport(self, ctx):
            raise AssertionError("nobody calls this")

    assert run(make(New)).ctx.custom_data == {"new": "absent"}
    assert "New.on_pre_teleport is not a hook and is never called" in caplog.text


def test_a_misspelt_hook_is_warned_of_with_the_right_name(caplog):
    class Typo:
        def on_pre_dowload(self, ctx):  # codespell:ignore
            pass

        def on_post_download(self, ctx):
            pass

    make(Typo)
    assert "did you mean on_pre_download?" in caplog.text


def test_coroutines_are_hooks_too():
    class Async:
        async def on_pre_download(self, ctx):
            await asyncio.sleep(0)
            ctx.custom_data["async"] = True
            return False

    ctx = run(make(Async)).ctx
    assert ctx.custom_data == {"async": True}
    assert ctx.run_init_node is False


@pytest.mark.parametrize("hook", ["on_pre_initialization", "on_pre_download"])
@pytest.mark.parametrize(("answer", "downloads"), [(False, False), (None, True), (True, True), (0, True)])
def test_false_and_nothing_else_skips_the_download(hook, answer, downloads):
    kind = type("Skips", (), {hook: lambda self, ctx: answer})
    assert run(make(kind, Recorder)).ctx.run_init_node is downloads


def test_extra_arguments_reach_the_engine():
    class Early:
        def on_pre_initialization(self, ctx):
            ctx.extra_init_kwargs["tensor_parallel_size"] = 2

    class Late:
        def on_pre_engine_init(self, ctx):
            ctx.extra_init_kwargs.update(max_num_seqs=3)

    callback = run(make(Early, Late))
    assert callback.llm_config.engine_kwargs == {"tensor_parallel_size": 2, "max_num_seqs": 3}


def test_what_was_downloaded_is_told():
    seen = []

    class After:
        def on_post_download(self, ctx):
            seen.append(ctx.download_result)

    callback = make(After)
    asyncio.run(callback.run_callback("on_before_node_init"))
    callback.llm_config.engine.hf_model_id = "/staged/weights"
    asyncio.run(callback.run_callback("on_after_node_init"))
    assert seen == ["/staged/weights"]


def test_no_engine_is_wanted_only_where_a_server_of_ours_can_do_without(caplog):
    class Dry:
        def on_pre_engine_init(self, ctx):
            return False

    run(make(Dry))
    assert "only server_cls" in caplog.text
    callback = make(Dry)
    callback.in_server = True
    with pytest.raises(SkipEngineError):
        asyncio.run(callback.run_callback("on_after_node_init"))


def test_hooks_that_only_the_server_can_call_are_named(caplog):
    run(make(Recorder))
    assert "Recorder: on_pre_placement_group, on_post_placement_group, on_post_engine_init" in caplog.text


def test_callbacks_of_both_kinds_share_one_context_and_run_in_order():
    OfRay.calls, calls = [], []

    class Reads:
        def on_pre_download(self, ctx):
            calls.append(ctx.custom_data.get("seen"))

    callback = run(make(Reads, OfRay, Reads))
    assert calls == [None, True]
    assert OfRay.calls == ["before", "after"]
    callback.run_callback_sync("on_before_download_model_files_distributed")
    assert OfRay.calls[-1] == "distributed"


class Fails:
    def on_pre_download(self, ctx):
        raise ValueError("the disk is on fire")


def test_each_callback_is_isolated_from_the_errors_of_others_as_configured(caplog):
    calls = []
    run(make({"callback_class": Fails, "raise_error_on_callback": False}, given(calls)))
    assert len(calls) == 4
    assert "Fails.on_pre_download failed; going on without it" in caplog.text

    with pytest.raises(Exception, match=r"Fails\.on_pre_download: ValueError: the disk is on fire"):
        run(make({"callback_class": Fails}, given(calls)))

    caplog.clear()
    run(make(Fails, raise_error=False))  # of the chain: then of each in it, also in the phases of the server
    assert "the disk is on fire" in caplog.text


def test_dotted_names_are_classes():
    callback = make({"callback_class": "tests.serve.test_lifecycle.Fails"})
    assert type(callback.members[0].value).__name__ == "Fails"
    config = CallbackConfig(
        callback_class=LifecycleCallback, callback_kwargs={"callbacks": [{"callback_class": Fails}]}
    )
    assert config.callback_class(llm_config=LLMConfig(), **config.callback_kwargs).members[0].name == "Fails"


@pytest.mark.parametrize(
    ("arguments", "path", "says"),
    [
        ({}, "callbacks", "Field required"),
        ({"callbacks": []}, "callbacks", "at least 1"),
        ({"callbacks": [{"callback_clas": "x.Y"}]}, "callbacks.0.callback_class", "Field required"),
        ({"callbacks": [{"callback_class": Recorder, "x": 1}]}, "callbacks.0.x", "Extra inputs"),
        ({"callbacks": [{"callback_class": "no.such.Thing"}]}, "callbacks.0.callback_class", "cannot be imported"),
        ({"callbacks": [{"callback_class": "logging.getLogger"}]}, "callbacks.0.callback_class", "not a class"),
        ({"callbacks": [{"callback_class": dict}]}, "callbacks.0", "none of the hooks"),
        ({"callbacks": [{"callback_class": Recorder, "callback_kwargs": {"y": 1}}]}, "callbacks.0", "'y'"),
    ],
)  # fmt: skip
def test_an_argument_that_does_not_fit_is_named_by_its_yaml_path(arguments, path, says):
    with pytest.raises(SpecError) as caught:
        LifecycleCallback(llm_config=LLMConfig(), ctx_kwargs={}, **arguments)
    assert f"callback_config.callback_kwargs.{path}" in caught.value.message
    assert says in caught.value.message


def test_a_copy_on_another_node_downloads_what_is_said_for_workers(monkeypatch):
    """Ray reads `worker_node_download_model` from a copy in a task on each node of the placement group."""
    callback = make(Recorder)
    callback.ctx.local_node_download_model = "TOKENIZER_ONLY"
    callback.ctx.replica_node_id = "here"
    for node, expected in (("here", "TOKENIZER_ONLY"), ("there", "MODEL")):
        monkeypatch.setattr(context, "_this_node", lambda node=node: node)
        copy = cloudpickle.loads(cloudpickle.dumps(callback))
        assert copy.ctx.worker_node_download_model == expected
    callback.ctx.local_node_download_model = None
    assert cloudpickle.loads(cloudpickle.dumps(callback)).ctx.worker_node_download_model == "MODEL"


def test_the_protocol_can_be_derived_from():
    class Derived(NodeInitializationCallback):
        def on_pre_download(self, ctx):
            return False

    assert run(make(Derived)).ctx.run_init_node is False
    assert set(HOOKS) <= set(dir(NodeInitializationCallback))


SECRET = "hunter2-or-so"


def test_an_argument_that_does_not_fit_is_told_without_what_was_given():
    members = [{"callback_class": "my.Callback", "callback_kwarg": {"prefect": {"api_key": SECRET}}}]
    try:
        parse_members({"callbacks": members})
    except SpecError:
        printed = traceback.format_exc()
    assert "callback_config.callback_kwargs.callbacks.0.callback_kwarg: " in printed
    assert SECRET not in printed
