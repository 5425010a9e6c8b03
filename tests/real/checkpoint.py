"""A tiny but real Llama checkpoint: safetensors shards, an index, a tokenizer and a chat template.

Nothing is downloaded and neither torch nor transformers is needed. The bytes depend on the arguments alone: the
weights come from PCG64's raw bits, whose stream numpy guarantees, and each tensor is seeded by its own name, so
neither the number of shards nor the number of layers changes a tensor that both checkpoints have.

The weights are chosen, not trained. The output head maps each word of `says` to the one after it, so that greedy
decoding of any chat answers with exactly that sentence. A test can therefore tell *which* weights an engine loaded,
and two checkpoints that differ only in `says` make two versions of one model.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAYS = "This answer comes from weights that were staged before the replica started."
MAX_POSITIONS = 512
VOCABULARY = 512
HEAD_DIM = 64  # vLLM's CPU attention takes 32, 64, 80, 96, 112, 128 and a few larger ones

_SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
_PAD, _BEGIN, _END, _ASSISTANT = 0, 1, 2, 5
_CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_TEXT = """\
Hello, what is the capital of France? Say hi. Please tell me a short story about one small model, and who you are.
A replica of a large model takes minutes to start. We move the bytes ahead of that, check them, and commit them.
"""

_Tensors = dict[str, tuple[int, ...]]


def write_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    shards: int = 3,
    hidden: int = 256,
    layers: int = 2,
    megabytes: float | None = None,
    says: str = SAYS,
) -> Path:
    """Write a Llama checkpoint into `folder` (made if missing) and return it.

    `hidden` is a multiple of 128. With `megabytes` the MLP is widened until all weights take about that many MB
    (10**6 bytes; without it, about 3). `says` is what greedy decoding answers: words that do not repeat.
    """
    if hidden % (2 * HEAD_DIM):
        raise ValueError(f"hidden must be a multiple of {2 * HEAD_DIM}, not {hidden}")
    tokenizer = _tokenizer(says)
    said = tokenizer.encode(says, add_special_tokens=False).ids
    if len(set(said)) != len(said):
        raise ValueError(f"says must not repeat a word, and this does: {says!r}")

    intermediate = 2 * hidden
    if megabytes is not None:
        rest = sum(math.prod(s) for s in _shapes(hidden, layers, 0).values())
        wanted = (megabytes * 1e6 / 2 - rest) / (3 * hidden * layers)
        intermediate = max(64, round(wanted / 64) * 64)
    shapes = _shapes(hidden, layers, intermediate)
    if not 1 <= shards <= len(shapes):
        raise ValueError(f"shards must be between 1 and {len(shapes)}, not {shards}")

    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(_split(shapes, shards), start=1):
        file = f"model-{number:05}-of-{shards:05}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        _write_safetensors(
            folder / file, {name: _bfloat16(_values(name, shapes[name], seed, said)) for name in names}
        )

    total = 2 * sum(math.prod(shape) for shape in shapes.values())
    _write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )
    _write_json(folder / "config.json", _config(hidden, layers, intermediate))
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": _BEGIN, "eos_token_id": _END, "pad_token_id": _PAD, "do_sample": False},
    )
    specials = {"bos_token": _SPECIAL[_BEGIN], "eos_token": _SPECIAL[_END], "pad_token": _SPECIAL[_PAD]}
    _write_json(folder / "special_tokens_map.json", specials)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_POSITIONS,
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT_TEMPLATE,
            **specials,
        },
    )
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    return folder


def _tokenizer(says: str) -> Tokenizer:
    """A byte-level BPE in which every word of the text above and of `says` is one token."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=1,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in _SPECIAL],
        initial_alphabet=sorted(ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([*_TEXT.splitlines(), SAYS, says], trainer)
    return tokenizer


def _shapes(hidden: int, layers: int, intermediate: int) -> _Tensors:
    kv = hidden // 2
    shapes: _Tensors = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (intermediate, hidden),
            f"{prefix}.mlp.up_proj.weight": (intermediate, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, intermediate),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (VOCABULARY, hidden)}


def _split(shapes: _Tensors, shards: int) -> Iterator[list[str]]:
    """Cut the tensors, in order, into `shards` runs of about the same size, none of them empty."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    names, left = list(sizes), sum(sizes.values())
    for others in range(shards - 1, -1, -1):
        run = [names.pop(0)]
        while names and others < len(names):
            with_next = sum(sizes[name] for name in run) + sizes[names[0]]
            if others and with_next - sizes[names[0]] / 2 > left / (others + 1):
                break
            run.append(names.pop(0))
        left -= sum(sizes[name] for name in run)
        yield run


def _values(name: str, shape: tuple[int, ...], seed: int, said: list[int]) -> NDArray[np.float32]:
    """The weights of one tensor.

    The residual stream carries the embedding of the current token almost unchanged (`o_proj` and `down_proj` are
    small), so the head sees which token it was and answers with the one that follows it in `said`.
    """
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    if name == "lm_head.weight":
        head = 0.002 * _uniform(name, shape, seed)
        embeddings = _values("model.embed_tokens.weight", shape, seed, said)
        for before, after in pairwise([_ASSISTANT, *said, _END]):
            head[after] += embeddings[before] * np.float32(24 / shape[1])
        return head
    if name == "model.embed_tokens.weight":
        return _uniform(name, shape, seed)
    gain = 0.1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
    return _uniform(name, shape, seed) * np.float32(gain / math.sqrt(shape[1]))


def _uniform(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """Uniform numbers of mean 0 and variance 1, a function of the name and the seed."""
    count = math.prod(shape)
    raw = np.random.PCG64([seed, zlib.crc32(name.encode())]).random_raw(-(-count // 4))
    bits = raw.astype("<u8").view("<u2")[:count]
    scale = np.float32(math.sqrt(12) / 65536)
    return ((bits.astype(np.float32) - np.float32(32767.5)) * scale).reshape(shape)


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the nearest bfloat16 (ties to even), as its 16 bits; numpy has no such type."""
    bits: NDArray[np.uint32] = values.astype("<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _write_safetensors(path: Path, tensors: dict[str, NDArray[np.uint16]]) -> None:
    """Written by hand: safetensors' numpy front end cannot write bfloat16, and its raw one changed in 0.8."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, bits in tensors.items():
        start, end = end, end + bits.nbytes
        header[name] = {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for bits in tensors.values():
            file.write(bits.data)


def _config(hidden: int, layers: int, intermediate: int) -> dict[str, Any]:
    heads = hidden // HEAD_DIM
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": _BEGIN,
        "eos_token_id": _END,
        "pad_token_id": _PAD,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
