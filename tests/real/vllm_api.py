"""An engine and its API layer as a Serve replica has them, in one process: `python -m tests.real.vllm_api REQUEST`.

What Ray's `VLLMEngine.start` does, without Ray: register the plugins as the callback does, make the configuration,
start EngineCore in a process of its own, make vLLM's chat serving, ask it. REQUEST is JSON; so is the answer, on the
last line of stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from starlette.datastructures import State
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.entrypoints.openai.api_server import init_app_state
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.v1.engine.async_llm import AsyncLLM

from llm_prefetch.live import check_deployment
from llm_prefetch.plugins.options import PluginNames
from llm_prefetch.serve.plugins import install_plugins
from llm_prefetch.store import open_store

ENGINE: dict[str, Any] = {
    "served_model_name": ["toy"],
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "enforce_eager": True,
    "distributed_executor_backend": "mp",
}


async def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Start as a replica of `request["deployment"]`, and return what was registered and what it answers."""
    store = open_store()
    check = check_deployment(store, request["deployment"])
    engine_kwargs = {"model": str(store.engine_path(check.deployment, "weights")), **request["engine_kwargs"]}
    registered = install_plugins(
        PluginNames.model_validate(request["parsers"]), engine_kwargs=engine_kwargs, check=check, store=store
    )
    engine_args = AsyncEngineArgs(**ENGINE, **engine_kwargs)
    config = engine_args.create_engine_config()
    engine = AsyncLLM.from_vllm_config(config)
    try:
        state = State()
        args = argparse.Namespace(**(vars(FrontendArgs()) | vars(engine_args)))
        tasks = await engine.get_supported_tasks()
        await init_app_state(engine, state=state, args=args, supported_tasks=tasks)
        answers = [await _chat(state.openai_serving_chat, chat) for chat in request["chats"]]
        architecture = config.model_config.architecture
    finally:
        engine.shutdown()
    return {"registered": registered, "architecture": architecture, "answers": answers}


async def _chat(serving: Any, more: dict[str, Any]) -> dict[str, Any]:
    chat = {"model": "toy", "messages": [{"role": "user", "content": "Say hi."}], "temperature": 0, **more}
    response = await serving.create_chat_completion(ChatCompletionRequest(**chat))
    if not chat.get("stream"):
        message: dict[str, Any] = response.choices[0].message.model_dump()
        return message
    said: dict[str, str] = {"reasoning": "", "content": ""}
    async for line in response:
        body = line.removeprefix("data: ").strip()
        for choice in json.loads(body)["choices"] if body != "[DONE]" else []:
            for part in said:
                said[part] += choice["delta"].get(part) or ""
    return said


if __name__ == "__main__":
    print("\n" + json.dumps(asyncio.run(answer(json.loads(sys.argv[1])))), flush=True)
