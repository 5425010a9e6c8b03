"""The staged compile cache in a replica: offered where all is right, and never a reason for a start to fail."""

from __future__ import annotations

import asyncio
import json
import os
import shutil

import pytest

from llm_prefetch.caches.aside import set_aside
from llm_prefetch.caches.identity import Identity
from llm_prefetch.caches.install import HEADERS_VARIABLE, cache_root
from llm_prefetch.caches.places import CAPTURING
from llm_prefetch.caches.quarantine import Mark, begin, clear_marks, mark_broken, marks
from llm_prefetch.errors import PluginError
from llm_prefetch.live import check_deployment
from llm_prefetch.record import Verdict
from llm_prefetch.serve.caches import caches_for_workers, offer_cache
from llm_prefetch.stage import stage
from llm_prefetch.store import release
from tests.caches.made import (
    ANY,
    CACHE,
    GRAPH,
    KWARGS,
    CpuNode,
    GpuNode,
    make_identity,
    make_spec,
    publish_cache,
    stage_cache,
)
from tests.samples import make_manifest
from tests.serve.conftest import MOVED

MODEL = f"{GRAPH}/rank_0_0/model"
pytestmark = pytest.mark.usefixtures("engine_environment")


@pytest.fixture
def cached(store, tmp_path):
    """A node on which `llama` is live with a cache that fits."""
    stage_cache(store, tmp_path, ANY)
    return store


def _version(store):
    return next(store.root.glob("artifacts/compile/*.json")).stem


def _start(make, then=None):
    start = make()
    start.run(then)
    return start


def _engine(rows):
    return rows("engine")[-1]


async def _crash():
    raise RuntimeError("Engine core initialization failed. See root cause above.")


def test_a_hit_leads_the_engine_to_the_cache(make, cached, rows):
    start = _start(make)
    root = str(cache_root(cached, "llama"))
    assert [os.environ[name] for name in MOVED] == [root] * 3
    assert HEADERS_VARIABLE not in os.environ  # it was captured with them
    assert start.callback.ctx.runtime_env["env_vars"] == dict.fromkeys(
        MOVED, root
    )  # Ray's task for the configuration
    assert start.engine.hf_model_id == str(cached.engine_path("llama", "weights"))
    assert (_engine(rows)["cache"], _engine(rows)["outcome"]) == (_version(cached), "ready")
    assert list((cached.root / "caches" / ".starting").glob("*")) == []
    assert marks(cached) == []


def test_without_a_cache_in_the_bundle_nothing_is_touched(make, staged, rows):
    _start(make)
    assert not [name for name in MOVED if name in os.environ]
    assert "cache" not in _engine(rows)


def test_what_is_not_installed_is_installed(make, cached):
    shutil.rmtree(cache_root(cached, "llama"))
    _start(make)
    assert (cache_root(cached, "llama") / MODEL).read_bytes() == CACHE[MODEL]
    assert os.environ["VLLM_CACHE_ROOT"]


def test_headers_are_off_where_they_were_off_for_the_capture(make, store, tmp_path):
    captured = ANY.model_copy(update={"environment": {HEADERS_VARIABLE: "0"}, "platform": "cpu"})
    found = offer_cache(
        "start1",
        _Config("/x"),
        _generation(store, tmp_path, captured),
        node=CpuNode(),
        environment=(env := {}),
    )
    assert found is not None
    assert found.verdict is Verdict.HIT, found.reason
    assert env[HEADERS_VARIABLE] == "0"
    found.end(store, None)


class _Config:
    """Of Ray's LLMConfig, what is looked at."""

    def __init__(self, model, kwargs=None):
        self.engine_kwargs = KWARGS if kwargs is None else kwargs
        self.hf_model_id = model

    def get_engine_config(self):
        return self


def _generation(store, tmp_path, identity):
    """Live on a node of which the staging knew nothing: what fits is left to the replica."""
    stage_cache(store, tmp_path, Identity(ordinals=identity.ordinals))
    other = make_manifest(CACHE, **identity.to_manifest())
    bundle = next(store.root.glob("bundles/*.json"))
    old = _version(store)
    for path in (
        store.manifest("compile", old),
        store.record("compile", old),
        store.artifact("compile", old),
    ):
        path.rename(path.with_name(path.name.replace(old, other.version)))
    store.manifest("compile", other.version).write_bytes(other.to_json())
    record = json.loads(store.record("compile", other.version).read_text())
    store.record("compile", other.version).write_text(json.dumps({**record, "version": other.version}))
    bundle.write_text(bundle.read_text().replace(old, other.version))
    link = bundle.with_suffix("") / "compile"
    link.unlink()
    link.symlink_to(f"../../artifacts/compile/{other.version}")
    return store, check_deployment(store, "llama")


