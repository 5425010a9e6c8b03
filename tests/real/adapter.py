"""A tiny LoRA adapter for the checkpoint of `tests.real.checkpoint`, in PEFT's layout.

Its weights are large and random, so whatever the base model says, with the adapter it says something else.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from tests.real.checkpoint import _bfloat16, _uniform, _write_safetensors

RANK = 8


def write_adapter(folder: Path, *, hidden: int = 256, layers: int = 2, seed: int = 7) -> Path:
    """Write an adapter for `down_proj` of each layer into `folder` (made if missing) and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    intermediate = 2 * hidden
    tensors = {}
    for layer in range(layers):
        name = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        for part, shape in (("lora_A", (RANK, intermediate)), ("lora_B", (hidden, RANK))):
            values = _uniform(f"{name}.{part}", shape, seed) / math.sqrt(shape[1])
            tensors[f"{name}.{part}.weight"] = _bfloat16(values * 8)
    _write_safetensors(folder / "adapter_model.safetensors", tensors)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny-llama",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["down_proj"],
        "bias": "none",
        "max_length": 128,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder
