"""Where an engine keeps what it compiles: all of it below one folder, `VLLM_CACHE_ROOT`, which the callback names."""

from __future__ import annotations

INSIDE = (
    "torch_compile_cache",
    "modelinfos",
    "startup_plan",
    "flashinfer_autotune_cache",
    "deep_gemm",
)
"""Folders that vLLM makes there: compiled graphs and their kernels, then what saves an engine smaller detours."""
ELSEWHERE = {"triton": ".triton/cache", "flashinfer": ".cache/flashinfer"}
"""What others would keep in the home, by its folder in an artifact: variables of ours lead them to that root, too."""
CAPTURING = "LLM_PREFETCH_CAPTURE"
"""In the environment of a replica that a cache is captured from: its engine has to compile, so nothing is installed for
it. The value is a file, for what the start was and what it had of its cache."""
