"""Nodes that cannot run here, and caches as an engine leaves them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_prefetch.caches.identity import Identity
from llm_prefetch.spec import Spec
from llm_prefetch.stage import StageReport, stage
from llm_prefetch.store import NodeStore
from tests.samples import make_folder, make_manifest, make_published, put_manifest

KEY = "5ec" + "0" * 61
GRAPH = f"torch_compile_cache/torch_aot_compile/{KEY}"
CACHE: Mapping[str, bytes] = {
    f"{GRAPH}/inductor_cache/aa/kernel.so": b"machine code, in two chunks",
    f"{GRAPH}/rank_0_0/model": b"a pickled graph",
    "flashinfer/0.6/90a/cached_ops/op.so": b"machine code",
    "modelinfos/llama.json": b"{}",
    "ours.json": b"no engine reads this",
    "torch_compile_cache/0123456789/rank_0_0/backbone/vllm_compile_cache.py": b"{}",
    "triton/ABC/kernel.cubin": b"machine code",
}
INSTALLED = (
    ".cache/flashinfer/0.6/90a/cached_ops/op.so",
    ".triton/cache/ABC/kernel.cubin",
    "modelinfos/llama.json",
    f"{GRAPH}/inductor_cache/aa/kernel.so",
    f"{GRAPH}/rank_0_0/model",
    "torch_compile_cache/0123456789/rank_0_0/backbone/vllm_compile_cache.py",
)
ANY = Identity(ordinals=())
"""Of a cache that says of nothing what it has to be: it fits whatever node this test runs on."""
KWARGS = {"tensor_parallel_size": 2, "max_num_seqs": 64}


@dataclass(frozen=True)
class GpuNode:
    """A node with GPUs, as `llm_prefetch.caches.this_node.Node` describes it."""

    names: tuple[str, ...] = ("NVIDIA A10G", "NVIDIA A10G")
    versions: Mapping[str, str] = field(
        default_factory=lambda: {
            "vllm": "0.29.0",
            "torch": "2.13.0",
            "triton": "3.9.0",
            "transformers": "5.0",
        }
    )

    def platform(self) -> str | None:
        return "cuda" if "torch" in self.versions else None

    def version(self, package: str) -> str | None:
        return self.versions.get(package)

    def cuda(self) -> str | None:
        return "13.0" if "torch" in self.versions else None

    def python(self) -> str:
        return "3.11.9"

    def site_packages(self) -> str | None:
        return "/opt/venv/lib/python3.11/site-packages" if "vllm" in self.versions else None

    def gpus(self) -> tuple[str, ...]:
        return self.names

    def processor(self) -> tuple[str, ...]:
        return ("avx2",)

    def threads(self) -> int:
        return 8

    def key_variables(self) -> frozenset[str]:
        return frozenset({"VLLM_USE_DEEP_GEMM", "VLLM_NIXL_SIDE_CHANNEL_PORT", "CUDA_HOME"})


class CpuNode(GpuNode):
    """A node without any."""

    def platform(self) -> str | None:
        return "cpu"

    def gpus(self) -> tuple[str, ...]:
        return ()


def make_identity(node: GpuNode | None = None, **given: Any) -> Identity:
    """Of a launch on a node with GPUs."""
    facts = {"engine_path": "/models/llama", "engine_kwargs": KWARGS, "environment": {}} | given
    return Identity.of_this_node(node=node or GpuNode(), **facts)


def publish_cache(
    folder: Path, identity: Identity | None, files: Mapping[str, bytes] = CACHE
) -> tuple[str, str]:
    """A published cache in small chunks; its URI and version."""
    make_folder(folder, files)
    manifest = make_manifest(files, **(identity.to_manifest() if identity else {}))
    put_manifest(folder, manifest.to_json())
    return f"file://{folder}", manifest.version


def make_spec(origin: Path, cache: tuple[str, str], weights: str = "", **options: Any) -> Spec:
    """`llama`, with its weights and a pinned cache."""
    uri, version = cache
    artifacts = [
        {"name": "compile", "kind": "compile-cache", "uri": uri, "version": version, **options},
        {"name": "weights", "uri": weights or make_published(origin / "weights")},
    ]
    return Spec.model_validate({"deployment": "llama", "artifacts": artifacts})


def stage_cache(store: NodeStore, origin: Path, identity: Identity | None, **options: Any) -> StageReport:
    """Publish and stage."""
    return stage(make_spec(origin, publish_cache(origin / "cache", identity), **options), store)
