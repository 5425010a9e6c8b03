"""What Ray has downloaded is committed for the next replica on the node, if it is proven, and never otherwise."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path

import pytest

from llm_prefetch.live import check_deployment
from llm_prefetch.spec import Spec
from llm_prefetch.stage import stage
from tests.real.s3 import s3_server
from tests.samples import make_folder, make_published, no_record, only_record, tree
from tests.serve.conftest import EngineConfig, safetensors, until

MODEL = {"config.json": b"{}", "model.safetensors": safetensors(b"weights" * 9)}
BYTES = sum(map(len, MODEL.values()))


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, logger="ray.serve.llm_prefetch")
    return caplog


@pytest.fixture
def spec(tmp_path):
    """The model, with its manifest, and something that Ray does not download."""
    model, extra = make_published(tmp_path / "origin", MODEL), make_published(tmp_path / "extra", {"a": b"b"})
    artifacts = [{"name": "weights", "uri": model}, {"name": "extra", "kind": "files", "uri": extra}]
    return {"deployment": "llama", "artifacts": artifacts}


@pytest.fixture
def by_ray(make, ray):
    """A start by Ray's download of `MODEL`."""

    def by_ray(mirror="s3://bucket/mirror", **kwargs):
        ray.bring = partial(make_folder, files=MODEL)
        start = make(on_miss=["ray"], **kwargs)
        start.callback.llm_config.engine = EngineConfig(mirror_config=mirror)
        start.run()
        assert start.by_ray
        return start

    return by_ray


def inode(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_ino


def test_the_next_replica_is_a_hit_and_nothing_of_the_model_was_read_from_the_origin(
    make, by_ray, store, spec, rows, log
):
    start = by_ray(spec=spec)
    assert "it is being committed for the next replica" in rows("start")[0]["ladder"][0]["outcome"]
    until(lambda: rows("adopt"))
    following = make(on_miss=["fail"])
    following.run()
    engine_path = Path(following.engine.hf_model_id)
    assert engine_path == store.root / "live" / "llama" / "weights"
    assert following.ray.calls == 1  # that of the first one
    assert tree(engine_path.resolve()) == MODEL
    assert check_deployment(store, "llama", full=True).ready
    [staged] = rows("stage")
    assert [one["fetched"] for one in staged["artifacts"]] == [0, 1]
    assert only_record(store).uri == spec["artifacts"][0]["uri"]
    # No byte was copied, and the engine that runs has the files it had.
    assert inode(engine_path) == inode(start.ray.folder)
    until(lambda: f"is committed: {BYTES} bytes linked, 1 fetched" in log.text)


def test_a_file_that_ray_would_write_into_again_is_copied(by_ray, store, spec, rows, log):
    start = by_ray("gs://bucket/mirror", spec=spec)
    until(lambda: rows("adopt"))
    assert tree(start.ray.folder) == MODEL
    assert inode(store.root / "live" / "llama" / "weights") != inode(start.ray.folder)
    until(
        lambda: (
            f"{BYTES} copied because Ray writes into the files that it downloads again, 1 fetched" in log.text
        )
    )


def test_a_folder_on_another_file_system_is_copied(by_ray, ray, store, spec, rows, log):
    ray.folder = Path("/dev/shm") / f"llm-prefetch-{os.getpid()}"
    try:
        by_ray(spec=spec)
        until(lambda: rows("adopt"))
        until(lambda: f"0 bytes linked, {BYTES} copied because it lies on another file system" in log.text)
    finally:
        for path in ray.folder.iterdir():
            path.unlink()
        ray.folder.rmdir()
    assert check_deployment(store, "llama", full=True).ready


def test_without_a_spec_nobody_knows_what_it_is(by_ray, store, rows):
    by_ray()
    assert "it is not committed, as no `spec` says what it is" in rows("start")[0]["ladder"][0]["outcome"]
    assert no_record(store)


CHANGED = safetensors(b"WEIGHTS" * 9)
DIFFERENT = {
    "other bytes": ({**MODEL, "model.safetensors": CHANGED}, "'model.safetensors' is not what the origin's manifest says"),
    "another length": ({**MODEL, "config.json": b"{ }"}, "weights: 'config.json' has 2 bytes, and at the origin 3"),
    "one more file": ({**MODEL, "more.json": b"{}"}, "weights: Ray has not downloaded 'more.json'"),
}  # fmt: skip


@pytest.mark.parametrize(("held", "reason"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_is_not_what_the_origin_holds_is_not_committed_nor_fetched_again(
    by_ray, store, spec, rows, log, tmp_path, held, reason
):
    spec["artifacts"][0]["uri"] = make_published(tmp_path / "later", held)
    by_ray(spec=spec)
    until(lambda: "what Ray downloaded is not committed" in log.text)
    assert reason in log.text
    assert no_record(store)
    assert rows("stage") == []
    # What was left of it does no harm to the staging that comes.
    stage(Spec.model_validate(spec), store)
    assert tree((store.root / "live" / "llama" / "weights").resolve()) == held
    assert check_deployment(store, "llama", full=True).ready


def test_an_origin_without_a_manifest_that_states_no_digest_proves_nothing(
    by_ray, store, spec, log, tmp_path
):
    spec["artifacts"][0]["uri"] = f"file://{make_folder(tmp_path / 'bare', MODEL)}"
    by_ray(spec=spec)
    until(lambda: "the origin has no manifest, and states no digest of 'config.json'" in log.text)
    assert no_record(store)


@pytest.mark.cloud
@pytest.mark.parametrize("held", [MODEL["model.safetensors"], CHANGED], ids=["right", "other"])
def test_the_digests_that_an_origin_states_prove_it_as_well(by_ray, store, rows, monkeypatch, log, held):
    with s3_server() as s3:
        for name, value in s3.env.items():
            monkeypatch.setenv(name, value)
        bucket = s3.create_bucket("stated")
        for key, data in {**MODEL, "model.safetensors": held}.items():
            s3.client.put_object(Bucket=bucket, Key=f"llama/{key}", Body=data, ChecksumAlgorithm="SHA256")
        spec = {"deployment": "llama", "artifacts": [{"name": "weights", "uri": f"s3://{bucket}/llama"}]}
        s3.forget()
        by_ray(spec=spec)
        if held == CHANGED:
            until(lambda: "the origin states another SHA256 than its bytes have" in log.text)
            assert no_record(store)
        else:
            until(lambda: rows("adopt"))
            assert check_deployment(store, "llama", full=True).ready
        assert s3.bytes_read() == 0