def test_a_gpu_node_that_gives_a_replica_all_its_gpus_gets_the_cache(store, tmp_path):
    produced = make_identity(engine_path="/x")
    env: dict[str, str] = {}
    found = offer_cache(
        "start1", _Config("/x"), _generation(store, tmp_path, produced), node=GpuNode(), environment=env
    )
    assert found is not None
    assert found.verdict is Verdict.HIT, found.reason
    assert env["VLLM_CACHE_ROOT"] == str(cache_root(store, "llama"))
    found.end(store, None)


@pytest.mark.parametrize(
    ("config", "node", "field"),
    [
        (
            _Config("/x", {"tensor_parallel_size": 2, "max_num_seqs": 128}),
            GpuNode(),
            "arguments.max_num_seqs: 64 -> 128",
        ),
        (_Config("/y"), GpuNode(), "engine_path: /x -> /y"),
        (_Config("/x"), GpuNode(names=("NVIDIA H100",) * 2), "gpu_name: NVIDIA A10G -> NVIDIA H100"),
        (_Config("/x"), GpuNode(names=("NVIDIA A10G",) * 4), "ordinals: 0,1 -> not known"),
    ],
)
def test_a_launch_that_differs_gets_none_and_is_told_the_field(store, tmp_path, config, node, field):
    produced = make_identity(engine_path="/x")
    env: dict[str, str] = {}
    found = offer_cache("start1", config, _generation(store, tmp_path, produced), node=node, environment=env)
    assert found is not None
    assert (found.verdict, found.version) == (Verdict.INCOMPATIBLE, "")
    assert field in found.reason
    assert env == {}
    assert found.end(store, RuntimeError("unrelated"))["cache_reason"].startswith("compile is INCOMPATIBLE: ")
    assert marks(store) == []


@pytest.mark.parametrize(
    ("node", "verdict", "reason"),
    [
        (GpuNode(), Verdict.HIT, ""),
        (GpuNode(names=("NVIDIA H100",) * 2), Verdict.INCOMPATIBLE, "gpu_name: NVIDIA A10G -> NVIDIA H100"),
    ],
)
def test_another_node_of_the_replica_judges_by_what_it_is_itself(store, tmp_path, node, verdict, reason):
    store, check = _generation(store, tmp_path, make_identity(engine_path="/x"))
    [(name, found)] = caches_for_workers(store, check, node).items()
    assert (name, found.verdict) == ("compile", verdict)
    assert reason in found.reason


def test_an_engine_that_a_cache_is_captured_from_gets_none(make, cached, rows, monkeypatch):
    monkeypatch.setenv(CAPTURING, "/tmp/report.json")
    _start(make)
    assert "VLLM_CACHE_ROOT" not in os.environ
    assert "cache" not in _engine(rows)


def _no_cache(rows, match):
    """The engine has started without a cache, and the ledger says why."""
    row = _engine(rows)
    assert (row["outcome"], row["cache"]) == ("ready", "")
    assert match in row["cache_reason"]
    assert "VLLM_CACHE_ROOT" not in os.environ
    return True


def test_a_replica_that_starts_where_another_is_captured_keeps_out_of_its_folder(make, cached, rows):
    root = cache_root(cached, "llama")
    set_aside(root, 60.0)
    _start(make)
    assert _no_cache(rows, "compile is MISSING: a compile cache is being captured here")
    assert [path.name for path in root.iterdir()] == [".capture"]


def test_a_cache_that_no_spec_has_pinned_is_not_offered(make, cached, rows, caplog):
    [path] = cached.root.glob("bundles/*.json")
    body = json.loads(path.read_text())
    for member in body["members"]:
        member.pop("pinned", None)
    path.write_text(json.dumps(body))
    _start(make)
    assert _no_cache(rows, "UNTRUSTED: it is code")
    assert "ERROR" in [record.levelname for record in caplog.records if "UNTRUSTED" in record.message]


@pytest.mark.parametrize("cut", [True, False])
def test_a_cache_that_is_damaged_in_the_store_costs_the_cache_and_not_the_start(make, cached, rows, cut):
    path = cached.artifact("compile", _version(cached)) / MODEL
    path.chmod(0o644)
    if cut:
        os.truncate(path, 3)
    else:
        path.write_bytes(CACHE[MODEL][::-1])
    start = _start(make)
    assert start.engine.hf_model_id == str(cached.engine_path("llama", "weights"))
    assert rows("start")[-1]["rung"] == "hit"
    assert _no_cache(rows, "compile is PARTIAL" if cut else "compile is CORRUPT")


