"""Register plugins with a real vLLM, case by case, in one process: `python -m tests.real.vllm_plugins CASES`.

CASES is a JSON list; each case has what `install_plugins` takes, and `env`. The answer is a JSON list on the last
line of stdout: what was registered or the error, and what the engine's processes would be told.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from llm_prefetch.errors import PrefetchError
from llm_prefetch.live import check_deployment
from llm_prefetch.plugins.options import PluginNames
from llm_prefetch.plugins.vllm_entry import VARIABLE
from llm_prefetch.serve.plugins import install_plugins
from llm_prefetch.store import open_store


def main(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What becomes of each case."""
    store = open_store()
    check = check_deployment(store, "toy")
    answers = []
    for case in cases:
        os.environ.update(case.get("env", {}))
        runtime_env: dict[str, Any] = {}
        answer: dict[str, Any] = {"registered": [], "error": "", "type": ""}
        try:
            answer["registered"] = install_plugins(
                PluginNames.model_validate(case.get("parsers", {})),
                engine_kwargs=case.get("engine_kwargs", {}),
                runtime_env=runtime_env,
                check=check,
                store=store,
                seconds=case.get("seconds", 300),
            )
        except PrefetchError as error:
            answer |= {"error": str(error), "type": type(error).__name__}
        told = os.environ.pop(VARIABLE, "")
        answer["told"] = [plugin["name"] for plugin in json.loads(told)["plugins"]] if told else []
        answer["same"] = runtime_env.get("env_vars", {}).get(VARIABLE, "") == told
        for name in case.get("env", {}):
            os.environ.pop(name)
        answers.append(answer)
    answers.append(
        {
            "reasoning": ReasoningParserManager.list_registered(),
            "tool": ToolParserManager.list_registered(),
            "imported": sorted(name for name in sys.modules if name.startswith("llm_prefetch_plugins.")),
        }
    )
    return answers


if __name__ == "__main__":
    print("\n" + json.dumps(main(json.loads(sys.argv[1]))), flush=True)
