"""LoRA adapters that are staged: which folder holds the one a request names."""

from __future__ import annotations

from typing import Any

import pytest

from llm_prefetch.live import check_deployment
from llm_prefetch.serve.adapters import find_adapter
from llm_prefetch.spec import Spec
from llm_prefetch.stage import stage
from tests.samples import make_published

ADAPTER = {"adapter_config.json": b'{"r": 8, "max_length": 128}', "adapter_model.safetensors": b"weights"}


def adapters(tmp_path, name="my-lora", files=ADAPTER) -> dict[str, Any]:
    return {"name": name, "kind": "adapter", "uri": make_published(tmp_path / name, files)}


@pytest.fixture
def generation(store, tmp_path):
    """Stage a generation of `llama` and return its name."""
    model = {"name": "weights", "uri": make_published(tmp_path / "model")}

    def make(*others, model=model):
        stage(Spec.model_validate({"deployment": "llama", "artifacts": [model, *others]}), store)
        return check_deployment(store, "llama").bundle

    return make


def test_an_artifact_named_like_the_adapter_is_the_adapter(store, generation, tmp_path):
    bundle = generation(adapters(tmp_path))
    found = find_adapter(store, "llama", bundle, "my-lora")
    assert found is not None
    assert (found.folder, found.bundle, found.max_length) == (store.bundle(bundle) / "my-lora", bundle, 128)
    assert (found.folder / "adapter_model.safetensors").read_bytes() == b"weights"


def test_an_artifact_may_hold_a_folder_for_each_adapter_as_rays_loading_path_does(
    store, generation, tmp_path
):
    files = {f"{name}/{path}": data for name in ("one", "two:v1") for path, data in ADAPTER.items()}
    bundle = generation(adapters(tmp_path, "loras", files))
    for name in ("one", "two:v1"):
        found = find_adapter(store, "llama", bundle, name)
        assert found is not None
        assert found.folder == store.bundle(bundle) / "loras" / name
    assert find_adapter(store, "llama", bundle, "three") is None


@pytest.mark.parametrize(
    "name", ["other", "weights", "../my-lora", "my-lora/..", "/etc", "", ".", "my-lora/x"]
)
def test_what_is_not_an_adapter_of_the_deployment_is_not_found(store, generation, tmp_path, name):
    assert find_adapter(store, "llama", generation(adapters(tmp_path)), name) is None


def test_a_folder_without_an_adapters_configuration_is_none(store, generation, tmp_path):
    bundle = generation(adapters(tmp_path, files={"adapter_model.safetensors": b"weights"}))
    assert find_adapter(store, "llama", bundle, "my-lora") is None


def test_an_adapter_that_was_changed_is_left_to_ray(store, generation, tmp_path, caplog):
    bundle = generation(adapters(tmp_path))
    [file] = store.root.glob("artifacts/my-lora/b3-*/adapter_model.safetensors")
    file.chmod(0o644)
    file.write_bytes(b"Weights")
    assert find_adapter(store, "llama", bundle, "my-lora") is None
    assert "the staged adapter my-lora is CORRUPT" in caplog.text


def test_an_adapter_that_was_staged_later_for_the_same_model_is_found(store, generation, tmp_path):
    first = generation()
    assert find_adapter(store, "llama", first, "my-lora") is None
    later = generation(adapters(tmp_path))
    found = find_adapter(store, "llama", first, "my-lora")
    assert found is not None
    assert found.bundle == later


def test_an_adapter_of_a_generation_with_another_model_is_not_taken(store, generation, tmp_path):
    first = generation()
    other = {"name": "weights", "uri": make_published(tmp_path / "other", {"config.json": b"[]"})}
    generation(adapters(tmp_path), model=other)
    assert find_adapter(store, "llama", first, "my-lora") is None


def test_the_replicas_own_generation_comes_first(store, generation, tmp_path):
    first = generation(adapters(tmp_path))
    changed = adapters(tmp_path / "later", files=ADAPTER | {"adapter_model.safetensors": b"WEIGHTS"})
    generation(changed)
    found = find_adapter(store, "llama", first, "my-lora")
    assert found is not None
    assert found.bundle == first
    assert (found.folder / "adapter_model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize("config", [b"{}", b"[]", b"{", b'{"max_length": "long"}'])
def test_a_configuration_that_tells_no_length_is_vllms_to_judge(store, generation, tmp_path, config):
    bundle = generation(adapters(tmp_path, files=ADAPTER | {"adapter_config.json": config}))
    found = find_adapter(store, "llama", bundle, "my-lora")
    assert found is not None
    assert found.max_length is None
