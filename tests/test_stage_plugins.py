"""Artifacts of kind `plugin`: staged only when pinned, and switched to only when what they hold works."""

from __future__ import annotations

import json
import sys

import pytest
from pydantic import ValidationError

from llm_prefetch import ledger
from llm_prefetch.errors import PluginError, TrustError
from llm_prefetch.live import check_deployment, current_bundle
from llm_prefetch.progress import NoProgress
from llm_prefetch.record import Verdict
from llm_prefetch.spec import Spec
from llm_prefetch.stage import stage
from tests.samples import make_folder, make_manifest, make_published

GOOD = {"model.py": b"from torch.nn import Module\nclass Mine(Module): pass\n"}
BROKEN = {"model.py": b"raise RuntimeError('no such luck')\n"}
REGISTRY = b"""
class _ModelInfo:
    is_text_generation_model = is_pooling_model = supports_transcription = True
    from_model_cls = staticmethod(lambda kind: _ModelInfo)
"""


@pytest.fixture
def stand_in_vllm(tmp_path, monkeypatch):
    """Of vLLM and torch, what the trial of a model imports; a real one is tried in `tests/engine`."""
    folder = make_folder(
        tmp_path / "vllm-of-one-name",
        {
            "vllm/__init__.py": b"",
            "vllm/model_executor/__init__.py": b"",
            "vllm/model_executor/models/__init__.py": b"",
            "vllm/model_executor/models/registry.py": REGISTRY,
            "torch/__init__.py": b"",
            "torch/nn.py": b"class Module: pass\n",
        },
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))


class Said(NoProgress):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def _spec(tmp_path, files, **artifact):
    fields = {
        "name": "my-plugins",
        "kind": "plugin",
        "uri": make_published(tmp_path / "plugins", files),
        "version": make_manifest(files).version,
        "plugins": {"models": ["model.py:Mine"]},
        **artifact,
    }
    return Spec.model_validate({"deployment": "llama", "artifacts": [fields]})


def test_code_is_not_staged_unless_the_spec_pins_its_version(store, tmp_path):
    with pytest.raises(TrustError, match="my-plugins is code") as caught:
        stage(_spec(tmp_path, GOOD, version=None), store)
    assert f"version: {make_manifest(GOOD).version}" in caught.value.hint
    assert not list(store.root.glob("artifacts/my-plugins/*"))


def test_the_pin_is_asked_for_before_anything_is_fetched(store, tmp_path):
    plugins = _spec(tmp_path, GOOD, version=None).artifacts[0].model_dump()
    weights = {"name": "weights", "uri": make_published(tmp_path / "weights")}
    with pytest.raises(TrustError):
        stage(Spec.model_validate({"deployment": "llama", "artifacts": [weights, plugins]}), store)
    assert not list(store.root.glob("artifacts/weights/*"))


def test_a_pinned_plugin_is_trusted(store, tmp_path, stand_in_vllm):
    stage(_spec(tmp_path, GOOD), store)
    assert check_deployment(store, "llama").verdict is Verdict.HIT


@pytest.mark.parametrize("full", [False, True])
def test_a_bundle_that_does_not_know_of_a_pin_is_untrusted(store, tmp_path, stand_in_vllm, full):
    stage(_spec(tmp_path, GOOD), store)
    [sidecar] = store.root.glob("bundles/*.json")
    body = json.loads(sidecar.read_text())
    assert body["members"][0].pop("pinned") is True
    sidecar.write_text(json.dumps(body))
    check = check_deployment(store, "llama", full=full)
    assert check.verdict is Verdict.UNTRUSTED
    assert check.reason == "my-plugins: it is code, and no pin and no trusted signature vouches for it"


def test_the_bundle_of_what_is_no_code_is_the_same_with_and_without_a_pin(store, tmp_path):
    uri, bundles = make_published(tmp_path / "weights"), set()
    for version in (None, make_manifest().version):
        artifact = {"name": "weights", "uri": uri, "version": version}
        bundles.add(stage(Spec.model_validate({"deployment": "x", "artifacts": [artifact]}), store).bundle)
    assert len(bundles) == 1


def test_a_plugin_that_works_is_tried_once_and_the_report_and_the_ledger_say_so(
    store, tmp_path, stand_in_vllm
):
    assert stage(_spec(tmp_path, GOOD), store).preflight == "passed"
    assert stage(_spec(tmp_path, GOOD), store).preflight == ""
    first, second = ledger.read(store, "stage")
    assert first["preflight"] == "passed"
    assert "preflight" in [step["step"] for step in first["steps"]]
    assert "preflight" not in second


def test_a_broken_plugin_fails_the_staging_and_what_was_live_stays_so(store, tmp_path, stand_in_vllm):
    stage(_spec(tmp_path, GOOD), store)
    before = current_bundle(store, "llama")
    with pytest.raises(PluginError, match=r"my-plugins: plugins\.models\[0\]: .*RuntimeError: no such luck"):
        stage(_spec(tmp_path, BROKEN), store)
    assert current_bundle(store, "llama") == before
    assert "no such luck" in ledger.read(store, "stage")[-1]["outcome"]
    assert len(list(store.root.glob("bundles/*.json"))) == 1


def test_where_there_is_no_vllm_the_report_says_that_nothing_was_tried(store, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    progress = Said()
    report = stage(_spec(tmp_path, BROKEN), store, progress=progress)
    assert report.preflight == "not preflighted: no vllm here"
    assert report.switched
    assert any("no vllm here" in line for line in progress.lines)


def test_only_an_artifact_of_kind_plugin_holds_plugins(tmp_path):
    with pytest.raises(ValidationError, match="only an artifact of kind plugin holds any"):
        _spec(tmp_path, GOOD, kind="files")
