"""An artifact under a path of the user's choice, as `CloudDownloader` gives it with `paths: [(uri, local)]`."""

from __future__ import annotations

import pytest

from llm_prefetch.commit import set_aside
from llm_prefetch.errors import DiskError, SpecError
from llm_prefetch.live import rollback
from llm_prefetch.spec import parse_spec
from llm_prefetch.stage import stage
from llm_prefetch.store import write_link
from tests.samples import FILES, make_artifact, make_published, make_spec, only_record, raises, tree


@pytest.fixture
def spec(tmp_path):
    return make_spec(make_published(tmp_path / "one"), link=str(tmp_path / "cache/models/llama"))


def test_the_link_leads_to_the_files(store, spec, tmp_path):
    stage(spec, store)
    assert tree(tmp_path / "cache/models/llama") == FILES


def test_the_link_stays_and_its_files_switch_with_the_deployment(store, spec, tmp_path):
    link = tmp_path / "cache/models/llama"
    stage(spec, store)
    inode = link.lstat().st_ino
    two = make_published(tmp_path / "two", {**FILES, "config.json": b"{}"})
    stage(make_spec(two, link=str(link)), store)
    assert (link / "config.json").read_bytes() == b"{}"
    rollback(store, "llama")
    assert (link / "config.json").read_bytes() == FILES["config.json"]
    assert link.lstat().st_ino == inode


@pytest.mark.parametrize("what", ["folder", "file", "link elsewhere"])
def test_what_is_in_the_way_is_left_alone_before_a_byte_moves(store, spec, tmp_path, what):
    link = tmp_path / "cache/models/llama"
    link.parent.mkdir(parents=True)
    {"folder": link.mkdir, "file": link.touch, "link elsewhere": lambda: link.symlink_to("/etc")}[what]()
    with raises(DiskError, 4, str(link), "choose another link"):
        stage(spec, store)
    assert not list(store.root.glob("artifacts/*"))


@pytest.fixture
def taken(store, spec, tmp_path):
    """The path that leads to `weights` of `llama`."""
    stage(spec, store)
    return tmp_path / "cache/models/llama"


@pytest.mark.parametrize("mending", [False, True])
def test_the_link_of_another_deployment_is_left_alone_before_a_byte_moves(store, taken, tmp_path, mending):
    leads_to = taken.readlink()
    if mending:  # its files are away for a moment, but somebody looks there
        set_aside(store, "weights", only_record(store).version)
    other = make_spec(make_published(tmp_path / "two", {"a": b"2"}), deployment="other", link=str(taken))
    before = set(store.root.glob("artifacts/*/*"))
    with raises(DiskError, 4, "it is the link of live/llama/weights", str(taken), "choose another link"):
        stage(other, store)
    assert taken.readlink() == leads_to
    assert set(store.root.glob("artifacts/*/*")) == before


def test_the_link_of_what_is_live_no_more_is_taken_over(store, taken, tmp_path):
    store.live("llama").unlink()
    other = make_spec(make_published(tmp_path / "two", {"a": b"2"}), deployment="other", link=str(taken))
    stage(other, store)
    assert tree(taken) == {"a": b"2"}


def test_the_link_goes_over_to_the_artifact_that_takes_the_place_of_its_own(store, spec, taken):
    [artifact] = spec.artifacts
    stage(spec.model_copy(update={"artifacts": [artifact.model_copy(update={"name": "renamed"})]}), store)
    assert taken.readlink() == store.engine_path("llama", "renamed")
    assert tree(taken) == FILES


def test_the_link_does_not_go_over_from_an_artifact_that_stays(store, spec, taken):
    [artifact] = spec.artifacts
    more = make_artifact(artifact.uri, "more", link=str(taken))
    both = spec.model_copy(update={"artifacts": [artifact.model_copy(update={"link": None}), more]})
    with raises(DiskError, 4, "it is the link of live/llama/weights"):
        stage(both, store)
    taken.unlink()
    stage(both, store)
    assert taken.readlink() == store.engine_path("llama", "more")


def test_a_link_into_what_is_live_that_is_nobodys_engine_path_is_left_alone(store, spec, taken):
    inside = store.engine_path("llama", "weights") / "layers"
    write_link(taken, str(inside))
    with raises(DiskError, 4, "it is the link of live/llama/weights/layers"):
        stage(spec, store)


@pytest.mark.parametrize("link", ["relative/path", "", "/"])
def test_a_link_is_an_absolute_path(link):
    body = {"deployment": "d", "artifacts": [{"name": "w", "uri": "file:///x", "link": link}]}
    with raises(SpecError, 2, "artifacts[0].link"):
        parse_spec(body, "here")
