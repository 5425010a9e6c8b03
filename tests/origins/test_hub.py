"""`hf://`, by the real client of the Hub against a small Hub in this process."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest

from llm_prefetch.errors import (
    DigestError,
    OriginAccessError,
    OriginNotFoundError,
    UnsupportedOriginError,
)
from llm_prefetch.live import check_deployment
from llm_prefetch.origins import open_origin
from llm_prefetch.stage import stage
from tests.real.hub import TOKEN, Repo, git_id
from tests.samples import FILES, TOTAL, make_folder, make_spec, no_record, raises, tree

NAMES = {f"odd/{name}": name.encode() for name in ("a b", "a+b", "a%20b", "a#b", "a?b=c&d", "ünï", "[x].bin")}
NEW = {**FILES, "layers/1/weights.bin": b"the other layer's, trained on"}


@pytest.fixture
def repo(hub) -> Repo:
    hub.repos["org/model"] = repo = Repo()
    repo.commit({**FILES, **NAMES}, "old", "refs/pr/1")
    repo.commit(NEW, "main")
    return repo


def _read(origin, item, start=0, length=None):
    reader = origin.reader()
    try:
        data = bytearray(item.size if length is None else length)
        body, at = reader.open_range(item, start, len(data)), 0
        while count := body.readinto(memoryview(data)[at:]):
            at += count
        return bytes(data[:at])
    finally:
        reader.close()


@pytest.mark.parametrize(
    "uri",
    [
        "hf://model",
        "hf://org/model/sub",
        "hf://org/model@",
        "hf://datasets/org/x",
        "hf://o g/x",
        "hf://a/b?c",
    ],
)
def test_what_is_no_model_is_refused_before_anything_is_asked(uri):
    with raises(UnsupportedOriginError, 2, "hf://org/repo@revision"):
        open_origin(uri)


def test_a_commit_is_listed_over_pages_with_what_the_hub_states(hub, repo):
    found = {info.path: info for info in open_origin("hf://org/model@old").list()}
    assert {path: info.size for path, info in found.items()} == {
        path: len(data) for path, data in {**FILES, **NAMES}.items()
    }
    large = "layers/0/weights.bin"
    assert found[large].etag == f"sha256:{hashlib.sha256(FILES[large]).hexdigest()}"
    assert found["config.json"].etag == f"git:{git_id(FILES['config.json'])}"
    assert sum("/tree/" in asked.path for asked in hub.requests) > 2


@pytest.mark.parametrize("revision", ["", "/", "@main", "@main/", "@old", "@refs/pr/1", "@COMMIT"])
def test_any_name_of_a_revision_stages_its_files_and_again_reads_nothing(hub, repo, store, revision):
    uri = f"hf://org/model{revision}".replace("COMMIT", repo.names["old"])
    files = NEW if revision.rstrip("/") in ("", "@main") else {**FILES, **NAMES}
    report = stage(make_spec(uri), store)
    assert report.fetched_bytes == hub.sent == sum(map(len, files.values()))
    assert tree(store.engine_path("llama", "weights").resolve()) == files
    assert check_deployment(store, "llama", full=True).ready
    hub.forget()
    again = stage(make_spec(uri), store)
    assert (again.artifacts[0].version, again.fetched_bytes) == (report.artifacts[0].version, 0)
    assert (hub.sent, hub.cdn_requests) == (0, [])
    assert not [asked for asked in hub.requests if "resolve" in asked.path]


def test_the_commit_that_was_found_first_is_read_to_the_end(hub, repo):
    origin = open_origin("hf://org/model@main")
    found = {info.path: info for info in origin.list()}
    repo.commit({"config.json": b"another", "layers/1/weights.bin": b"another"}, "main")
    for path in ("config.json", "layers/1/weights.bin"):
        assert _read(origin, found[path]) == NEW[path]
    assert {asked.path.split("/resolve/")[1][:40] for asked in hub.requests if "/resolve/" in asked.path} == {
        origin._look().commit
    }


@pytest.mark.parametrize("transport", ["auto", "fsspec"])
def test_the_token_goes_to_the_hub_and_to_nobody_else(hub, repo, store, transport):
    stage(make_spec("hf://org/model", transport=transport), store)
    assert {
        asked.headers.get("Authorization", asked.headers.get("authorization")) for asked in hub.requests
    } == {f"Bearer {TOKEN}"}
    assert hub.cdn_requests
    for asked in hub.cdn_requests:
        assert TOKEN not in str(asked.headers)
        assert "range" in {name.lower() for name in asked.headers}


def test_a_range_of_a_large_file_costs_one_question_for_all(hub, repo):
    origin = open_origin("hf://org/model")
    item = origin.stat("layers/0/weights.bin")
    for start in range(5):
        assert _read(origin, item, start, 2) == FILES[item.path][start : start + 2]
    assert sum("/resolve/" in asked.path for asked in hub.requests) == 1
    assert len(hub.cdn_requests) == 5


def test_an_address_that_expired_is_asked_for_again(hub, repo):
    origin = open_origin("hf://org/model")
    item = origin.stat("layers/0/weights.bin")
    assert _read(origin, item) == FILES[item.path]
    hub.expire()
    assert _read(origin, item) == FILES[item.path]
    assert len(hub.signatures) == 1


@pytest.mark.parametrize("path", ["config.json", "layers/0/weights.bin"])
def test_a_gated_model_says_how_to_get_in(hub, repo, store, monkeypatch, path):
    repo.gated = True
    spec = make_spec("hf://org/model", include=[path])
    monkeypatch.setenv("HF_TOKEN", "hf_0ther")
    with raises(OriginAccessError, 3, "gated", "accept its licence", "HF_TOKEN", "hf://org/model") as caught:
        stage(spec, store)
    assert "hf_0ther" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert stage(spec, store).fetched_bytes == len(FILES[path])


def test_a_private_model_is_read_with_the_token(hub, repo, store, monkeypatch):
    repo.private = True
    assert stage(make_spec("hf://org/model"), store).fetched_bytes > TOTAL
    monkeypatch.delenv("HF_TOKEN")
    with raises(OriginNotFoundError, 3, "private", "HF_TOKEN"):
        list(open_origin("hf://org/model").list())


def test_a_missing_model_and_a_missing_revision_are_told_apart(hub, repo):
    with raises(OriginNotFoundError, 3, "no such model", "hf://org/none"):
        list(open_origin("hf://org/none").list())
    with raises(OriginNotFoundError, 3, "no such revision 'v9'", "hf://org/model@v9"):
        list(open_origin("hf://org/model@v9").list())


@pytest.mark.cloud
def test_a_process_of_its_own_stages_from_the_endpoint_of_its_environment(hub, repo, store, tmp_path):
    spec = make_folder(tmp_path, {"spec.json": make_spec("hf://org/model@old").model_dump_json().encode()})
    done = subprocess.run(
        [sys.executable, "-m", "llm_prefetch.cli", "stage", spec / "spec.json", "--json"],
        env={**os.environ, "HF_HOME": str(tmp_path / "hf")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert tree(store.engine_path("llama", "weights").resolve()) == {**FILES, **NAMES}
    assert TOKEN not in done.stdout + done.stderr
    assert TOKEN not in "".join(str(asked.headers) for asked in hub.cdn_requests)


@pytest.mark.parametrize("path", ["config.json", "layers/0/weights.bin"])
def test_bytes_that_are_not_those_of_the_commit_are_not_committed(hub, store, path):
    repo = hub.repos["org/model"] = Repo()
    repo.commit(FILES)
    repo.served[path] = bytes([FILES[path][0] ^ 1]) + FILES[path][1:]
    with raises(DigestError, 5, repr(path), "hf://org/model"):
        stage(make_spec("hf://org/model"), store)
    assert no_record(store)
    repo.served.clear()
    stage(make_spec("hf://org/model"), store)
    assert tree(store.engine_path("llama", "weights").resolve()) == FILES
