"""Sealing a prefix that already holds the files: the same manifest as publishing them would have made."""

from __future__ import annotations

import os

import pytest

from llm_prefetch import manifest as manifests
from llm_prefetch.errors import OriginNotFoundError, OriginUnavailableError
from llm_prefetch.manifest import CHUNK_BYTES
from llm_prefetch.publish import publish
from llm_prefetch.sealing import seal_prefix
from llm_prefetch.stage import stage
from tests.samples import FILES, Counter, make_folder, make_spec, raises, tree

BIG = {**FILES, "big": os.urandom(2 * CHUNK_BYTES + 3)}


@pytest.fixture
def prefix(tmp_path):
    return make_folder(tmp_path / "prefix", BIG)


@pytest.mark.usefixtures("no_leaks")
def test_a_sealed_prefix_has_the_version_of_a_published_one(prefix, tmp_path):
    progress = Counter()
    sealed = seal_prefix(f"file://{prefix}", progress=progress)
    assert sealed.version == publish(prefix, f"file://{tmp_path}/published").version
    assert (sealed.files, sealed.bytes) == (len(BIG), sum(map(len, BIG.values())))
    assert progress.done == progress.total == sealed.bytes


def test_staging_a_sealed_prefix_knows_its_version_before_a_byte_moves(prefix, store):
    version = seal_prefix(f"file://{prefix}").version
    assert stage(make_spec(f"file://{prefix}", version=version), store).artifacts[0].version == version


def test_a_dry_run_writes_nothing(prefix):
    before = tree(prefix)
    assert seal_prefix(f"file://{prefix}", dry_run=True).version.startswith("b3-")
    assert tree(prefix) == before


def test_sealing_again_after_a_change_replaces_the_manifest(prefix):
    one = seal_prefix(f"file://{prefix}").version
    (prefix / "config.json").write_bytes(b"{}")
    two = seal_prefix(f"file://{prefix}").version
    assert one != two
    assert manifests.parse_manifest((prefix / manifests.PATH).read_bytes(), "here").version == two


def test_an_empty_prefix_is_not_sealed(tmp_path):
    with raises(OriginNotFoundError, 3, "nothing there"):
        (tmp_path / "empty").mkdir()
        seal_prefix(f"file://{tmp_path}/empty")


def test_an_object_that_ends_early_is_named_with_its_origin(prefix, monkeypatch):
    """As when somebody cuts it meanwhile; the system call is the one thing here that is not real."""
    monkeypatch.setenv("LLM_PREFETCH_ATTEMPTS", "1")
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with raises(OriginUnavailableError, 3, "ended early", f"file://{prefix}"):
        seal_prefix(f"file://{prefix}")
