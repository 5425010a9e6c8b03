"""What a capture takes of what an engine has left, and what it leaves out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from llm_prefetch.caches.evidence import GRAPHS
from llm_prefetch.caches.harvest import harvest
from llm_prefetch.errors import UnsafePathError, UsageError

KEY = "ab" * 32
PIECE = "torch_compile_cache/0123456789/rank_0_0/backbone"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """What vLLM 0.29 leaves on a GPU below `VLLM_CACHE_ROOT`, with what others would keep in the home."""
    root = tmp_path / "root"
    for path in (
        f"{GRAPHS}/{KEY}/rank_0_0/model",
        f"{GRAPHS}/{KEY}/inductor_cache/ab/cab.py",
        f"{GRAPHS}/{KEY}/inductor_cache/triton/0/HASH/kernel.cubin",
        f"{GRAPHS}/{KEY}/inductor_cache/locks/cab.lock",
        f"{GRAPHS}/{KEY}/rank_0_0/model.77.tmp",
        f"{PIECE}/vllm_compile_cache.py",
        f"{PIECE}/computation_graph.py",
        "modelinfos/llama.json",
        "startup_plan/startup_plan_1.json",
        "flashinfer_autotune_cache/0.6/90a/k/autotune_configs.json",
        "deep_gemm/cache/kernel.x/kernel.cubin",
        ".triton/cache/HASH/other.cubin",
        ".cache/flashinfer/0.6/90a/cached_ops/x.so",
        "gpu_p2p_access_cache_for_0,1.json",
        "dummy_cache/x",
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("12345")
    factors = {"env": {"VLLM_PLUGINS": "/home/me/plugin", "VLLM_USE_V1": True}, "code_hash": "x"}
    (root / PIECE / "cache_key_factors.json").write_text(json.dumps(factors))
    return root


def take(root: Path, tmp_path: Path) -> tuple[dict[str, tuple[int, int]], set[str]]:
    target = tmp_path / "target"
    target.mkdir()
    found = harvest(root, target)
    return dict(found.families), {
        str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()
    }


def test_every_family_is_taken_and_counted(root, tmp_path):
    families, paths = take(root, tmp_path)
    assert families == {
        "torch_compile_cache": (5, 25),
        "modelinfos": (1, 5),
        "startup_plan": (1, 5),
        "flashinfer_autotune_cache": (1, 5),
        "deep_gemm": (1, 5),
        "triton": (1, 5),
        "flashinfer": (1, 5),
    }
    assert {
        f"{GRAPHS}/{KEY}/rank_0_0/model",
        "triton/HASH/other.cubin",
        "flashinfer/0.6/90a/cached_ops/x.so",
    } <= paths
    assert len(paths) == 12


def test_locks_leftovers_and_what_is_this_nodes_alone_stay(root, tmp_path):
    _, paths = take(root, tmp_path)
    assert not [
        path for path in paths if path.endswith((".lock", ".tmp")) or "p2p" in path or "dummy" in path
    ]


def test_values_of_the_environment_stay_on_the_node(root, tmp_path):
    _, paths = take(root, tmp_path)
    assert not [path for path in paths if path.endswith("cache_key_factors.json")]
    text = (tmp_path / "target" / "key-factors.json").read_text()
    assert json.loads(text)["0123456789"]["env"]["VLLM_USE_V1"] is True
    assert "/home/me" not in text


@pytest.mark.parametrize(
    "make", [lambda path: path.symlink_to("/etc/passwd"), os.mkfifo], ids=["link", "pipe"]
)
def test_a_link_and_a_special_file_are_refused(root, tmp_path, make):
    make(root / GRAPHS / KEY / "inductor_cache" / "bad.so")
    with pytest.raises(UnsafePathError, match=r"bad\.so is a link or no regular file"):
        take(root, tmp_path)


def test_a_linked_folder_is_refused_too(root, tmp_path):
    (root / GRAPHS / KEY / "inductor_cache" / "more").symlink_to("/etc")
    with pytest.raises(UnsafePathError, match="more is a link"):
        take(root, tmp_path)


def test_an_engine_that_has_compiled_nothing_leaves_nothing_to_capture(tmp_path):
    (tmp_path / "root" / "modelinfos").mkdir(parents=True)
    (tmp_path / "root" / "modelinfos" / "x.json").write_text("{}")
    with pytest.raises(UsageError, match="compiled nothing"):
        take(tmp_path / "root", tmp_path)
