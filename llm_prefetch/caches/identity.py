"""What a compile cache was built for, and what this node and this launch are: the same facts, so that they compare.

vLLM has no stable name for the key of its compile cache, and computes it only while an engine starts. So an identity
holds what goes into that key as far as it can be told without an engine: versions, devices, arguments, paths and the
environment. It stands in the manifest of the artifact, and is checked before a byte moves and again in the replica.

A staging knows nothing of the launch: what is `None` is not known there and is not compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from llm_prefetch.caches.this_node import Node, ThisNode
from llm_prefetch.errors import ManifestError
from llm_prefetch.manifest import canonical_json

CONFIG = "config.json"
"""Of the model's files, the one that goes into the key."""
_PACKAGES = ("transformers", "flashinfer-python", "deep-gemm", "compressed-tensors", "nvidia-cutlass-dsl")
"""Beside those with a field of their own, what decides which kernels a model is compiled to."""
_SAME_GRAPH = frozenset(
    name
    for line in (
        "model tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init hf_token seed",
        "served_model_name gpu_memory_utilization kv_cache_memory_bytes load_format safetensors_load_strategy",
        "model_loader_extra_config model_weights download_dir ignore_patterns use_tqdm_on_load",
        "pt_load_map_location disable_log_stats disable_log_requests enable_log_requests max_log_len",
        "reasoning_parser reasoning_parser_plugin tool_call_parser tool_parser_plugin enable_auto_tool_choice",
        "chat_template chat_template_content_format response_role allowed_local_media_path",
        "allowed_media_domains limit_mm_per_prompt otlp_traces_endpoint",
        "tensor_parallel_size pipeline_parallel_size data_parallel_size",
    )
    for name in line.split()
)
"""Arguments of an engine that leave its graph as it is; the last line has fields of its own."""
_SIZES = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size"}
_ALSO = re.compile(r"^(TORCH(INDUCTOR|DYNAMO)_(?!CACHE_DIR$)|RAY_EXPERIMENTAL_NOSET_)")
"""Variables that enter the key beside vLLM's own."""
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
_HARMLESS = re.compile(r"^-?\d{1,8}(\.\d{1,4})?$|^(?i:true|false|none|null|auto)$")
_WORD = re.compile(r"^[A-Za-z][A-Za-z0-9_.-]{0,31}$")


class Identity(BaseModel):
    """What goes into the key of a compile cache; `None` is what is not known."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    format: Literal[1] = 1
    """Another one means that fields were added or have changed their meaning."""
    platform: str | None = None
    """`cuda`, `rocm` or `cpu`."""
    vllm: str | None = None
    torch: str | None = None
    cuda: str | None = None
    """Of the toolkit that torch was built with; empty without one."""
    triton: str | None = None
    python: str | None = None
    packages: dict[str, str] | None = None
    """Versions of others that decide how a model is compiled, of those that are installed."""
    site_packages: str | None = None
    """Where vLLM's sources lie: after loading, vLLM compares the paths that were traced."""
    gpu_name: str | None = None
    gpu_count: int | None = None
    """GPUs of a node that the cache was built on."""
    processor: tuple[str, ...] | None = None
    """On CPUs, the instruction sets that kernels in C++ are compiled for."""
    threads: int | None = None
    """On CPUs, the processors that a process may use: loops are compiled for a number of threads."""
    engine_path: str | None = None
    """The path of the model as the engine is given it."""
    config: str | None = None
    """BLAKE3 digest of the model's `config.json`; empty without one."""
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ordinals: tuple[int, ...] | None = None
    """The number of the GPU on its node, rank by rank: it is compiled in. Empty on CPUs."""
    arguments: dict[str, JsonValue] | None = None
    """Of the engine's arguments, those that may change the graph; a nested one by its path."""
    environment: dict[str, str] | None = None
    """Of the variables that enter vLLM's key, those that are set; hashed unless they are harmless."""

    @classmethod
    def of_this_node(
        cls,
        engine_path: Path | str | None = None,
        engine_kwargs: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        *,
        node: Node | None = None,
    ) -> Self:
        """Look at this node, without importing an engine; takes milliseconds.

        Args:
            engine_path: Where the model lies, or will lie.
            engine_kwargs: Those of the LLMConfig, in the replica.
            environment: That of the replica.
            node: What is asked for the facts of this node.
        """
        node, kwargs = node or ThisNode(), engine_kwargs
        platform, gpus = node.platform(), node.gpus()
        on_cpu, seen = platform == "cpu", bool(gpus) or platform == "cpu"
        packages = ((name, node.version(name)) for name in _PACKAGES)
        # Without vLLM beside us, engines run in another Python, of which nothing is known here.
        engine = node.version("vllm") is not None
        sizes = (
            {} if kwargs is None else {short: int(kwargs.get(name) or 1) for short, name in _SIZES.items()}
        )
        return cls(
            platform=platform,
            vllm=node.version("vllm"),
            torch=node.version("torch"),
            cuda=node.cuda(),
            triton=node.version("triton") if engine else None,
            python=node.python() if engine else None,
            packages={name: found for name, found in packages if found is not None} if engine else None,
            site_packages=node.site_packages(),
            gpu_name=", ".join(sorted(set(gpus))) if seen else None,
            gpu_count=len(gpus) if seen else None,
            processor=node.processor() if on_cpu else None,
            threads=node.threads() if on_cpu else None,
            engine_path=None if engine_path is None else str(engine_path),
            config=None if engine_path is None else config_digest(Path(engine_path)),
            **sizes,
            ordinals=ordinals(len(gpus), platform=platform, **sizes) if sizes else None,
            arguments=None if kwargs is None else _arguments(kwargs),
            environment=None
            if environment is None
            else _environment(environment, node.key_variables(), on_cpu=on_cpu),
        )

    def to_manifest(self) -> dict[str, Any]:
        """As it stands in a manifest: without what is not known."""
        return self.model_dump(mode="json", exclude_none=True)


