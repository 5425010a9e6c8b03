"""An artifact under a path of the user's choice, as `CloudDownloader` gives it with `paths: [(uri, local)]`."""

from __future__ import annotations

import pytest

from llm_prefetch.errors import DiskError, SpecError
from llm_prefetch.live import rollback
from llm_prefetch.spec import parse_spec
from llm_prefetch.stage import stage
from tests.samples import FILES, make_published, make_spec, raises, tree


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


@pytest.mark.parametrize("link", ["relative/path", "", "/"])
def test_a_link_is_an_absolute_path(link):
    body = {"deployment": "d", "artifacts": [{"name": "w", "uri": "file:///x", "link": link}]}
    with raises(SpecError, 2, "artifacts[0].link"):
        parse_spec(body, "here")
