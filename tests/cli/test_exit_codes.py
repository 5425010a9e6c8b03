"""Each exit code from a cause that really happens, and as one line for a person and data for a program."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys

import pytest

from llm_prefetch.errors import (
    DigestError,
    DiskPermissionError,
    LayoutError,
    LockTimeoutError,
    MissingExtraError,
    NoSpaceError,
    NotReadyError,
    OriginNotFoundError,
    OriginUnavailableError,
    SpecError,
    UnsafePathError,
)
from llm_prefetch.live import start_lock
from llm_prefetch.store import acquire, open_store, release
from tests.cli.conftest import Outcome
from tests.samples import (
    FILES,
    as_nobody,
    flip_byte,
    make_folder,
    make_manifest,
    make_published,
    put_manifest,
)


def assert_error(done: Outcome, kind, *fragments: str) -> None:
    """One line on stderr: which error, what, where and what to do; nothing on stdout but data."""
    *talk, line = done.err.splitlines()
    assert done.code == kind.exit_code
    assert "Traceback" not in done.err
    assert line.startswith(f"llm-prefetch: {kind.code}: ")
    assert not any(other.startswith("llm-prefetch:") for other in talk)
    for fragment in fragments:
        assert fragment in line


def both(run, kind, *arguments: object, fragments: tuple[str, ...] = ()) -> None:
    """The same error for a person and for a program."""
    done = run(*arguments)
    assert_error(done, kind, *fragments)
    assert done.out == ""
    done = run(*arguments, "--json")
    assert_error(done, kind, *fragments)
    assert done.json["error"]["code"] == kind.code
    assert {"message", "where", "hint"} < set(done.json["error"])


@pytest.fixture
def weights(staged, root):
    """A file of the staged artifact."""
    [file] = root.glob("artifacts/weights/b3-*/layers/0/weights.bin")
    return file


def test_1_a_byte_that_flipped_is_corrupt_to_a_full_check(run, weights):
    flip_byte(weights)
    done = run("verify", "--full")
    assert done.code == 1
    assert done.rows[1][2] == "CORRUPT"
    assert "layers/0/weights.bin" in done.rows[1][-1]


@pytest.mark.parametrize("what", [[], ["llama"], ["weights"]])
def test_1_a_deleted_file_is_partial_to_a_quick_check(run, weights, what):
    weights.parent.chmod(0o755)
    weights.unlink()
    done = run("verify", *what, "--json")
    assert done.code == 1
    assert [check["verdict"] for check in done.json["checks"]] == ["PARTIAL"]
    assert not done.json["ready"]


def test_1_a_generation_that_is_damaged_is_not_rolled_back_to(run, two_generations, root):
    for file in root.glob("artifacts/weights/*/config.json"):
        file.parent.chmod(0o755)
        file.unlink()
    both(run, NotReadyError, "rollback", "llama", fragments=("weights", "PARTIAL", "stage"))


def test_2_a_spec_that_is_none(run, tmp_path):
    both(run, SpecError, "stage", tmp_path / "nothing.yaml", fragments=("nothing.yaml",))


def test_2_a_cluster_without_ray_installed_names_the_extra(run, spec, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("llm_prefetch.cluster")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("llm_prefetch.cluster", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)  # as Python remembers what is not there
    both(run, MissingExtraError, "stage", spec, "--cluster", fragments=("llm-prefetch[ray]",))


def test_3_a_folder_that_is_not_there(run, write_spec, tmp_path):
    spec = write_spec(f"file://{tmp_path}/gone")
    both(run, OriginNotFoundError, "stage", spec, fragments=("gone",))
    both(run, OriginNotFoundError, "plan", spec, fragments=("gone",))


@pytest.mark.parametrize("command", ["stage", "plan", "publish"])
def test_3_an_endpoint_that_does_not_answer(run, write_spec, model, monkeypatch, command):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # closed again below: nobody listens there
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }.items():
        monkeypatch.setenv(name, value)
    arguments = (
        (command, model, "s3://bucket/prefix")
        if command == "publish"
        else (command, write_spec("s3://bucket/prefix"))
    )
    done = run(*arguments)
    assert_error(done, OriginUnavailableError, "s3://bucket/prefix", "AWS_ENDPOINT_URL")


def test_4_a_root_that_may_not_be_written(run, nobodys_folder):
    uri = make_published(nobodys_folder / "origin")
    spec = nobodys_folder / "spec.yaml"
    spec.write_text(f'deployment: llama\nartifacts: [{{name: weights, uri: "{uri}"}}]')
    (nobodys_folder / "store").mkdir(mode=0o555)
    with as_nobody():
        both(run, DiskPermissionError, "stage", spec, "--root", nobodys_folder / "store")
        assert run("plan", spec, "--root", nobodys_folder / "store").code == 0, "which needs to write nothing"


def test_4_a_disk_that_is_too_small_is_known_before_a_byte_is_fetched(run, write_spec, tmp_path, root):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    make_folder(tmp_path / "huge", {"a": b""})
    os.truncate(tmp_path / "huge" / "a", free + 2**30)
    spec = write_spec(f"file://{tmp_path}/huge")
    assert run("plan", spec).out.endswith("it does not fit\n")
    both(run, NoSpaceError, "stage", spec, fragments=("weights", "free", str(root)))


def test_4_a_file_where_the_root_should_be(run, spec, tmp_path):
    (tmp_path / "file").write_text("")
    for command in (("ls",), ("verify",), ("plan", spec), ("stage", spec)):
        done = run(*command, "--root", tmp_path / "file")
        assert (done.code, done.out) == (4, "")
        assert "a file is in the way" in done.err


def test_4_no_store_yet(run, tmp_path):
    for command in (("ls",), ("verify",), ("rollback", "llama")):
        both(run, LayoutError, *command, "--root", tmp_path / "none", fragments=("stage something first",))


def test_4_a_store_of_another_layout_is_neither_read_nor_written(run, staged, root):
    (root / "LAYOUT").write_text("2\n")
    before = sorted(root.rglob("*"))
    for command in (("ls",), ("verify",), ("rollback", "llama"), ("plan", staged), ("stage", staged)):
        both(run, LayoutError, *command, fragments=("'2'", str(root)))
    assert sorted(root.rglob("*")) == before


def test_4_a_replica_that_does_not_finish_starting(run, two_generations, root, monkeypatch):
    monkeypatch.setenv("LLM_PREFETCH_SWITCH_SECONDS", "0")
    fd = acquire(start_lock(open_store(root), "llama"), shared=True, seconds=0, waiting_for="nobody")
    with contextlib.closing(os.fdopen(os.dup(fd))):
        both(run, LockTimeoutError, "rollback", "llama", fragments=("starting replica of llama",))
        assert run("rollback", "llama", "--dry-run").code == 0, "which takes no lock"
    release(fd)
    assert run("rollback", "llama").code == 0


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "a/../../evil", "", "a\\b", "nul\0"])
def test_5_a_manifest_that_leads_out_of_its_folder(run, write_spec, tmp_path, path):
    make_folder(tmp_path / "origin")
    manifest = make_manifest({"SAFE": b"x"}).to_json().replace(b'"SAFE"', json.dumps(path).encode())
    put_manifest(tmp_path / "origin", manifest)
    both(run, UnsafePathError, "stage", write_spec(f"file://{tmp_path}/origin"), fragments=("unsafe path",))
    assert not (tmp_path / "evil").exists()


def test_5_bytes_that_are_not_those_of_the_manifest(run, write_spec, tmp_path, root):
    uri = make_published(tmp_path / "origin")
    flip_byte(tmp_path / "origin" / "config.json")
    both(run, DigestError, "stage", write_spec(uri), fragments=("config.json", "publish it again"))
    assert not list(root.glob("artifacts/*/*.json"))


def test_after_any_error_the_next_staging_converges(run, write_spec, tmp_path):
    uri = make_published(tmp_path / "origin")
    flip_byte(tmp_path / "origin" / "config.json")
    assert run("stage", write_spec(uri)).code == 5
    make_folder(tmp_path / "origin", {"config.json": FILES["config.json"]})
    assert run("stage", write_spec(uri)).code == 0
