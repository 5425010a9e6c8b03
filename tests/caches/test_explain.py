"""A miss, explained: the producer's list of factors against the consumer's, with the fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llm_prefetch.caches.explain import explain
from llm_prefetch.caches.factors import read_factors, shown
from llm_prefetch.caches.identity import Identity

BUILT = Identity(
    platform="cuda",
    ordinals=(0,),
    pp=1,
    vllm="0.29.0",
    engine_path="/store/live/m/weights",
    arguments={"max_num_seqs": 64},
    environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"},
    tp=1,
)
FACTORS = {
    "env": {"VLLM_NIXL_SIDE_CHANNEL_PORT": 5600, "CUDA_HOME": "blake3:aa"},
    "config_hash": "c1",
    "code_hash": "k",
}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"arguments": {"max_num_seqs": 128}}, "arguments.max_num_seqs: 64 -> 128"),
        ({"engine_path": "/mnt/m"}, "engine_path: /store/live/m/weights -> /mnt/m"),
        ({"vllm": "0.30.0"}, "vllm: 0.29.0 -> 0.30.0"),
        (
            {"environment": {"VLLM_NIXL_SIDE_CHANNEL_PORT": "5617"}},
            "environment.VLLM_NIXL_SIDE_CHANNEL_PORT: 5600 -> 5617 (it differs per replica: pin it",
        ),
        (
            {"environment": {**BUILT.environment, "VLLM_RAY_BUNDLE_INDICES": "0,1"}},
            "environment.VLLM_RAY_BUNDLE_INDICES: not set -> 0,1 (it differs per data-parallel rank",
        ),
        (
            {"environment": {**BUILT.environment, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
            "environment.RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES: not set -> 1 (Ray sets it: capture with",
        ),
        (
            {"environment": {"VLLM_NIXL_SIDE_CHANNEL_PORT": "5600", "VLLM_ENGINE_READY_TIMEOUT_S": "900"}},
            "environment.VLLM_ENGINE_READY_TIMEOUT_S: not set -> 900 (set it as where it was captured",
        ),
    ],
    ids=["argument", "engine path", "version", "port", "bundle", "noset", "other variable"],
)
def test_a_difference_is_named_with_both_values_and_the_fix(change, line):
    (difference,) = explain(BUILT, BUILT.model_copy(update=change))
    assert str(difference).startswith(line)


def test_where_nothing_that_is_written_down_differs_there_is_nothing_to_name():
    assert explain(BUILT, BUILT, {"0123456789": FACTORS}, {"9876543210": FACTORS}) == ()


def test_vllms_own_list_names_what_ours_does_not_know():
    here = {**FACTORS, "env": {**FACTORS["env"], "CUDA_HOME": "blake3:bb"}, "code_hash": "other"}
    found = explain(BUILT, BUILT, {"a": FACTORS}, {"b": here})
    assert [(one.field, one.fix) for one in found] == [
        ("environment.CUDA_HOME", "use one image for all nodes"),
        ("the traced sources", "capture again with this vLLM, these plugins and this model"),
    ]


def test_of_several_folders_the_closest_is_compared():
    far = {"env": {"A": 1, "B": 2, "C": 3}}
    assert explain(BUILT, BUILT, {"far": far, "near": FACTORS}, {"here": FACTORS}) == ()


def test_a_published_list_of_factors_says_nothing_that_is_nobodys_business():
    body = {
        "env": {
            "VLLM_USE_V1": True,
            "VLLM_ATTENTION_BACKEND": "FLASH_ATTN",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": 5600,
            "CUDA_HOME": "/opt/secret-project/cuda",
            "VLLM_API_KEY": "hunter",
            "VLLM_S3_TOKEN": 12345,
            "VLLM_PLUGINS": ["mine"],
            "VLLM_UNSET": None,
        },
        "config_hash": "c1",
        "unknown": "/home/me",
    }
    found = shown(body)
    env = found["env"]
    assert env["VLLM_USE_V1"] is True
    assert (env["VLLM_ATTENTION_BACKEND"], env["VLLM_NIXL_SIDE_CHANNEL_PORT"], env["VLLM_UNSET"]) == (
        "FLASH_ATTN", 5600, None,
    )  # fmt: skip
    hashed = ("CUDA_HOME", "VLLM_API_KEY", "VLLM_S3_TOKEN", "VLLM_PLUGINS")
    assert all(env[name].startswith("blake3:") for name in hashed)
    text = json.dumps(found)
    assert not any(secret in text for secret in ("secret-project", "hunter", "12345", "mine", "/home/me"))
    assert shown(body) == found


def test_factors_are_read_from_the_folders_of_the_piecewise_backend(tmp_path: Path):
    for rank in (0, 1):
        folder = tmp_path / "torch_compile_cache" / "0123456789" / f"rank_{rank}_0" / "backbone"
        folder.mkdir(parents=True)
        (folder / "cache_key_factors.json").write_text('{"env": {"A": 1}, "code_hash": "x"}')
    torn = tmp_path / "torch_compile_cache" / "aaaaaaaaaa" / "rank_0_0" / "backbone"
    torn.mkdir(parents=True)
    (torn / "cache_key_factors.json").write_text('{"env": {')
    assert read_factors(tmp_path) == {"0123456789": {"env": {"A": 1}, "code_hash": "x"}}
