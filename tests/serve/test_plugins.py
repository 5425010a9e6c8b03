"""Parsers and models in the replica, up to the point where vLLM is needed: what may be imported, and from where.

What vLLM makes of them is in `tests/engine/test_plugins.py`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llm_prefetch.errors import LockTimeoutError, PluginError, TrustError
from llm_prefetch.leases import leased
from llm_prefetch.live import check_deployment, current_bundle, start_lock
from llm_prefetch.plugins.options import PluginNames
from llm_prefetch.plugins.vllm_entry import VARIABLE
from llm_prefetch.record import Verdict
from llm_prefetch.serve.plugins import install_plugins
from llm_prefetch.spec import Spec
from llm_prefetch.stage import stage
from llm_prefetch.store import locked
from tests.samples import make_manifest, make_published

REPOSITORY = Path(__file__).parents[2]
FILES = {"my_parser.py": b"class MyParser: pass\n"}
NAMES = PluginNames(reasoning=("my-plugins/my_parser.py:MyParser",))
PLACE = "callback_config.callback_kwargs.parsers.reasoning[0]"


@pytest.fixture
def plugged(store, tmp_path):
    """A node on which `llama` is live with its weights and a pinned plugin artifact."""
    artifacts = [
        {"name": "weights", "uri": make_published(tmp_path / "weights")},
        {
            "name": "my-plugins",
            "kind": "plugin",
            "uri": make_published(tmp_path / "plugins", FILES),
            "version": make_manifest(FILES).version,
        },
    ]
    stage(Spec.model_validate({"deployment": "llama", "artifacts": artifacts}), store)
    return store


def _install(store, check, names=NAMES):
    return install_plugins(names, engine_kwargs={}, check=check, store=store)


def test_without_parsers_nothing_is_imported(tmp_path):
    code = (
        "import sys; from llm_prefetch.plugins.options import PluginNames; before = set(sys.modules);"
        "from llm_prefetch.serve.plugins import install_plugins as install;"
        "print(install(None, engine_kwargs={}), install(PluginNames(), engine_kwargs={'dtype': 'auto'}),"
        "[name for name in ('vllm', 'torch', 'transformers') if name in set(sys.modules) - before])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
    assert (done.stdout.strip(), done.stderr) == ("() () []", "")


def test_a_file_needs_its_artifact_in_the_live_bundle(plugged):
    check = check_deployment(plugged, "llama")
    names = PluginNames(reasoning=("others/my_parser.py:MyParser",))
    with pytest.raises(PluginError, match="llama has no artifact others") as caught:
        _install(plugged, check, names)
    assert caught.value.message.startswith(PLACE)
    assert "my-plugins" in caught.value.message


def test_a_file_is_not_taken_where_nothing_is_staged():
    with pytest.raises(PluginError, match="nothing is staged on this node"):
        _install(None, None)


def test_code_is_taken_from_artifacts_of_kind_plugin_alone(plugged):
    names = PluginNames(models=("weights/modeling.py:Model",))
    with pytest.raises(TrustError, match="is of kind model; code is taken from kind plugin alone"):
        _install(plugged, check_deployment(plugged, "llama"), names)


def test_a_file_that_was_changed_since_it_was_staged_is_not_imported(plugged):
    [path] = plugged.root.glob("artifacts/my-plugins/*/my_parser.py")
    path.chmod(0o644)
    path.write_text("raise SystemExit('imported')\n")
    with pytest.raises(PluginError, match=r"my-plugins is (CORRUPT|PARTIAL) on this node"):
        _install(plugged, check_deployment(plugged, "llama"))


def test_an_artifact_that_nothing_vouches_for_is_not_imported(plugged):
    check = check_deployment(plugged, "llama")
    checks = tuple(
        replace(one, verdict=Verdict.UNTRUSTED, reason="its version is not pinned")
        if one.name == "my-plugins"
        else one
        for one in check.checks
    )
    with pytest.raises(TrustError, match="my-plugins is UNTRUSTED: its version is not pinned"):
        _install(plugged, replace(check, checks=checks))


def test_damage_elsewhere_in_the_bundle_does_not_keep_a_plugin_from_its_use(plugged, monkeypatch):
    # Ray's own download serves then, and the parsers are needed all the same.
    shutil.rmtree(plugged.root / "artifacts" / "weights")
    monkeypatch.setitem(sys.modules, "vllm", None)  # so far it gets: the plugin's own checks have passed
    with pytest.raises(PluginError, match="vLLM is not installed"):
        _install(plugged, check_deployment(plugged, "llama"))


def test_after_rays_download_the_plugins_are_those_of_the_node_and_stay_until_the_engine_is_up(
    make, plugged, monkeypatch
):
    shutil.rmtree(plugged.root / "artifacts" / "weights")
    monkeypatch.setitem(sys.modules, "vllm", None)
    for parsers in ({"reasoning": ["my-plugins/my_parser.py:MyParser"]}, {"reasoning": ["deepseek_r1"]}):
        start = make(on_miss=["ray"], parsers=parsers)
        held = []

        async def before_the_engine(start=start, held=held) -> None:
            await start.callback.run_callback("on_before_node_init")
            held.append([lease.bundle for lease in leased(plugged)])
            held.append(free(plugged))
            assert start.callback.generation is None  # the engine is not started from it
            await start.callback.run_callback("on_after_node_init")

        with pytest.raises(Exception, match="vLLM is not installed"):  # not `nothing is staged on this node`
            asyncio.run(before_the_engine())
        wanted = "my-plugins" in str(parsers)
        assert held == [[current_bundle(plugged, "llama")] if wanted else [], not wanted]
        assert free(plugged)
        assert start.engine.hf_model_id == str(start.ray.folder)


def free(store) -> bool:
    """Whether a switch may happen."""
    try:
        with locked(start_lock(store, "llama"), seconds=0, waiting_for="a start"):
            return True
    except LockTimeoutError:
        return False


def test_where_vllm_is_missing_the_error_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(PluginError, match="vLLM is not installed"):
        _install(None, None, PluginNames(reasoning=("deepseek_r1",)))
    assert VARIABLE not in os.environ
