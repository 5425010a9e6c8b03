"""From the store to where engines read: whole folders, checked bytes, and nothing that is an engine's is touched."""

from __future__ import annotations

import contextlib
import os
import stat
import threading

import pytest

from llm_prefetch import leases
from llm_prefetch.caches.aside import set_aside
from llm_prefetch.caches.install import (
    cache_environment,
    cache_root,
    check_installed,
    discard,
    install,
    set_environment,
)
from llm_prefetch.errors import DigestError, LockTimeoutError, NotReadyError, TrustError
from llm_prefetch.stage import stage
from llm_prefetch.store import locked, release
from tests.caches.made import ANY, CACHE, GRAPH, INSTALLED, make_spec, publish_cache, stage_cache
from tests.real.processes import wait_until
from tests.samples import make_manifest

MODEL = f"{GRAPH}/rank_0_0/model"


@pytest.fixture
def committed(store, tmp_path):
    """A node that holds the cache, and where it is to be installed anew."""
    stage_cache(store, tmp_path, ANY)
    root = cache_root(store, "llama")
    root.rename(tmp_path / "first")
    return store, root


def _version(store):
    [record] = store.root.glob("artifacts/compile/*.json")
    return record.stem


def _files(root):
    return sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if path.is_file() and ".llm-prefetch" not in path.parts
    )


def _install(store):
    return install(store, "llama", "compile", _version(store))


def test_all_that_engines_read_lies_where_they_read_it_and_nothing_else(committed):
    store, root = committed
    done = _install(store)
    assert _files(root) == sorted(INSTALLED)
    assert GRAPH in done.added
    assert (root / MODEL).read_bytes() == CACHE[MODEL]
    assert check_installed(store, "llama", _version(store)) == ""


