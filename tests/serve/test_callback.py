"""The callback in the replica: a hit points the engine at the staged files, anything else leaves Ray alone."""

from __future__ import annotations

import asyncio
import logging
import pickle
import re
import shutil
from pathlib import Path

import pytest
import yaml
from ray import cloudpickle
from ray.llm._internal.common.callbacks.base import CallbackBase, CallbackConfig, CallbackCtx
from ray.llm._internal.common.utils.import_utils import load_class

from llm_prefetch import serve
from llm_prefetch.errors import SpecError
from llm_prefetch.names import remember
from llm_prefetch.serve.options import parse_options
from llm_prefetch.spec import Spec
from llm_prefetch.stage import stage
from llm_prefetch.store import open_store
from tests.samples import as_nobody, make_published
from tests.serve.conftest import UNTOUCHED
from tests.serve.troubles import NO_STORE, TROUBLE

LOGGER = "ray.serve.llm_prefetch"
"""Below Serve's own logger, so that the line reaches the replica's log."""


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.DEBUG, logger=LOGGER)
    return caplog


def _lines(log, level):
    return [r.getMessage() for r in log.records if (r.levelno, r.name) == (level, LOGGER)]


def test_it_is_a_callback_of_ray(make):
    callback = make().callback
    assert isinstance(callback, CallbackBase)
    assert isinstance(callback.ctx, CallbackCtx)
    assert callback.ctx.runtime_env == {"env_vars": {}}
    assert [getattr(serve, name).__name__ for name in serve.__all__] == serve.__all__


def test_it_may_be_named_in_every_way_that_ray_takes():
    kind = serve.PrefetchCallback
    assert load_class("llm_prefetch.serve.PrefetchCallback") is kind
    for given in (kind, "llm_prefetch.serve.PrefetchCallback"):
        config = CallbackConfig(callback_class=given, callback_kwargs={"deployment": "llama"})
        assert cloudpickle.loads(cloudpickle.dumps(config)) == config
    with pytest.raises(AttributeError, match="has no attribute 'PrefetchCallBack'"):
        serve.PrefetchCallBack  # noqa: B018


def test_a_hit_starts_the_engine_from_the_engine_path_and_skips_what_ray_would_do(make, staged, rows, log):
    start = make()
    start.run()
    assert start.engine.hf_model_id == str(staged.root / "live" / "llama" / "weights")
    assert start.engine.mirror_config is None
    assert start.callback.ctx.run_init_node is False
    [line] = _lines(log, logging.INFO)
    assert "llama HIT" in line
    assert start.engine.hf_model_id in line
    assert _lines(log, logging.WARNING) == []
    [row] = rows("start")
    assert (row["deployment"], row["verdict"], row["rung"]) == ("llama", "HIT", "hit")
    assert row["bundle"].startswith("bundle-")
    [end] = rows("engine")
    assert (end["start"], end["outcome"]) == (row["start"], "ready")


def test_the_name_of_the_staging_flow_may_stand_before_the_deployment(make, staged):
    paths = []
    for name in ("llama", "stage/llama"):
        start = make(deployment=name)
        start.run()
        paths.append(start.engine.hf_model_id)
    assert paths[0] == paths[1] != UNTOUCHED.hf_model_id


ID = "0dd4ffd6-b09c-4a3c-8bbb-5b7f9e6a6e0a"


def test_a_deployment_may_be_named_by_its_id_in_prefect_without_asking_prefect(make, staged, rows):
    remember(staged, ID, "llama")
    remember(staged, "stage/nightly", "llama")
    for name in (ID, ID.upper(), "stage/nightly"):
        start = make(deployment=name, on_miss=["fail"])
        start.run()
        assert start.engine.hf_model_id == str(staged.root / "live" / "llama" / "weights")
        assert rows("start")[-1]["deployment"] == "llama"


def test_an_id_that_nobody_on_the_node_knows_is_a_miss(make, staged, rows):
    start = make(deployment=ID, on_miss=["ray"])
    start.run()
    assert start.by_ray
    [row] = rows("start")
    assert (row["deployment"], row["verdict"]) == (ID, "MISSING")
    assert "no deployment of that id has staged on this node" in row["reason"]


