import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import deserialize

from tests.real import checkpoint
from tests.real.checkpoint import SAYS, write_checkpoint

# By path, as `tests.real` itself starts Ray and Prefect hosts and needs what they need.
SCRIPT = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("checkpoint", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.write_checkpoint(pathlib.Path(sys.argv[2]))
assert not {"torch", "transformers"} & set(sys.modules)
"""


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: (spec["dtype"], tuple(spec["shape"]), bytes(spec["data"]))
        for file in folder.glob("*.safetensors")
        for name, spec in deserialize(file.read_bytes())
    }


def test_it_has_every_file_an_engine_reads(tmp_path):
    folder = write_checkpoint(tmp_path / "new" / "folder")
    assert sorted(digests(folder)) == [
        "config.json",
        "generation_config.json",
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_the_index_names_every_tensor_where_it_is(tmp_path):
    folder = write_checkpoint(tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {n: f.name for f in folder.glob("*.safetensors") for n, _ in deserialize(f.read_bytes())}
    assert found == index["weight_map"]
    assert {dtype for dtype, _, _ in tensors(folder).values()} == {"BF16"}
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in tensors(folder).values())


def test_another_process_writes_the_same_bytes_without_torch_or_transformers(tmp_path):
    here = digests(write_checkpoint(tmp_path / "here"))
    command = [sys.executable, "-c", SCRIPT, checkpoint.__file__, str(tmp_path / "there")]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert digests(tmp_path / "there") == here


def changed(first: Path, second: Path) -> set[str]:
    before, after = digests(first), digests(second)
    return {name for name in before | after if before.get(name) != after.get(name)}


def test_another_seed_gives_other_weights_and_nothing_else(tmp_path):
    first, second = write_checkpoint(tmp_path / "0"), write_checkpoint(tmp_path / "1", seed=1)
    assert changed(first, second) == {file.name for file in first.glob("*.safetensors")}


def test_another_sentence_leaves_most_of_the_weights_as_they_are(tmp_path):
    first = write_checkpoint(tmp_path / "0")
    second = write_checkpoint(tmp_path / "1", says="We move the bytes.")
    assert changed(first, second) == {"model-00003-of-00003.safetensors", "tokenizer.json"}


@pytest.mark.parametrize("shards", [1, 2, 21])
def test_the_number_of_shards_changes_no_tensor(tmp_path, shards):
    folder = write_checkpoint(tmp_path / "other", shards=shards)
    assert len(list(folder.glob("*.safetensors"))) == shards
    assert tensors(folder) == tensors(write_checkpoint(tmp_path / "three"))


def test_it_can_be_made_bigger(tmp_path):
    folder = write_checkpoint(tmp_path, megabytes=30, shards=4, layers=3)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert size == pytest.approx(30e6, rel=0.02)


@pytest.mark.parametrize(
    "bad", [{"hidden": 100}, {"shards": 0}, {"shards": 22}, {"says": "This and that, and more"}]
)
def test_what_cannot_be_made_is_refused(tmp_path, bad):
    with pytest.raises(ValueError):
        write_checkpoint(tmp_path / "bad", **bad)
    assert not (tmp_path / "bad").exists()


@pytest.mark.engine
@pytest.mark.parametrize("says", [SAYS, "We check the bytes, and commit them."])
def test_transformers_loads_it_and_it_says_its_sentence(tmp_path, says):
    import transformers  # comes with the engine

    folder = write_checkpoint(tmp_path, says=says)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "Who are you, zebra é?"}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert (
        tokenizer.decode(prompt["input_ids"][0])
        == "<|begin|><|user|>Who are you, zebra é?<|end|><|assistant|>"
    )

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    answer = model.generate(**prompt, max_new_tokens=40)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == says
    assert answer[-1] == tokenizer.eos_token_id