def test_damage_that_no_quick_check_sees_is_found_on_the_way_to_the_engine(make, cached, rows):
    shutil.rmtree(cache_root(cached, "llama"))
    path = cached.artifact("compile", _version(cached)) / MODEL
    times = path.stat()
    path.chmod(0o644)
    path.write_bytes(CACHE[MODEL][::-1])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    _start(make)
    assert _no_cache(rows, "is not what the manifest says")
    assert not (cache_root(cached, "llama") / GRAPH).exists()


def test_a_copy_that_was_cut_is_made_anew_before_the_engine_reads_it(make, cached):
    os.truncate(cache_root(cached, "llama") / MODEL, 3)
    _start(make)
    assert (cache_root(cached, "llama") / MODEL).read_bytes() == CACHE[MODEL]
    assert "VLLM_CACHE_ROOT" in os.environ


def test_a_folder_that_others_may_write_to_is_not_offered(make, cached, rows):
    cache_root(cached, "llama").chmod(0o777)
    _start(make)
    assert _no_cache(rows, "UNTRUSTED: others may write to it")


def test_damage_of_the_model_is_still_what_decides(make, cached, rows, ray):
    shutil.rmtree(next(cached.root.glob("artifacts/weights/*/layers")).parent)
    shutil.rmtree(cached.artifact("compile", _version(cached)))
    start = _start(make)
    assert start.by_ray
    assert "VLLM_CACHE_ROOT" not in os.environ
    assert rows("start")[-1]["verdict"] == "PARTIAL"


def test_an_engine_that_dies_in_a_start_with_a_cache_has_the_next_start_do_without(make, cached, rows):
    with pytest.raises(RuntimeError, match="Engine core"):
        _start(make, _crash)
    [mark] = marks(cached)
    assert (mark.name, mark.version, mark.deployment) == ("compile", _version(cached), "llama")
    assert "Engine core initialization failed" in mark.reason
    for name in MOVED:
        del os.environ[name]
    _start(make)
    assert _no_cache(rows, "it is quarantined on this node: the start")
    (cache_root(cached, "llama") / MODEL).write_bytes(b"what the engine made of it")
    assert clear_marks(cached, "compile")
    _start(make)
    assert _engine(rows)["cache"] == _version(cached)
    assert (cache_root(cached, "llama") / MODEL).read_bytes() == CACHE[MODEL]


def test_a_start_that_was_killed_has_the_next_start_do_without(make, cached, rows):
    release(begin(cached, Mark("compile", _version(cached), "llama", "", "start9")))  # as a kill does
    _start(make)
    assert _no_cache(rows, "start9 that used it ended without a word")


def test_a_replica_that_starts_at_the_same_time_is_no_death(make, cached, rows):
    fd = begin(cached, Mark("compile", _version(cached), "llama", "", "start9"))
    _start(make)
    release(fd)
    assert _engine(rows)["cache"] == _version(cached)


def test_what_we_have_refused_ourselves_is_not_the_fault_of_a_cache(make, cached):
    async def refuse():
        raise RuntimeError("a hook has failed") from PluginError("no such parser")

    with pytest.raises(RuntimeError, match="hook"):
        _start(make, refuse)
    assert marks(cached) == []


def test_a_start_that_is_given_up_because_it_takes_too_long_may_be(make, cached):
    async def never():
        task = asyncio.current_task()
        assert task is not None
        task.cancel()  # as Ray does after RAYLLM_ENGINE_START_TIMEOUT_S
        await asyncio.sleep(0)

    with pytest.raises(asyncio.CancelledError):
        _start(make, never)
    assert len(marks(cached)) == 1


def test_a_newer_version_is_offered_and_takes_the_place_of_the_one_that_broke(make, cached, rows, tmp_path):
    mark_broken(cached, Mark("compile", _version(cached), "llama", "it crashed", "start1"))
    cache = publish_cache(tmp_path / "next", ANY, {**CACHE, MODEL: b"another graph"})
    stage(make_spec(tmp_path / "next", cache), cached)
    _start(make)
    assert _engine(rows)["cache"] == cache[1]
    assert (cache_root(cached, "llama") / MODEL).read_bytes() == b"another graph"


def test_a_store_that_cannot_be_written_costs_the_cache_and_not_the_start(make, cached, rows):
    folder = cached.root / "caches" / ".starting"
    shutil.rmtree(folder, ignore_errors=True)
    folder.write_text("in the way")
    _start(make)
    assert _no_cache(rows, "compile is CORRUPT")