@pytest.mark.parametrize("way", ["mapping", "file"])
def test_a_spec_says_the_name_that_an_id_does_not(make, store, spec, rows, tmp_path, way):
    (tmp_path / "spec.yaml").write_text(Spec.model_validate(spec).model_dump_json())
    given = spec if way == "mapping" else str(tmp_path / "spec.yaml")
    start = make(deployment=ID, on_miss=["stage", "fail"], spec=given)
    start.run()
    assert start.engine.hf_model_id == str(store.root / "live" / "llama" / "weights")


def test_the_root_may_be_named_in_the_yaml(make, staged, monkeypatch):
    monkeypatch.setenv("LLM_PREFETCH_ROOT", "/nowhere")
    start = make(root=str(staged.root))
    start.run()
    assert not start.untouched


@pytest.mark.parametrize(
    ("break_it", "verdict", "reason"), (TROUBLE | NO_STORE).values(), ids=TROUBLE | NO_STORE
)
def test_anything_but_a_hit_lets_ray_download_and_says_why(
    make, staged, weights, log, break_it, verdict, reason
):
    break_it(staged, weights)
    start = make(on_miss=["ray"])
    start.run()
    assert start.by_ray
    [line] = _lines(log, logging.WARNING)
    assert f"llama is {verdict} on this node" in line
    assert reason in line
    assert line.endswith("going on with: ray")


@pytest.mark.parametrize(("break_it", "verdict", "reason"), TROUBLE.values(), ids=TROUBLE)
def test_anything_but_a_hit_is_a_row_in_the_ledger(make, staged, weights, rows, break_it, verdict, reason):
    break_it(staged, weights)
    make(on_miss=["ray"]).run()
    [row] = rows("start")
    assert (row["verdict"], row["rung"], reason in row["reason"]) == (verdict, "ray", True)
    assert [end["outcome"] for end in rows("engine")] == ["ready"]


@pytest.mark.parametrize(
    ("break_it", "verdict", "reason"), (TROUBLE | NO_STORE).values(), ids=TROUBLE | NO_STORE
)
def test_where_a_miss_shall_fail_the_replica_does_not_start(make, staged, weights, break_it, verdict, reason):
    break_it(staged, weights)
    start = make(on_miss=["fail"])
    with pytest.raises(Exception, match=f"llama is {verdict} on this node") as caught:
        start.run()
    assert reason in str(caught.value)
    assert "on_miss: [ray]" in str(caught.value)
    assert start.untouched


def test_a_failed_miss_is_a_row_too(make, store, rows):
    with pytest.raises(Exception, match="MISSING"):
        make(on_miss=["fail"]).run()
    assert rows("start")[0]["rung"] == "fail"
    assert rows("engine")[0]["outcome"].startswith("failed: Exception: Error running callback")


def test_with_raise_error_on_callback_off_even_a_failing_miss_goes_on_as_ray_does(make, store):
    start = make(on_miss=["fail"], raise_error_on_callback=False)
    start.run()
    assert start.by_ray


def test_a_store_that_this_user_may_not_read_is_a_miss(make, nobodys_folder, log):
    (nobodys_folder / "store").mkdir(mode=0o700)
    (nobodys_folder / "store" / "LAYOUT").write_text("1\n")
    start = make(root=str(nobodys_folder / "store"))
    with as_nobody():
        start.ray.folder = nobodys_folder / "downloaded"
        start.run()
    assert start.by_ray
    assert "not permitted" in _lines(log, logging.WARNING)[0]


@pytest.fixture
def readable(tmp_path, nobodys_folder):
    """A store in which everything is ready, and which an unprivileged user may read and not write."""
    uri = make_published(tmp_path / "origin")
    store = open_store(nobodys_folder / "store", create=True)
    artifacts = [{"name": "weights", "uri": uri}]
    stage(Spec.model_validate({"deployment": "llama", "artifacts": artifacts}), store)
    for path in [store.root, *store.root.rglob("*")]:
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o022)
    return store


