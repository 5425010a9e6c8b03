"""What importing the callback costs a replica, and where it finds Ray's classes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FORBIDDEN = (
    "prefect", "vllm", "torch", "obstore", "huggingface_hub", "fsspec", "boto3", "botocore", "httpx", "rich",
    "ray.serve", "ray.llm._internal.serve", "flows", "llm_prefetch.cli", "llm_prefetch.cluster",
)  # fmt: skip


def _python(code: str, *paths: Path) -> str:
    path = os.pathsep.join(map(str, [*paths, REPOSITORY]))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_callback_loads_nothing_heavy():
    loaded = _python(
        "import sys, ray, pydantic; before = set(sys.modules); import llm_prefetch.serve;"
        f"print([name for name in {FORBIDDEN!r} if name in set(sys.modules) - before])"
    )
    assert loaded == "[]"


def test_a_whole_hit_loads_nothing_heavy_either(staged):
    loaded = _python(
        "import asyncio, sys, ray, pydantic; before = set(sys.modules);"
        "from llm_prefetch.serve import PrefetchCallback as C; from types import SimpleNamespace as S;"
        "engine = S(hf_model_id=None, mirror_config=None);"
        "c = C(S(get_engine_config=lambda: engine, engine_kwargs={}), deployment='llama');"
        "asyncio.run(c.run_callback('on_before_node_init'));"
        "asyncio.run(c.run_callback('on_after_node_init'));"
        f"print(c.ctx.run_init_node, [name for name in {FORBIDDEN!r} if name in set(sys.modules) - before])"
    )
    assert loaded == "False []"


def test_ray_2_60_keeps_its_callback_in_an_internal_module():
    base = _python("from llm_prefetch.serve import PrefetchCallback as C; print(C.__mro__[1].__module__)")
    assert base == "ray.llm._internal.common.callbacks.base"


def test_the_documented_module_is_used_where_ray_has_it(tmp_path):
    # A Ray as its guide describes it, of which only the module in question has a content.
    for folder in ("ray", "ray/serve", "ray/serve/llm"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "ray/serve/llm/callbacks.py").write_text(
        "class CallbackBase: pass\nclass CallbackCtx: pass\n"
    )
    base = _python(
        "from llm_prefetch.serve import PrefetchCallback as C; print(C.__mro__[1].__module__)", tmp_path
    )
    assert base == "ray.serve.llm.callbacks"