def parse_identity(found: Mapping[str, Any], where: str) -> Identity:
    """The identity in a manifest.

    Raises:
        ManifestError: there is none, or one that this version cannot read.
    """
    if not found:
        raise ManifestError(
            "it does not say what it was built for",
            where=where,
            hint="capture it with `llm-prefetch capture`",
        )
    try:
        return Identity.model_validate(dict(found))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ManifestError(
            f"what it was built for cannot be read: {'.'.join(map(str, first['loc']))}: {first['msg']}",
            where=where,
            hint="use a newer llm-prefetch, or capture it again",
        ) from None


def ordinals(
    gpus: int, *, tp: int, pp: int, dp: int = 1, platform: str | None = "cuda"
) -> tuple[int, ...] | None:
    """Which GPU of its node each rank gets, where that can be told before its worker starts.

    It can where a replica has all GPUs of its nodes, or its node has one. Else Ray gives it some of them.

    Args:
        gpus: GPUs of each node.
        tp: Tensor parallel size.
        pp: Pipeline parallel size.
        dp: Data parallel size; the engines of one such replica share its nodes.
        platform: That of the engine.
    """
    if platform == "cpu":
        return ()
    if not gpus or dp > 1 or (tp * pp) % gpus:
        return None
    return tuple(range(gpus)) * (tp * pp // gpus)


def config_digest(folder: Path) -> str | None:
    """Digest of the model's configuration; empty where it has none, `None` where nothing lies there."""
    try:
        return blake3((folder / CONFIG).read_bytes()).hexdigest()
    except FileNotFoundError:
        return "" if folder.is_dir() else None
    except OSError:
        return None


def _arguments(kwargs: Mapping[str, Any]) -> dict[str, JsonValue]:
    """Those that may change the graph, sorted; what may be a secret is hashed."""
    flat = dict(_flat({name: given for name, given in kwargs.items() if name not in _SAME_GRAPH}))
    return {name: _shown(name, flat[name]) for name in sorted(flat)}


def _flat(given: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{name}.")
        elif value is not None:
            yield f"{path}{name}", value


def _shown(name: str, value: Any) -> JsonValue:  # noqa: ANN401 (whatever stands in a YAML file)
    if _SECRET.search(name.rpartition(".")[2].removesuffix("tokens")):
        return _hashed(value)
    if isinstance(value, bool | int | float) or (isinstance(value, str) and _WORD.match(value)):
        return value
    if isinstance(value, list | tuple) and all(isinstance(one, bool | int | float) for one in value):
        return list(value)
    return _hashed(value)


def _environment(given: Mapping[str, str], known: frozenset[str], *, on_cpu: bool) -> dict[str, str]:
    counts = known | ({"OMP_NUM_THREADS"} if on_cpu else frozenset())
    names = sorted(name for name in given if name in counts or _ALSO.match(name))
    return {
        name: given[name]
        if _HARMLESS.match(given[name]) and not _SECRET.search(name)
        else _hashed(given[name])
        for name in names
    }


def _hashed(value: Any) -> str:  # noqa: ANN401 (as above)
    """Equal for equal values, and says nothing else about them."""
    try:
        text = canonical_json(value)
    except (TypeError, ValueError):
        text = repr(value).encode()
    return f"blake3:{blake3(text).hexdigest()[:16]}"