@pytest.mark.parametrize("locks", ["there", "none yet", "no folder"])
def test_a_store_that_may_only_be_read_is_a_hit(make, readable, log, locks):
    if locks != "there":
        shutil.rmtree(readable.root / "locks")
    if locks == "none yet":
        (readable.root / "locks").mkdir()
    start = make(root=str(readable.root))
    with as_nobody():
        start.run()
    assert not start.untouched
    [line] = _lines(log, logging.WARNING)
    assert "starting without a lease: not permitted" in line
    assert len([line for line in _lines(log, logging.DEBUG) if "without a lock" in line]) == (
        locks != "there"
    )


def test_a_ledger_that_cannot_be_written_is_a_warning_and_no_miss(make, readable, caplog):
    start = make(root=str(readable.root))
    with as_nobody():
        start.run()
    assert not start.untouched
    assert sum("ledger" in record.getMessage() for record in caplog.records) == 2


def test_without_a_home_and_a_root_it_is_a_miss(make, monkeypatch, log):
    monkeypatch.delenv("LLM_PREFETCH_ROOT")
    monkeypatch.setenv("HOME", "~")  # what Python finds for a user id that nobody gave a home
    start = make()
    start.run()
    assert start.by_ray
    assert "no home folder" in _lines(log, logging.WARNING)[0]


@pytest.fixture
def two_models(store, tmp_path):
    uri = make_published(tmp_path / "origin")
    artifacts = [{"name": name, "uri": uri} for name in ("base", "draft")]
    stage(Spec.model_validate({"deployment": "llama", "artifacts": artifacts}), store)
    return store


def test_of_two_models_one_must_be_named(make, two_models, rows):
    start = make()
    with pytest.raises(Exception, match=r"which model\? llama holds base, draft") as caught:
        start.run()
    assert "callback_config.callback_kwargs.model" in str(caught.value)
    assert start.untouched
    assert rows("engine")[0]["outcome"].startswith("failed")


def test_of_two_models_the_named_one_is_the_engines(make, two_models):
    start = make(model="draft")
    start.run()
    assert start.engine.hf_model_id == str(two_models.root / "live" / "llama" / "draft")


def test_a_named_model_that_is_not_there_is_an_error_and_no_other_is_taken(make, staged):
    for model in ("nobody", "extra"):
        start = make(model=model)
        with pytest.raises(Exception, match="which model"):
            start.run()
        assert start.untouched


def _spec_of(deployment):
    return {"deployment": deployment, "artifacts": [{"name": "weights", "uri": "s3://bucket/x"}]}