def test_the_place_is_a_function_of_names_alone(store):
    assert cache_root(store, "llama") == store.root / "caches" / "llama"
    root = cache_root(store, "llama")
    found = cache_environment(root, "cuda")
    assert found == dict.fromkeys(("VLLM_CACHE_ROOT", "TRITON_HOME", "FLASHINFER_WORKSPACE_BASE"), str(root))
    assert cache_environment(root, "cpu") == {**found, "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}


def test_engines_get_files_of_their_own_that_only_this_user_may_touch(committed):
    store, root = committed
    _install(store)
    pristine = store.artifact("compile", _version(store)) / MODEL
    assert (root / MODEL).stat().st_ino != pristine.stat().st_ino
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE((root / MODEL).stat().st_mode) == 0o600
    (root / MODEL).write_bytes(b"written anew by an engine")
    assert pristine.read_bytes() == CACHE[MODEL]


def test_a_second_time_nothing_is_done(committed):
    store, root = committed
    first = _install(store)
    inode = (root / MODEL).stat().st_ino
    second = _install(store)
    assert (second.added, set(second.kept)) == ((), set(first.added))
    assert (root / MODEL).stat().st_ino == inode


def test_what_a_killed_installation_has_left_is_swept(committed):
    store, root = committed
    left = root / ".llm-prefetch" / "building-1-2"
    left.mkdir(parents=True, mode=0o700)
    for folder in (root, root / ".llm-prefetch"):
        folder.chmod(0o700)
    _install(store)
    assert not left.exists()


def test_a_replica_does_not_wait_long_for_another_installation(committed):
    store, _ = committed
    waiting = {"seconds": 1.0, "waiting_for": "nothing"}
    with (
        locked(store.lock("install-llama"), **waiting),
        pytest.raises(LockTimeoutError, match="another installation of compile did not end within 0 s"),
    ):
        install(store, "llama", "compile", _version(store), seconds=0.0)


def test_a_folder_that_an_engine_has_made_is_left_as_it_is(committed):
    store, root = committed
    own = root / GRAPH / "rank_0_0" / "model"
    own.parent.mkdir(parents=True)
    root.chmod(0o700)
    own.write_bytes(b"half writ")
    done = _install(store)
    assert GRAPH in done.kept
    assert own.read_bytes() == b"half writ"
    assert not (root / GRAPH / "inductor_cache").exists()
    assert check_installed(store, "llama", _version(store)) == ""


def test_a_folder_is_there_whole_or_not_at_all(committed):
    store, root = committed
    counts, done = set(), threading.Event()

    def watch():
        while not done.is_set():
            if (root / GRAPH).exists():
                counts.add(len(_files(root / GRAPH)))

    thread = threading.Thread(target=watch)
    thread.start()
    _install(store)
    wait_until(lambda: bool(counts), 30, "it is seen at all")
    done.set()
    thread.join()
    assert counts == {2}


def test_wrong_bytes_in_the_store_are_not_installed(committed):
    store, root = committed
    path = store.artifact("compile", _version(store)) / MODEL
    times = path.stat()
    path.chmod(0o644)
    path.write_bytes(CACHE[MODEL].replace(b"graph", b"virus"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # no quick check would see it
    with pytest.raises(DigestError, match="model' is not what the manifest says"):
        _install(store)
    assert not (root / GRAPH).exists()
    assert check_installed(store, "llama", _version(store)) == "not installed"


def test_a_cut_file_in_the_store_is_not_installed(committed):
    store, root = committed
    path = store.artifact("compile", _version(store)) / MODEL
    path.chmod(0o644)
    path.write_bytes(CACHE[MODEL][:3])
    with pytest.raises(DigestError):
        _install(store)
    assert not (root / GRAPH).exists()


def test_a_manifest_of_another_version_is_not_believed(committed):
    store, root = committed
    store.manifest("compile", _version(store)).write_bytes(make_manifest(CACHE).to_json())
    with pytest.raises(DigestError, match="the manifest of compile is that of"):
        _install(store)
    assert not root.exists()


def test_a_link_in_the_store_is_not_followed(committed, tmp_path):
    store, root = committed
    path = store.artifact("compile", _version(store)) / MODEL
    (tmp_path / "elsewhere").write_bytes(CACHE[MODEL])
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Exception, match="disk answered"):
        _install(store)
    assert not (root / GRAPH).exists()


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_folder_that_others_may_write_to_gets_no_code(committed, mode):
    store, root = committed
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(TrustError, match="others may write to it"):
        _install(store)
    assert _files(root) == []


def test_a_link_in_place_of_the_folder_gets_no_code(committed, tmp_path):
    store, root = committed
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TrustError):
        _install(store)
    assert not list((tmp_path / "elsewhere").rglob("model"))


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_copy_that_was_damaged_is_made_anew(committed, damage):
    store, root = committed
    _install(store)
    path = root / MODEL
    if damage == "cut":
        os.truncate(path, 3)
    else:
        path.unlink()
    assert damage in check_installed(store, "llama", _version(store))
    assert GRAPH in _install(store).added
    assert path.read_bytes() == CACHE[MODEL]


@contextlib.contextmanager
def _another_replica(store):
    """It runs beside our own."""
    held = [leases.hold(store, "bundle-x", deployment="llama") for _ in range(2)]
    try:
        yield
    finally:
        for fd in held:
            release(fd)


def test_a_damaged_copy_stays_while_another_replica_runs_with_it(committed):
    store, root = committed
    _install(store)
    os.truncate(root / MODEL, 3)
    with _another_replica(store), pytest.raises(NotReadyError, match="another replica runs with"):
        _install(store)
    assert (root / MODEL).stat().st_size == 3


def test_what_an_engine_writes_anew_is_no_damage(committed):
    store, root = committed
    _install(store)
    (root / f"{MODEL}.tmp").write_bytes(b"v2")
    (root / f"{MODEL}.tmp").rename(root / MODEL)
    grown = root / INSTALLED[-1]
    grown.write_bytes(grown.read_bytes() + b"more")
    assert check_installed(store, "llama", _version(store)) == ""


def test_a_capture_has_the_folder_for_itself(committed):
    store, root = committed
    _install(store)
    set_aside(root, 60.0)
    for change in (install, lambda *given: discard(store, "llama", given[-1])):
        with pytest.raises(NotReadyError, match="a compile cache is being captured here"):
            change(store, "llama", "compile", _version(store))
    assert [path.name for path in root.iterdir()] == [".capture"]


def test_a_capture_that_was_killed_has_it_until_its_time_has_passed(committed):
    store, root = committed
    _install(store)
    set_aside(root, -1.0)
    (root / "half").write_bytes(b"what its engine has left")
    assert _install(store).added == ()
    assert _files(root) == sorted(INSTALLED)


def test_and_longer_if_a_replica_runs_which_may_be_its_own(committed):
    store, root = committed
    set_aside(root, -1.0)
    with _another_replica(store), pytest.raises(NotReadyError, match="being captured"):
        _install(store)
    assert _install(store).added


OTHER = f"torch_compile_cache/torch_aot_compile/{'b' * 64}/rank_0_0/model"


def _stage_another(store, tmp_path, files):
    cache = publish_cache(tmp_path / "next", ANY, files)
    stage(make_spec(tmp_path / "next", cache), store)
    return cache[1]


def test_a_new_version_lies_beside_what_replicas_run_with(committed, tmp_path):
    store, root = committed
    _install(store)
    _stage_another(store, tmp_path, {OTHER: b"another graph"})
    assert {MODEL, OTHER} <= set(_files(root))


def test_a_new_version_of_the_same_key_takes_the_place_of_the_old_one(committed, tmp_path):
    store, root = committed
    old = _version(store)
    _install(store)
    new = _stage_another(store, tmp_path, {MODEL: b"another graph"})
    assert (root / MODEL).read_bytes() == b"another graph"
    assert [check_installed(store, "llama", version) for version in (old, new)] == ["not installed", ""]


def test_unless_a_replica_runs_with_it(committed, tmp_path):
    store, root = committed
    _install(store)
    held = leases.hold(store, "bundle-x", deployment="llama")
    held_too = leases.hold(store, "bundle-x", deployment="llama")
    new = _stage_another(store, tmp_path, {MODEL: b"another graph"})
    for fd in (held, held_too):
        release(fd)
    assert (root / MODEL).read_bytes() == CACHE[MODEL]
    assert check_installed(store, "llama", new) == "not installed"


def test_what_a_user_says_of_headers_stays():
    environment = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "1", "VLLM_CACHE_ROOT": "/elsewhere"}
    set_environment(environment, {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0", "VLLM_CACHE_ROOT": "/x"})
    assert environment == {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "1", "VLLM_CACHE_ROOT": "/x"}
