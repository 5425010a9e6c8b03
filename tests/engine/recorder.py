"""A callback with all eight hooks that runs in a real replica; it writes down what it sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llm_prefetch.serve.lifecycle import HOOKS


class Recorder:
    """Appends one JSON line per hook to `path`, and sets an engine argument."""

    def __init__(self, path: str, max_model_len: int) -> None:
        """`max_model_len` is what the engine shall get instead of what the YAML says."""
        self.path, self.max_model_len, self.count = Path(path), max_model_len, 0

    def see(self, hook: str, ctx: Any) -> None:
        if hook == "on_pre_engine_init":
            ctx.extra_init_kwargs["max_model_len"] = self.max_model_len
        self.count += 1
        row = {
            "hook": hook,
            "count": self.count,
            "placement_group": ctx.placement_group is not None,
            "download_result": ctx.download_result,
            "run_init_node": ctx.run_init_node,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


for _hook in HOOKS:
    setattr(Recorder, _hook, lambda self, ctx, hook=_hook: self.see(hook, ctx))