@pytest.mark.parametrize(
    ("kwargs", "path"),
    [
        ({"on_mis": ["ray"]}, "callback_kwargs.on_mis"),
        ({"deployment": "a/b/c"}, "callback_kwargs.deployment"),
        ({"deployment": "../up"}, "callback_kwargs.deployment"),
        ({"deployment": 5}, "callback_kwargs.deployment"),
        ({"on_miss": []}, "callback_kwargs.on_miss"),
        ({"on_miss": ["download"]}, "callback_kwargs.on_miss.0"),
        ({"on_miss": ["ray", "fail"]}, "callback_kwargs.on_miss"),
        ({"on_miss": ["fail", "wait"]}, "callback_kwargs.on_miss"),
        ({"on_miss": ["wait"]}, "callback_kwargs.on_miss"),
        ({"on_miss": ["wait", "wait", "ray"]}, "callback_kwargs.on_miss: each rung may stand there once"),
        ({"on_miss": ["stage", "ray"]}, "callback_kwargs.spec: on_miss names `stage`"),
        ({"on_miss": ["prefect", "ray"]}, "callback_kwargs.deployment: on_miss names `prefect`"),
        ({"deadlines": {"check": 0}}, "callback_kwargs.deadlines.check"),
        ({"prefect": {"deployment": "llama"}}, "callback_kwargs.prefect.deployment"),
        ({"prefect": {"api_ur": "http://x"}}, "callback_kwargs.prefect.api_ur"),
        ({"prefect": {"api_url": "prefect:4200"}}, "callback_kwargs.prefect.api_url"),
        ({"deadlines": {"wait": 0}}, "callback_kwargs.deadlines.wait"),
        ({"deadlines": {"wai": 5}}, "callback_kwargs.deadlines.wai"),
        ({"budget_seconds": "inf"}, "callback_kwargs.budget_seconds"),
        ({"spec": "specs/llama.yaml"}, "callback_kwargs.spec: not an absolute path"),
        ({"spec": {"deployment": "llama"}}, "callback_kwargs.spec: artifacts: is missing"),
        ({"spec": _spec_of("other")}, "callback_kwargs.spec.deployment: 'other' is not 'llama'"),
        ({"parsers": {"reasonings": []}}, "callback_kwargs.parsers.reasonings"),
        ({"model": "../weights"}, "callback_kwargs.model"),
    ],
)
def test_a_slip_in_the_yaml_fails_the_deployment_at_once_by_its_path(make, kwargs, path):
    with pytest.raises(SpecError) as caught:
        make(**kwargs)
    assert f"callback_config.{path}" in str(caught.value)
    assert "known: deployment, on_miss, deadlines, budget_seconds, spec, prefect, model," in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_deployment_must_be_named(make):
    with pytest.raises(SpecError, match=r"callback_config\.callback_kwargs\.deployment: Field required"):
        serve.PrefetchCallback(None)


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
@pytest.mark.parametrize("when", ["before", "after", "while it holds the lock"])
def test_ray_can_pickle_it_at_any_time(make, staged, pickler, when):
    start = make()
    copies = []

    async def copy():
        copies.append(pickler.loads(pickler.dumps(start.callback)))

    if when == "before":
        asyncio.run(copy())
    start.run(copy if when.startswith("while") else None)
    if when == "after":
        asyncio.run(copy())
    [twin] = copies
    assert twin.options == start.callback.options
    assert twin.ctx.run_init_node is (when == "before")
    assert twin._check == start.callback._check or when == "before"
    assert twin.llm_config == start.callback.llm_config or when == "before"


def test_nothing_that_could_not_travel_is_kept_on_the_instance(make, staged):
    start = make()
    before = set(vars(start.callback))
    start.run()
    assert set(vars(start.callback)) == before


def test_a_secret_in_the_yaml_shows_in_no_message(make, caplog):
    secret = {"api_key": "hunter2", "auth_string": "user:hunter2"}
    start = make(deployment="stage/llama", on_miss=["prefect", "ray"], prefect=secret)
    start.run()
    assert "hunter2" not in repr(start.callback.options)
    assert "hunter2" not in caplog.text
    with pytest.raises(SpecError) as caught:
        make(prefect={**secret, "api_key": ["hunter2"]})
    assert "hunter2" not in str(caught.value)
    assert caught.value.__context__ is None or "hunter2" not in str(caught.value.__cause__)


def test_a_secret_that_an_engine_says_is_in_no_ledger(make, staged, rows, caplog):
    async def fail():
        raise RuntimeError("cannot get https://me:hunter2@host/model?sig=hunter2")

    with pytest.raises(RuntimeError):
        make().run(fail)
    assert rows("engine")[0]["outcome"] == "failed: RuntimeError: cannot get https://host/model"


def test_without_anything_said_a_miss_waits_for_a_staging_and_then_lets_ray_download(make, rows):
    assert make().callback.options.on_miss == ("wait", "ray")


def test_every_policy_in_the_guide_is_valid():
    guide = Path(__file__).parents[2] / "docs" / "how-to" / "replica-fallbacks.md"
    blocks = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", guide.read_text(), re.DOTALL)]
    ladders = [parse_options(block["callback_kwargs"]).on_miss for block in blocks]
    assert ladders == [
        ("fail",),
        ("wait", "ray"),
        ("wait", "stage", "fail"),
        ("wait", "prefect", "stage", "ray"),
    ]
