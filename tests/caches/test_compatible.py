"""Whether a cache fits: every difference by its name, with what to do about it."""

from __future__ import annotations

import pytest

from llm_prefetch.caches.compatible import compatible
from llm_prefetch.caches.identity import Identity
from llm_prefetch.record import Verdict
from tests.caches.made import GpuNode, make_identity

PRODUCED = make_identity()
STAGING = {"engine_path": None, "engine_kwargs": None, "environment": None}


def test_the_same_launch_is_a_hit():
    found = compatible(PRODUCED, make_identity())
    assert (found.verdict, found.differences, found.reason) == (Verdict.HIT, (), "")


def test_a_staging_compares_what_it_knows():
    assert compatible(PRODUCED, make_identity(**STAGING)).verdict is Verdict.HIT
    other = make_identity(GpuNode(names=("NVIDIA H100",) * 2), **STAGING)
    [difference] = compatible(PRODUCED, other).differences
    assert (difference.field, difference.produced, difference.here) == (
        "gpu_name",
        "NVIDIA A10G",
        "NVIDIA H100",
    )


@pytest.mark.parametrize(
    ("package", "field"),
    [("vllm", "vllm"), ("torch", "torch"), ("triton", "triton"), ("transformers", "packages.transformers")],
)
def test_another_version_is_named(package, field):
    here = make_identity(GpuNode(versions={**GpuNode().versions, package: "9.9"}))
    [difference] = compatible(PRODUCED, here).differences
    assert (difference.field, difference.here) == (field, "9.9")
    assert "same image" in difference.fix


@pytest.mark.parametrize(
    "field", ["platform", "cuda", "python", "site_packages", "processor", "threads", "engine_path", "config"]
)
def test_every_other_fact_counts(field):
    values = {"processor": (("avx2",), ("neon",)), "threads": (1, 2)}
    was, now = values.get(field, ("one", "two"))
    [difference] = compatible(
        PRODUCED.model_copy(update={field: was}), PRODUCED.model_copy(update={field: now})
    ).differences
    assert difference.field == field
    assert difference.fix


def test_a_changed_argument_is_named_with_both_values():
    here = make_identity(engine_kwargs={"tensor_parallel_size": 2, "max_num_seqs": 128, "dtype": "half"})
    found = compatible(PRODUCED, here)
    assert [(one.field, one.produced, one.here) for one in found.differences] == [
        ("arguments.dtype", "not set", "half"),
        ("arguments.max_num_seqs", "64", "128"),
    ]
    assert "arguments.max_num_seqs: 64 -> 128 (serve with the arguments" in found.reason


def test_a_variable_that_differs_is_named_with_what_to_do():
    [difference] = compatible(
        PRODUCED, make_identity(environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": "5601"})
    ).differences
    assert difference.field == "environment.VLLM_NIXL_SIDE_CHANNEL_PORT"
    assert "runtime_env" in difference.fix


def test_a_layout_that_only_workers_will_know_is_never_offered_a_cache():
    # One GPU of two: Ray decides which, and a graph of another one's number kills the engine.
    one = make_identity(engine_kwargs={"max_num_seqs": 64}).model_copy(update={"ordinals": (0,)})
    [difference] = compatible(one, make_identity(engine_kwargs={"max_num_seqs": 64})).differences
    assert (difference.field, difference.produced) == ("ordinals", "0")
    assert "not known" in difference.here


def test_a_cache_whose_layout_was_not_known_is_never_offered():
    unknown = PRODUCED.model_copy(update={"ordinals": None})
    assert [one.field for one in compatible(unknown, make_identity()).differences] == ["ordinals"]
    assert compatible(unknown, make_identity(**STAGING)).verdict is Verdict.INCOMPATIBLE


def test_a_staging_on_a_node_that_cannot_have_the_layout_says_so():
    found = compatible(PRODUCED, make_identity(GpuNode(names=("NVIDIA A10G",) * 8), **STAGING))
    assert [one.field for one in found.differences] == ["ordinals"]


def test_a_staging_that_sees_no_gpu_leaves_it_to_the_replica():
    blind = make_identity(GpuNode(names=(), versions={}), **STAGING)
    assert compatible(PRODUCED, blind).verdict is Verdict.HIT


def test_on_cpus_there_are_no_ordinals():
    cpu = Identity(platform="cpu", ordinals=(), tp=1, pp=1)
    assert compatible(cpu, cpu).verdict is Verdict.HIT
