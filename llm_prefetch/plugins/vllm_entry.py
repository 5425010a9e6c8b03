"""Our entry point of `vllm.general_plugins`, which vLLM runs in each of its processes, on every start.

Without a decision of a replica it does nothing and imports nothing. What it raises ends the process, as it should:
an engine without the parser or model that it was given would fail later, and say less.
"""

from __future__ import annotations

import os

GROUP, NAME = "vllm.general_plugins", "llm_prefetch"
VARIABLE = "LLM_PREFETCH_PLUGINS"


def register() -> None:
    """Register in this process what the replica decided.

    Raises:
        PluginError: something of it is not on this node.
    """
    text = os.environ.get(VARIABLE)
    if text:
        from llm_prefetch.plugins.decision import register_decided

        register_decided(text)
