"""What an engine is told beside the staged folder, for each way of loading; a real vLLM takes it in `tests/engine`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llm_prefetch.errors import SpecError
from llm_prefetch.serve.loading import engine_arguments, point_engine
from tests.samples import make_folder, raises

S3 = "s3://bucket/model"
META, WHOLE = {"config.json": b"{}"}, {"config.json": b"{}", "model.safetensors": b"w"}
RANKS = {"config.json": b"{}", **{f"model-rank-{rank}-part-0.safetensors": b"w" for rank in (0, 1)}}


def arguments(
    tmp_path: Path, files: dict[str, bytes], source: str | None = S3, **engine_kwargs: Any
) -> dict[str, str]:
    return engine_arguments(make_folder(tmp_path / "staged", files), source, engine_kwargs)


@pytest.mark.parametrize("load_format", [None, "auto", "safetensors", "runai_streamer"])
def test_weights_in_the_folder_are_loaded_from_it(tmp_path, load_format):
    assert arguments(tmp_path, WHOLE, load_format=load_format) == {}


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "unet/weights.safetensors", "model.gguf"]
)
def test_weights_are_known_by_their_names_wherever_they_lie(tmp_path, name):
    assert arguments(tmp_path, META | {name: b"w"}) == {}


@pytest.mark.parametrize(
    "source", [S3, "gs://bucket/model", "az://container/model", "org/model", "/mnt/model"]
)
def test_a_streamer_gets_the_source_of_weights_that_are_not_staged(tmp_path, source):
    assert arguments(tmp_path, META, source, load_format="runai_streamer") == {"model_weights": source}


@pytest.mark.parametrize(
    ("source", "load_format"),
    [
        ("abfss://container@account.dfs.core.windows.net/model", "runai_streamer"),
        ("s3://anonymous@bucket/model", "runai_streamer"),
        ("gs://bucket/model", "runai_streamer_sharded"),
        (None, "runai_streamer"),
    ],
)
def test_a_streamer_that_cannot_read_the_source_is_refused(tmp_path, source, load_format):
    with raises(SpecError, 2, "cannot stream the weights from there", "engine_kwargs.model_weights"):
        arguments(tmp_path, META, source, load_format=load_format)


def test_what_the_user_says_of_the_weights_stays(tmp_path):
    assert arguments(tmp_path, META, load_format="runai_streamer", model_weights="az://mine/model") == {}


@pytest.mark.parametrize("load_format", [None, "auto", "pt", "sharded_state"])
def test_a_folder_without_weights_is_refused_where_they_are_read_from_it(tmp_path, load_format):
    with raises(SpecError, 2, "reads the weights from the staged folder, and it holds none", "exclude"):
        arguments(tmp_path, META, load_format=load_format)


@pytest.mark.parametrize("load_format", ["dummy", "tensorizer", "a_loader_of_a_plugin"])
def test_a_format_that_does_not_read_the_folder_needs_no_weights_in_it(tmp_path, load_format):
    assert arguments(tmp_path, META, load_format=load_format) == {}


@pytest.mark.parametrize("load_format", ["sharded_state", "runai_streamer_sharded"])
def test_the_files_of_each_rank_must_be_those_that_the_engine_has(tmp_path, load_format):
    assert arguments(tmp_path, RANKS, load_format=load_format, tensor_parallel_size=2) == {}
    with raises(SpecError, 2, "ranks 0, 1", "tensor_parallel_size is 4", "save_sharded_state"):
        arguments(tmp_path, RANKS, load_format=load_format, tensor_parallel_size=4)
    with raises(SpecError, 2, "ranks 0, 1", "tensor_parallel_size is 1"):
        arguments(tmp_path, RANKS, load_format=load_format)


def test_the_files_of_each_rank_may_have_other_names(tmp_path):
    files = META | {"part-0-of-rank-0.safetensors": b"w"}
    pattern = {"pattern": "part-{part}-of-rank-{rank}.safetensors"}
    assert arguments(tmp_path, files, load_format="sharded_state", model_loader_extra_config=pattern) == {}


@dataclass
class File:
    destination_path: str


@dataclass
class Mirror:
    """Of Ray's `CloudMirrorConfig` what is used; the engine tests have the real one."""

    bucket_uri: str | None = S3
    extra_files: list[File] = field(default_factory=list)

    def model_copy(self, *, update: dict[str, Any]) -> Mirror:
        return replace(self, **update)


