"""What Ray would hand to vLLM, case by case, in one process: `python -m tests.real.engine_config CASES`.

CASES is a JSON list. Each case is an LLMConfig with our callback, taken through the hooks as Ray's `VLLMEngine.start`
does, up to the configuration of the engine. Ray's node initialisation runs its own code, but here instead of in a task
on each node, which needs a cluster. The answer is a JSON list on the last line of stdout.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from ray.llm._internal.common.utils.download_utils import STREAMING_LOAD_FORMATS, NodeModelDownloadable
from ray.llm._internal.serve.engines.vllm.vllm_engine import (
    _get_vllm_engine_config,
    _resolve_hf_model_id_from_mirror,
)
from ray.llm._internal.serve.utils import node_initialization_utils
from ray.serve.llm import LLMConfig

from llm_prefetch.leases import leased
from llm_prefetch.serve import LifecycleCallback, PrefetchCallback
from llm_prefetch.serve.adapter_loader import StagedAdapterLoader
from llm_prefetch.spec import Spec
from llm_prefetch.stage import stage
from llm_prefetch.store import open_store

ENGINE = {"dtype": "bfloat16", "max_model_len": 256, "max_num_seqs": 4, "enforce_eager": True}


async def _here(llm_config: LLMConfig) -> None:
    llm_config.get_engine_config().hf_model_id = node_initialization_utils.initialize_remote_node(llm_config)


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Start as far as `case["until"]` says: `ray` for what Ray makes of it, else the configuration of the engine."""
    llm_config = LLMConfig(
        model_loading_config={"model_id": case["model_id"], "model_source": case["model_source"]},
        engine_kwargs={**ENGINE, **case.get("engine_kwargs", {})},
        accelerator_config={"kind": "cpu"},
        placement_group_config={"bundle_per_worker": {"CPU": 1}},
        **case.get("llm_config", {}),
    )
    streams = llm_config.engine_kwargs.get("load_format") in STREAMING_LOAD_FORMATS
    download = NodeModelDownloadable.NONE if streams else NodeModelDownloadable.MODEL_AND_TOKENIZER
    kind = LifecycleCallback if "callbacks" in case["callback_kwargs"] else PrefetchCallback
    callback = kind(
        llm_config=llm_config,
        ctx_kwargs={"worker_node_download_model": download, "runtime_env": {}},
        **case["callback_kwargs"],
    )
    llm_config._callback_instance = callback
    asyncio.run(_hooks(callback, llm_config))
    engine = llm_config.get_engine_config()
    found: dict[str, Any] = {
        "run_init_node": callback.ctx.run_init_node,
        "mirror": engine.mirror_config.model_dump() if engine.mirror_config else None,
    }
    if case.get("until") == "ray":
        _resolve_hf_model_id_from_mirror(engine)
        return {**found, "model": engine.actual_hf_model_id}
    arguments, config = _get_vllm_engine_config(llm_config)
    model = config.model_config
    return {
        **found,
        **asyncio.run(_adapters(case, llm_config)),
        "model": model.model,
        "tokenizer": model.tokenizer,
        "model_weights": model.model_weights,
        "load_format": str(config.load_config.load_format),
        "served_as": arguments.served_model_name,
        "architecture": model.architecture,
        "lora_rank": config.lora_config.max_lora_rank if config.lora_config else None,
    }


async def _adapters(case: dict[str, Any], llm_config: LLMConfig) -> dict[str, Any]:
    """Where each of `case["adapters"]` is loaded from, after a later generation was staged."""
    if "adapters" not in case:
        return {}
    store = open_store()
    stage(Spec.model_validate(case["later"]), store)
    loader = StagedAdapterLoader(lora_root=case["lora_root"])
    paths, lengths = {}, {}
    for adapter in case["adapters"]:
        loaded = await loader.load_model_from_config(f"toy:{adapter}", llm_config)
        paths[adapter], lengths[adapter] = loaded.local_path, loaded.max_total_tokens
    return {"adapters": paths, "lengths": lengths, "leases": [lease.bundle for lease in leased(store)]}


async def _hooks(callback: PrefetchCallback | LifecycleCallback, llm_config: LLMConfig) -> None:
    await callback.run_callback("on_before_node_init")
    if callback.ctx.run_init_node:
        await _here(llm_config)
    await callback.run_callback("on_after_node_init")


def main(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What becomes of each case."""
    node_initialization_utils.initialize_node = _here
    answers = []
    for case in cases:
        try:
            answers.append(answer(case))
        except Exception as error:
            answers.append({"error": str(error)})
    return answers


if __name__ == "__main__":
    print("\n" + json.dumps(main(json.loads(sys.argv[1]))), flush=True)
