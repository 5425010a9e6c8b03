"""A model class that is not in vLLM's tree: a Llama under an architecture of its own.

The `architectures` of the model's config.json name `HouseLlamaForCausalLM`, which vLLM does not know. Publish this
folder, stage it as an artifact of kind `plugin`, and name the class in the Serve YAML: see out-of-tree-model.yaml
beside this folder. A real one changes layers; this one only shows the way.
"""

from __future__ import annotations

from vllm.model_executor.models.llama import LlamaForCausalLM


class HouseLlamaForCausalLM(LlamaForCausalLM):
    """Loads and computes as a Llama."""