@dataclass
class LLMConfig:
    engine: Any
    engine_kwargs: dict[str, Any]

    def get_engine_config(self) -> Any:
        return self.engine

    def update_engine_kwargs(self, **more: Any) -> None:
        self.engine_kwargs.update(more)


def point(
    tmp_path: Path, files: dict[str, bytes], mirror: Mirror | None, **engine_kwargs: Any
) -> tuple[Any, Any]:
    llm_config = LLMConfig(SimpleNamespace(hf_model_id="org/model", mirror_config=mirror), engine_kwargs)
    ctx = SimpleNamespace(run_init_node=True)
    point_engine(llm_config, ctx, make_folder(tmp_path / "staged", files), tmp_path / "store")
    return llm_config, ctx


def test_the_engine_gets_the_folder_and_ray_nothing_to_do(tmp_path):
    llm_config, ctx = point(tmp_path, META, Mirror(), load_format="runai_streamer")
    assert vars(llm_config.engine) == {"hf_model_id": str(tmp_path / "staged"), "mirror_config": None}
    assert llm_config.engine_kwargs["model_weights"] == S3
    assert ctx.run_init_node is False


def test_nothing_is_changed_where_no_engine_can_be_made(tmp_path):
    llm_config = LLMConfig(SimpleNamespace(hf_model_id="org/model", mirror_config=None), {})
    ctx = SimpleNamespace(run_init_node=True)
    with pytest.raises(SpecError):
        point_engine(llm_config, ctx, make_folder(tmp_path / "staged", META), tmp_path)
    assert (llm_config.engine.hf_model_id, llm_config.engine_kwargs, ctx.run_init_node) == (
        "org/model",
        {},
        True,
    )


def test_ray_fetches_the_extra_files_that_no_link_stands_for_and_nothing_else(tmp_path, caplog):
    target = tmp_path / "store" / "live" / "llama" / "extra"
    target.mkdir(parents=True)
    (tmp_path / "linked").symlink_to(target)
    (tmp_path / "folder").mkdir()
    (tmp_path / "elsewhere").symlink_to(tmp_path / "folder")
    files = [File(str(tmp_path / name)) for name in ("linked", "folder", "elsewhere", "missing")]
    llm_config, ctx = point(tmp_path, WHOLE, Mirror(extra_files=files))
    assert llm_config.engine.mirror_config == Mirror(None, files[1:])
    assert llm_config.engine.hf_model_id == str(tmp_path / "staged")
    assert ctx.run_init_node is True
    assert "stage them as artifacts with a link:" in caplog.text
    llm_config, ctx = point(tmp_path, WHOLE, Mirror(extra_files=files[:1]))
    assert (llm_config.engine.mirror_config, ctx.run_init_node) == (None, False)


def test_a_part_that_the_engine_will_fetch_by_itself_is_warned_of(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="ray.serve.llm_prefetch")
    point(tmp_path, WHOLE, None, tokenizer=str(tmp_path), speculative_config={"method": "ngram"})
    assert caplog.text == ""
    point(tmp_path, WHOLE, None, tokenizer="org/tokenizer", speculative_config={"model": "org/draft"})
    assert "engine_kwargs.tokenizer: 'org/tokenizer' is no path on this node" in caplog.text
    assert "engine_kwargs.speculative_config.model: 'org/draft'" in caplog.text
