"""Each way of loading in Ray's guide, on a staged node and on another: what the engine is given, by Ray's and vLLM's code.

Nothing is started: each case goes as far as the configuration that Ray hands to vLLM. All of them share one process,
because importing vLLM takes longer than all of the rest.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llm_prefetch.live import history
from llm_prefetch.sealing import seal_prefix
from llm_prefetch.spec import Spec
from llm_prefetch.stage import stage
from llm_prefetch.store import NodeStore, open_store
from tests.real.adapter import write_adapter
from tests.real.checkpoint import write_checkpoint
from tests.real.s3 import S3Server, s3_server
from tests.real.warm import share_model_infos
from tests.samples import flip_byte

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]
S3, GCS = "s3://models/toy", "gs://models/toy"
_IN_BUCKET = {"toy": "model", "ranks": "ranks", "extra": "adapter", "adapters/in-bucket": "adapter"}
NO_WEIGHTS = {"exclude": ["*.safetensors"]}


def _case(
    source: Any, load_format: str | None = None, deployment: str = "toy", **more: Any
) -> dict[str, Any]:
    kwargs = {"load_format": load_format} if load_format else {}
    return {
        "model_id": more.pop("model_id", "toy"),
        "model_source": source,
        "engine_kwargs": {**kwargs, **more.pop("engine_kwargs", {})},
        "callback_kwargs": {"deployment": deployment, "on_miss": ["ray"]},
        **more,
    }


def _missed(source: Any, load_format: str | None = None, model_id: str = "missed") -> dict[str, Any]:
    return _case(source, load_format, deployment="elsewhere", model_id=model_id, until="ray")


def _cloud_downloader(folder: Path) -> dict[str, Any]:
    paths = [["s3://models/extra", str(folder / "cloud")]]
    kind = "ray.llm._internal.common.callbacks.cloud_downloader.CloudDownloader"
    return {"callback_class": kind, "callback_kwargs": {"paths": paths}}


def _ours(callback_kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"callback_class": "llm_prefetch.serve.PrefetchCallback", "callback_kwargs": callback_kwargs}


def _lora(folder: Path, *adapters: str) -> dict[str, Any]:
    weights = {"name": "weights", "uri": f"file://{folder / 'model'}"}
    others = [{"name": name, "kind": "adapter", "uri": f"file://{folder / 'adapter'}"} for name in adapters]
    return {"deployment": "lora", "artifacts": [weights, *others]}


def _cases(folder: Path) -> dict[str, dict[str, Any]]:
    mirror = {"bucket_uri": S3}
    extra = [
        {"bucket_uri": "s3://models/extra", "destination_path": str(folder / name)} for name in ("a", "b")
    ]
    return {
        "hub": _case("meta-llama/Meta-Llama-3-8B-Instruct"),
        "hub by model_id": _case(None),
        "s3": _case(mirror),
        "s3 as text": _case(S3),
        "gcs": _case({"bucket_uri": GCS}),
        "path": _case(str(folder / "model")),
        "staged, streamer": _case(mirror, "runai_streamer"),
        "bare, streamer": _case(mirror, "runai_streamer", "bare"),
        "bare, streamer, as text": _case(GCS, "runai_streamer", "bare"),
        "bare, sharded streamer": _case(mirror, "runai_streamer_sharded", "bare"),
        "bare, tensorizer": _case(mirror, "tensorizer", "bare"),
        "bare, dummy": _case(mirror, "dummy", "bare"),
        "bare, auto": _case(mirror, None, "bare"),
        "bare, sharded streamer, gcs": _case(GCS, "runai_streamer_sharded", "bare"),
        "ranks": _case(mirror, "sharded_state", "ranks"),
        "ranks, streamer": _case(mirror, "runai_streamer_sharded", "ranks"),
        "ranks, two wanted": _case(
            mirror, "sharded_state", "ranks", engine_kwargs={"tensor_parallel_size": 2}
        ),
        "lora": _case(
            mirror,
            deployment="lora",
            engine_kwargs={"enable_lora": True, "max_lora_rank": 8},
            llm_config={"lora_config": {"dynamic_lora_loading_path": "s3://models/adapters"}},
            adapters=["my-lora", "late-lora", "in-bucket"],
            later=_lora(folder, "my-lora", "late-lora"),
            lora_root=str(folder / "lora"),
        ),
        "extra files": _case({**mirror, "extra_files": extra[:1]}),
        "extra files, one is not linked": _case({**mirror, "extra_files": extra}),
        "cloud downloader": {
            **_case(mirror),
            "callback_kwargs": {
                "callbacks": [_cloud_downloader(folder), _ours(_case(mirror)["callback_kwargs"])]
            },
        },
        "miss: hub": _missed("org/model"),
        "miss: path": _missed(str(folder / "model")),
        "miss: published path": _missed(str(folder / "published")),
        "miss: spoilt path": _missed(str(folder / "spoilt")),
        "miss: s3": _missed(mirror, model_id="missed-s3"),
        "miss: ranks": _missed({"bucket_uri": "s3://models/ranks"}, "sharded_state", "missed-ranks"),
        "miss: streamer": _missed(mirror, "runai_streamer"),
        "miss: sharded streamer as text": _missed(S3, "runai_streamer_sharded"),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ways")


@pytest.fixture(scope="module")
def store(folder: Path) -> NodeStore:
    """`toy` is a whole model; `bare` has no weights, `ranks` those of one rank, `lora` an adapter beside."""
    model = write_checkpoint(folder / "model")
    ranks = folder / "ranks"
    shutil.copytree(model, ranks, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copy(model / "model-00001-of-00003.safetensors", ranks / "model-rank-0-part-0.safetensors")
    for name in ("published", "spoilt"):
        shutil.copytree(model, folder / name)
        seal_prefix(f"file://{folder / name}")
    flip_byte(folder / "spoilt" / "model-00002-of-00003.safetensors")
    adapter = write_adapter(folder / "adapter")
    store = open_store(folder / "store", create=True)
    weights = {"name": "weights", "uri": f"file://{model}"}
    linked = {"name": "a", "kind": "files", "uri": f"file://{adapter}", "link": str(folder / "a")}
    for deployment, artifacts in {
        "toy": [weights, linked],
        "bare": [weights | NO_WEIGHTS],
        "ranks": [{"name": "weights", "uri": f"file://{ranks}"}],
        "lora": _lora(folder, "my-lora")["artifacts"],
    }.items():
        stage(Spec.model_validate({"deployment": deployment, "artifacts": artifacts}), store)
    return store


@pytest.fixture(scope="module")
def bucket(folder: Path, store: NodeStore) -> Iterator[S3Server]:
    """What Ray downloads where nothing is staged; it has no manifests."""
    with s3_server() as server:
        server.create_bucket("models")
        for name, source in _IN_BUCKET.items():
            for file in (folder / source).iterdir():
                server.put("models", f"{name}/{file.name}", file.read_bytes())
        yield server


@pytest.fixture(scope="module")
def answers(folder: Path, store: NodeStore, bucket: S3Server) -> dict[str, dict[str, Any]]:
    cases = _cases(folder)
    share_model_infos(folder)
    done = subprocess.run(
        [sys.executable, "-m", "tests.real.engine_config", json.dumps(list(cases.values()))],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "AWS_"))},
            "PYTHONPATH": str(REPOSITORY), "LLM_PREFETCH_ROOT": str(store.root), "HOME": str(folder),
            **bucket.env, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        },
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return dict(zip(cases, json.loads(done.stdout.strip().splitlines()[-1]), strict=True))


@pytest.mark.parametrize(
    "way", ["hub", "hub by model_id", "s3", "s3 as text", "gcs", "path", "staged, streamer"]
)
def test_a_staged_model_takes_the_place_of_what_the_yaml_names_whatever_that_is(answers, store, way):
    found = answers[way]
    path = str(store.root / "live" / "toy" / "weights")
    assert (found["model"], found["tokenizer"], found["model_weights"]) == (path, path, "")
    assert found["served_as"] == ["toy"]
    assert found["architecture"] == "LlamaForCausalLM"
    assert (found["mirror"], found["run_init_node"]) == (None, False)


@pytest.mark.parametrize(
    ("way", "load_format", "source"),
    [
        ("bare, streamer", "runai_streamer", S3),
        ("bare, streamer, as text", "runai_streamer", GCS),
        ("bare, sharded streamer", "runai_streamer_sharded", S3),
    ],
)
def test_a_streamer_streams_the_weights_that_are_not_staged_and_finds_the_rest_on_the_node(
    answers, store, way, load_format, source
):
    found = answers[way]
    path = str(store.root / "live" / "bare" / "weights")
    assert (found["model"], found["tokenizer"], found["model_weights"]) == (path, path, source)
    assert found["load_format"] == load_format
    assert found["run_init_node"] is False


@pytest.mark.parametrize("way", ["bare, tensorizer", "bare, dummy"])
def test_a_format_that_finds_its_weights_by_other_arguments_needs_none_in_the_folder(answers, store, way):
    assert answers[way]["model"] == str(store.root / "live" / "bare" / "weights")
    assert answers[way]["model_weights"] == ""


def test_no_engine_starts_on_a_folder_without_the_weights_that_it_would_look_for(answers):
    assert (
        "'auto' reads the weights from the staged folder, and it holds none" in answers["bare, auto"]["error"]
    )
    assert "cannot stream the weights from there" in answers["bare, sharded streamer, gcs"]["error"]


@pytest.mark.parametrize("way", ["ranks", "ranks, streamer"])
def test_the_files_of_each_rank_are_loaded_from_the_node(answers, store, way):
    assert answers[way]["model"] == str(store.root / "live" / "ranks" / "weights")
    assert answers[way]["model_weights"] == ""


def test_files_of_other_ranks_than_the_engine_has_are_refused(answers):
    assert (
        "those of the ranks 0, and engine_kwargs.tensor_parallel_size is 2"
        in answers["ranks, two wanted"]["error"]
    )


def test_lora_is_switched_on_beside_the_staged_model(answers, store):
    assert answers["lora"]["model"] == str(store.root / "live" / "lora" / "weights")
    assert answers["lora"]["lora_rank"] == 8


def test_an_adapter_comes_from_the_replicas_generation_or_a_later_one_or_else_from_the_bucket(
    answers, store, folder
):
    found = answers["lora"]
    own, later = history(store, "lora")
    assert found["adapters"] == {
        "my-lora": str(store.bundle(own) / "my-lora"),
        "late-lora": str(store.bundle(later) / "late-lora"),
        "in-bucket": str(folder / "lora" / "in-bucket"),
    }
    assert set(found["lengths"].values()) == {128}
    assert later in found["leases"]
    assert (folder / "lora" / "in-bucket" / "adapter_model.safetensors").is_file()


def test_an_extra_file_that_a_link_leads_to_costs_nothing(answers):
    assert (answers["extra files"]["mirror"], answers["extra files"]["run_init_node"]) == (None, False)


def test_any_other_extra_file_is_left_to_ray_and_nothing_else(answers, folder, store):
    found = answers["extra files, one is not linked"]
    assert found["run_init_node"] is True
    assert found["mirror"]["bucket_uri"] is None
    assert [file["destination_path"] for file in found["mirror"]["extra_files"]] == [str(folder / "b")]
    assert (folder / "b" / "adapter_config.json").is_file()
    assert found["model"] == str(store.root / "live" / "toy" / "weights")


def test_rays_own_downloader_beside_ours_brings_its_files_and_no_model(answers, folder, store):
    assert answers["cloud downloader"]["model"] == str(store.root / "live" / "toy" / "weights")
    assert (folder / "cloud" / "adapter_config.json").is_file()
    assert not list(folder.rglob("models--toy/snapshots/*/*.safetensors"))


def test_what_ray_downloads_of_each_rank_is_whole_without_the_shards_of_the_model_it_was_cut_from(answers):
    for way in ("miss: s3", "miss: ranks"):
        assert "/snapshots/" in answers[way]["model"]


def test_without_staged_files_ray_gives_the_engine_what_it_would_without_us(answers, folder):
    assert answers["miss: hub"]["model"] == "org/model"
    assert answers["miss: path"]["model"] == str(folder / "model")
    assert answers["miss: streamer"]["model"] == answers["miss: sharded streamer as text"]["model"] == S3


def test_a_folder_of_the_users_own_is_compared_with_its_manifest_if_it_has_one(answers, folder):
    assert answers["miss: published path"]["model"] == str(folder / "published")
    assert "is not what the manifest says" in answers["miss: spoilt path"]["error"]
