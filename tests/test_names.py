"""What a deployment is called elsewhere, and its name on the node."""

from __future__ import annotations

import os

import pytest

from llm_prefetch.errors import DiskError, SpecError
from llm_prefetch.names import remember, resolve_name, speaks_for
from tests.samples import raises

ID = "6f9619ff-8b86-4011-b42d-00c04fc964ff"
OTHER_ID = "00000000-0000-4000-8000-000000000001"


def test_a_uuid_means_what_was_remembered_however_it_is_written(store):
    remember(store, ID, "llama")
    assert resolve_name(store, ID) == "llama"
    assert resolve_name(store, ID.upper()) == "llama"
    link = store.root / "names" / ID
    assert str(link.readlink()) == "../live/llama"  # a person who looks sees it


def test_several_deployments_may_have_one_name_and_the_last_word_counts(store):
    remember(store, ID, "llama")
    remember(store, OTHER_ID, "llama")
    assert [resolve_name(store, ID), resolve_name(store, OTHER_ID)] == ["llama", "llama"]
    remember(store, ID, "mistral")
    assert [resolve_name(store, ID), resolve_name(store, OTHER_ID)] == ["mistral", "llama"]


def test_a_uuid_that_nobody_staged_says_what_to_do(store):
    with raises(SpecError, 2, ID, "flow/deployment", "run it once"):
        resolve_name(store, ID)


def test_a_name_needs_nothing_to_be_remembered(store):
    assert resolve_name(store, "llama-3.1_8b") == "llama-3.1_8b"
    assert resolve_name(store, "stage/llama-3-8b") == "llama-3-8b"
    assert not (store.root / "names").exists()


def test_a_deployment_of_another_name_than_what_it_stages_is_found_too(store):
    remember(store, "stage/every morning", "llama")
    remember(store, "stage/mistral", "mistral")
    assert resolve_name(store, "stage/every morning") == "llama"
    assert resolve_name(store, "reconcile/mistral") == "mistral"


@pytest.mark.parametrize(
    "reference", ["", ".", "..", "/live", "a/b/c", "/", "stage/", "stage/..", "a" * 500, "x\n"]
)
def test_what_names_nothing_is_refused(store, reference):
    with raises(SpecError, 2, "names no deployment"):
        resolve_name(store, reference)


def test_an_index_that_was_tampered_with_leads_nowhere_else(store):
    remember(store, ID, "llama")
    link = store.root / "names" / ID
    link.unlink()
    link.symlink_to("/etc/..")
    with raises(SpecError, 2, ID):
        resolve_name(store, ID)


def test_remembering_again_writes_nothing(store):
    remember(store, ID, "llama")
    before = os.lstat(store.root / "names" / ID).st_ino
    remember(store, ID, "llama")
    assert os.lstat(store.root / "names" / ID).st_ino == before


def test_a_disk_that_refuses_is_our_error(store):
    (store.root / "names").write_text("in the way")
    with raises(DiskError, 4, "names"):
        remember(store, ID, "llama")


def test_only_a_deployment_with_a_spec_of_its_own_speaks_for_a_name():
    assert speaks_for({"spec": {"deployment": "llama"}, "root": ""}, "llama")
    assert not speaks_for({"spec": {"deployment": "other"}}, "llama")  # this run was given another spec
    assert not speaks_for({}, "llama")
    assert not speaks_for({"spec": "{{ a template }}"}, "llama")
