"""A node's part in a capture: the cache root is the capture's own while it lasts, and as before when it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llm_prefetch import ledger
from llm_prefetch.caches.aside import captured_until
from llm_prefetch.caches.evidence import GRAPHS
from llm_prefetch.caches.identity import Identity
from llm_prefetch.caches.install import cache_root
from llm_prefetch.caches.places import CAPTURING
from llm_prefetch.capturing import capture_node
from llm_prefetch.capturing.capture_node import begin, collect, finish, look
from llm_prefetch.errors import ClusterError, NotReadyError
from llm_prefetch.leases import hold, leased
from llm_prefetch.live import current_bundle
from llm_prefetch.manifest import parse_manifest
from llm_prefetch.record import Verdict
from llm_prefetch.spec import Spec
from llm_prefetch.stage import stage
from llm_prefetch.store import NodeStore, release
from tests.caches.made import ANY, GRAPH, make_spec, publish_cache
from tests.samples import make_published

KEY = "ab" * 32


def identity(store: NodeStore) -> dict[str, Any]:
    path = str(store.engine_path("llama", "weights"))
    return Identity(vllm="0.29.0", engine_path=path).to_manifest()


@pytest.fixture
def staged(store: NodeStore, tmp_path: Path) -> NodeStore:
    uri = make_published(tmp_path / "origin")
    stage(Spec.model_validate({"deployment": "llama", "artifacts": [{"name": "weights", "uri": uri}]}), store)
    return store


def compiled(root: Path) -> None:
    """As an engine does."""
    for path in (f"{GRAPHS}/{KEY}/rank_0_0/model", f"{GRAPHS}/{KEY}/inductor_cache/ab/cab.so"):
        (root / path).parent.mkdir(parents=True)
        (root / path).write_text("code")


def reported(environment: dict[str, str], identity: dict[str, Any]) -> None:
    """As the callback does when the engine is up."""
    compile_facts = {"outcome": "none", "keys": [KEY]}
    report = {"outcome": "ready", "compile": compile_facts, "identity": identity}
    Path(environment[CAPTURING]).write_text(json.dumps(report))


def installed(store: NodeStore) -> str:
    """What the last staging has said of its cache."""
    steps = ledger.read(store, "stage")[-1]["steps"]
    return str(next(step["outcome"] for step in steps if step["step"] == "install"))


def test_a_node_says_whether_a_replica_may_start_there(staged):
    found = look("llama", staged.root)
    assert (found.reason, found.bundle, found.running) == ("", current_bundle(staged, "llama"), 0)
    assert found.identity.engine_path == str(staged.engine_path("llama", "weights"))
    lease = hold(staged, found.bundle, deployment="llama")
    assert look("llama", staged.root).running == 1
    release(lease)
    assert look("qwen", staged.root).reason == "MISSING: nothing is live on this node"


def test_the_engine_gets_an_empty_root_at_the_path_that_all_others_have(staged):
    root = cache_root(staged, "llama")
    (root / "modelinfos").mkdir(parents=True)
    environment = begin("llama", staged.root, 60.0)
    assert environment["VLLM_CACHE_ROOT"] == str(root)
    assert not (root / "modelinfos").exists()
    finish("llama", staged.root)
    assert [path.name for path in root.iterdir()] == ["modelinfos"]
    assert [path.name for path in root.parent.iterdir()] == ["llama"]


def test_what_it_left_is_published_with_what_it_was_and_nothing_of_it_stays(staged, tmp_path):
    environment = begin("llama", staged.root, 60.0)
    root = Path(environment["VLLM_CACHE_ROOT"])
    compiled(root)
    reported(environment, identity(staged))
    found = collect("llama", staged.root, f"file://{tmp_path}/cache")
    manifest = parse_manifest((tmp_path / "cache/.llm-prefetch/manifest.json").read_bytes(), "it")
    assert manifest.version == found.published.version
    assert dict(manifest.identity) == identity(staged)
    paths = [file.path for file in manifest.files]
    assert paths == [
        "key-factors.json",
        f"{GRAPHS}/{KEY}/inductor_cache/ab/cab.so",
        f"{GRAPHS}/{KEY}/rank_0_0/model",
    ]
    finish("llama", staged.root)
    assert list((staged.root / "caches").iterdir()) == []
    (row,) = ledger.read(staged, "capture")
    assert row["published"]["version"] == manifest.version


def test_a_staging_meanwhile_puts_nothing_into_what_is_captured(store, tmp_path):
    spec = make_spec(tmp_path, publish_cache(tmp_path / "old", ANY))
    stage(spec, store)
    environment = begin("llama", store.root, 60.0)
    root = Path(environment["VLLM_CACHE_ROOT"])
    assert stage(spec, store).verdict is Verdict.HIT
    assert installed(store).startswith("a compile cache is being captured here")
    assert [path.name for path in root.iterdir()] == [".capture"]
    compiled(root)
    reported(environment, identity(store))
    collect("llama", store.root, f"file://{tmp_path}/cache")
    manifest = parse_manifest((tmp_path / "cache/.llm-prefetch/manifest.json").read_bytes(), "it")
    assert {file.path.split("/")[2] for file in manifest.files if file.path.startswith(GRAPHS)} == {KEY}
    finish("llama", store.root)
    assert (root / GRAPH).exists()
    stage(spec, store)
    assert installed(store).startswith("0 added")


def test_the_mark_outlasts_what_is_published(staged, tmp_path):
    environment = begin("llama", staged.root, 1.0)
    root = Path(environment["VLLM_CACHE_ROOT"])
    soon = captured_until(root)
    compiled(root)
    reported(environment, identity(staged))
    collect("llama", staged.root, f"file://{tmp_path}/cache")
    later = captured_until(root)
    assert soon is not None
    assert later is not None
    assert later - soon > capture_node.PUBLISH_SECONDS / 2


def test_a_capture_that_was_killed_is_cleaned_up_by_the_next(staged):
    root = cache_root(staged, "llama")
    root.mkdir(parents=True)
    (root / "precious").touch()
    compiled(Path(begin("llama", staged.root, 60.0)["VLLM_CACHE_ROOT"]))
    begin("llama", staged.root, 60.0)
    assert not (root / "torch_compile_cache").exists()
    finish("llama", staged.root)
    finish("llama", staged.root)
    assert [path.name for path in root.iterdir()] == ["precious"]


def test_it_does_not_take_the_cache_from_a_replica_that_runs(staged):
    lease = hold(staged, str(current_bundle(staged, "llama")), deployment="llama")
    with pytest.raises(NotReadyError, match="replicas of llama run on this node"):
        begin("llama", staged.root, 60.0)
    assert leased(staged)
    release(lease)


def test_a_replica_that_fell_back_to_rays_download_has_built_for_another_path(staged, tmp_path):
    environment = begin("llama", staged.root, 60.0)
    compiled(Path(environment["VLLM_CACHE_ROOT"]))
    reported(environment, Identity(engine_path="/home/ray/.cache/huggingface/x").to_manifest())
    with pytest.raises(NotReadyError, match="did not start from what is staged, but from /home/ray"):
        collect("llama", staged.root, f"file://{tmp_path}/cache")


def test_a_replica_that_does_not_speak_of_itself_is_not_published(staged, tmp_path, monkeypatch):
    monkeypatch.setattr(capture_node, "_REPORT_SECONDS", 0.0)
    compiled(Path(begin("llama", staged.root, 60.0)["VLLM_CACHE_ROOT"]))
    with pytest.raises(ClusterError, match="has not said what it was started with"):
        collect("llama", staged.root, f"file://{tmp_path}/cache")
    assert not (tmp_path / "cache").exists()
