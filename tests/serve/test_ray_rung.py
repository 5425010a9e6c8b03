"""The rung `ray`: Ray downloads, and no engine starts on what is not a whole model."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
from pathlib import Path

import pytest

from llm_prefetch import manifest as manifests
from tests.samples import FILES, flip_byte, make_folder, make_manifest, put_manifest
from tests.serve.conftest import refused, row, safetensors


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, logger="ray.serve.llm_prefetch")
    return caplog


def test_what_ray_downloaded_is_used_when_it_is_whole(make, store, rows, log):
    start = make(on_miss=["ray"])
    start.run()
    assert start.by_ray
    assert start.callback.ctx.run_init_node is False
    assert row(rows)[:2] == ("MISSING", "ray")
    assert "only names and lengths were checked; it is not committed" in log.text


def model(folder: Path, **files: bytes | None) -> None:
    """A model of two shards; a file that is `None` is missing."""
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    content = {
        names["a"]: safetensors(),
        names["b"]: safetensors(b"the other one"),
        "model.safetensors.index.json": (
            b'{"weight_map": {"x": "model-00001-of-00002.safetensors", "y": "model-00002-of-00002.safetensors"}}'
        ),
    }
    content |= {names.get(name, name.replace("__", ".")): data for name, data in files.items()}
    make_folder(folder, {name: data for name, data in content.items() if data is not None})


UNWHOLE = {
    "a shard is missing": ({"b": None}, "'model-00002-of-00002.safetensors', which .* is missing"),
    "a shard is cut": ({"b": safetensors()[:-1]}, "model-00002-of-00002.safetensors' has"),
    "a shard is too long": ({"b": safetensors() + b"!"}, "model-00002-of-00002.safetensors' has"),
    "a shard is empty": ({"a": b""}, "model-00001-of-00002.safetensors' has no header"),
    "a shard is a page of HTML": ({"a": b"<html>" * 9}, "no header of safetensors"),
    "the index is cut": ({"model__safetensors__index__json": b"{"}, "cannot be read"),
    "the index is of something else": ({"model__safetensors__index__json": b"[]"}, "no weight_map"),
    "the config is cut": ({"config__json": b"{"}, "'config.json' cannot be read"),
    "the config is no config": ({"config__json": b"[]"}, "'config.json' is not a JSON object"),
}  # fmt: skip


@pytest.mark.parametrize(("files", "reason"), UNWHOLE.values(), ids=UNWHOLE)
def test_no_engine_starts_on_a_download_that_is_not_whole(make, ray, store, rows, files, reason):
    ray.bring = lambda folder: model(folder, **files)
    message = refused(make(on_miss=["ray"]), reason)
    assert "what Ray downloaded is not whole" in message
    assert row(rows)[1] == "fail"
    assert rows("engine")[0]["outcome"].startswith("failed")


def test_a_folder_with_a_config_alone_is_no_model(make, ray, store):
    ray.bring = lambda folder: None
    refused(make(on_miss=["ray"]), "it holds no weights")


def test_a_whole_model_of_several_shards_is_accepted(make, ray, store):
    ray.bring = model
    start = make(on_miss=["ray"])
    start.run()
    assert start.by_ray


def published(folder: Path) -> None:
    """What Ray downloads from a prefix that was published: its manifest comes with it."""
    make_folder(folder)
    put_manifest(folder, make_manifest().to_json())


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: flip_byte(folder / "layers/0/weights.bin"), "layers/0/weights.bin' is not what the man"),
        (lambda folder: (folder / "layers/1/weights.bin").unlink(), "'layers/1/weights.bin' is missing"),
        (lambda folder: (folder / "config.json").write_text("{}"), "'config.json' has 2 bytes, not 8"),
        (lambda folder: (folder / "old.safetensors").write_bytes(b""), "'old.safetensors' does not belong to it"),
        (lambda folder: put_manifest(folder, b"no json"), "manifest"),
    ],
)  # fmt: skip
def test_a_download_that_differs_from_its_manifest_is_refused(make, ray, store, spoil, reason):
    def bring(folder):
        published(folder)
        spoil(folder)

    ray.bring = bring
    refused(make(on_miss=["ray"]), reason)


def test_a_download_that_is_what_its_manifest_says_is_accepted(make, ray, store, log):
    ray.bring = published
    start = make(on_miss=["ray"])
    start.run()
    assert start.by_ray
    assert f"its {len(FILES)} files are those of the manifest {make_manifest().version[:15]}" in log.text
    assert (ray.folder / manifests.PATH).exists()


def test_when_ray_has_found_no_model_the_engine_is_not_sent_to_the_hub(make, ray, store):
    def bring(folder):
        shutil.rmtree(folder)

    ray.bring = bring
    refused(make(on_miss=["ray"]), "Ray has downloaded no model")


def test_a_model_of_the_hub_is_left_to_vllm(make, ray, store):
    start = make(on_miss=["ray"])
    start.engine.mirror_config = None
    start.run()
    assert ray.calls == 1


def test_an_error_of_rays_download_is_the_reason(make, ray, store):
    async def fail():
        raise RuntimeError("no credentials")

    ray.wait = fail
    refused(make(on_miss=["ray"]), "ray failed: RuntimeError: no credentials")


def test_rays_download_ends_at_its_deadline(make, ray, store):
    ray.wait = lambda: asyncio.sleep(1000)
    refused(
        make(on_miss=["ray"], deadlines={"ray": 0.2}), "ray gave up after 0.2 s: Ray initialises the nodes"
    )


def test_the_budget_bounds_rays_download_too(make, ray, store):
    ray.wait = lambda: asyncio.sleep(1000)
    refused(make(on_miss=["wait", "ray"], budget_seconds=1), r"ray gave up after (0|1 s)")


def test_where_another_callback_does_without_rays_download_it_is_not_done(make, ray, store):
    start = make(on_miss=["ray"])
    start.callback.ctx.run_init_node = False
    start.run()
    assert start.untouched


def test_what_ray_downloads_by_itself_is_judged_after_it(make, ray, store, monkeypatch):
    # A Ray that keeps its node initialisation elsewhere.
    monkeypatch.setitem(sys.modules, "ray.llm._internal.serve.utils.node_initialization_utils", None)
    start = make(on_miss=["ray"])
    start.run()
    assert start.by_ray
    ray.bring = lambda folder: (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(Exception, match="no header of safetensors"):
        make(on_miss=["ray"]).run()
