"""What a start says of its compile cache, in the log and in the ledger: real folders, and an engine that only writes files."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llm_prefetch.caches.evidence import GRAPHS, LINES
from llm_prefetch.caches.identity import Identity
from llm_prefetch.caches.places import CAPTURING
from llm_prefetch.live import check_deployment
from llm_prefetch.serve.compile_watch import CompileWatch, cache_root, watch_compile
from llm_prefetch.serve.start_log import Files, find_text
from llm_prefetch.store import NodeStore
from tests.caches.made import ANY, stage_cache
from tests.caches.made import KEY as STAGED

KEY, OTHER = "ab" * 32, "cd" * 32

pytestmark = pytest.mark.usefixtures("cpu_torch")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("ray.serve"), "propagate", True)
    caplog.set_level(logging.DEBUG, "ray.serve.llm_prefetch")
    return caplog


def launch(model: str = "/store/live/llama/weights", **kwargs: Any) -> Any:
    """Of Ray's LLMConfig, what is looked at."""
    engine = SimpleNamespace(hf_model_id=model)
    return SimpleNamespace(engine_kwargs=kwargs, get_engine_config=lambda: engine)


def begun(
    llm_config: Any, generation: tuple[NodeStore, Any] | None = None, refused: str = ""
) -> CompileWatch:
    watch = watch_compile(llm_config, generation, refused)
    assert watch is not None
    return watch


def compiled(root: Path, key: str) -> None:
    for path in (f"{GRAPHS}/{key}/rank_0_0/model", f"{GRAPHS}/{key}/inductor_cache/ab/cab.so"):
        (root / path).parent.mkdir(parents=True)
        (root / path).write_text("code")


def test_a_start_that_compiles_for_itself_says_so(root, log):
    watch = begun(launch())
    compiled(root, KEY)
    facts = watch.end("ready")["compile"]
    assert (facts["outcome"], facts["new_keys"], facts["new_kernels"]) == ("none", (KEY,), 1)
    assert "compile cache none: the cache was empty" in log.text


def test_a_miss_names_what_differs_from_the_start_that_the_cache_came_from(root, log, store, tmp_path):
    model = str(store.engine_path("llama", "weights"))
    built = Identity(ordinals=(), platform="cpu", engine_path=model, arguments={"max_num_seqs": 4})
    stage_cache(store, tmp_path / "origin", built)
    watch = begun(launch(model, max_num_seqs=8), (store, check_deployment(store, "llama")))
    compiled(root, KEY)
    facts = watch.end("ready")["compile"]
    assert facts["outcome"] == "miss"
    (one,) = facts["differences"]
    assert (one["field"], one["produced"], one["here"]) == ("arguments.max_num_seqs", "4", "8")
    (line,) = [record for record in log.records if "compile cache miss" in record.message]
    assert line.levelno == logging.WARNING
    assert "arguments.max_num_seqs: 4 -> 8" in line.message


def test_a_cache_that_was_not_given_to_the_engine_is_a_miss_with_the_reason(root, log, store, tmp_path):
    stage_cache(store, tmp_path / "origin", ANY)
    watch = begun(launch(), (store, check_deployment(store, "llama")), "compile is quarantined")
    compiled(root, KEY)
    assert watch.end("ready")["compile"]["outcome"] == "miss"
    assert "was not given to the engine; compile is quarantined" in log.text


def test_a_start_with_the_key_that_was_staged_uses_the_cache(root, log, store, tmp_path):
    stage_cache(store, tmp_path / "origin", ANY)
    watch = begun(launch(), (store, check_deployment(store, "llama")))
    compiled(root, STAGED)
    assert watch.end("ready")["compile"]["keys"] == (STAGED,)
    watch = begun(launch(), (store, check_deployment(store, "llama")))
    (root / GRAPHS / STAGED / "rank_0_0" / "model").write_text("again")
    facts = watch.end("ready")["compile"]
    assert (facts["outcome"], facts["new_kernels"], facts["differences"]) == ("partial", 0, [])


def test_a_miss_that_nothing_explains_admits_it(root, log):
    compiled(root, OTHER)
    watch = begun(launch())
    compiled(root, KEY)
    assert watch.end("ready")["compile"]["differences"] == []
    assert "nothing that is written down differs" in log.text


def test_an_engine_that_compiles_nothing_is_nobodys_news(root, log):
    assert begun(launch(enforce_eager=True)).end("ready")["compile"]["outcome"] == "none"
    assert not [record for record in log.records if record.levelno >= logging.INFO]


def test_a_replica_that_a_cache_is_captured_from_leaves_word_of_itself(root, tmp_path, monkeypatch):
    monkeypatch.setenv(CAPTURING, str(tmp_path / "report.json"))
    watch = begun(launch(max_num_seqs=4))
    compiled(root, KEY)
    watch.end("ready")
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["outcome"], report["compile"]["keys"]) == ("ready", [KEY])
    assert report["identity"]["arguments"] == {"max_num_seqs": 4}


def test_what_cannot_be_told_does_not_stop_a_start(root, log, monkeypatch, tmp_path):
    assert watch_compile(None, None) is None
    monkeypatch.setenv(CAPTURING, str(tmp_path / "gone" / "report.json"))
    assert begun(launch()).end("ready") == {}
    assert log.text.count("cannot be") == 2


def test_the_lines_of_an_earlier_start_do_not_speak_for_this_one(tmp_path):
    now = time.time()
    stamps = [time.strftime("%m-%d %H:%M:%S", time.localtime(moment)) for moment in (now - 600, now)]
    line = "INFO {} [core.py:368] init engine (profile, create kv cache, warmup model) took {} s"
    log = tmp_path / "worker-1-01000000-7.out"
    log.write_text("\n".join(["no stamp: init engine", *map(line.format, stamps, ("29.13", "7.86"))]))
    (found,) = find_text(Files((log,), None), LINES, now - 60)
    assert found == line.format(stamps[1], "7.86")


def test_the_cache_is_where_vllm_puts_it(monkeypatch, root):
    assert cache_root() == root
    monkeypatch.delenv("VLLM_CACHE_ROOT")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == Path("/home/me/.cache/vllm")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_root() == Path("/var/cache/vllm")
