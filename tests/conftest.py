"""What every test starts from: an environment without our settings and without anybody's credentials."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from llm_prefetch.store import NodeStore, open_store
from tests.samples import NOBODY, make_published

os.environ["HF_HUB_DISABLE_TELEMETRY"] = (
    "1"  # read when the client is imported: no test asks the real Hub for anything
)

pytest_plugins = ["tests.real_fixtures"]

hypothesis.settings.register_profile("fast", max_examples=40, deadline=None)
hypothesis.settings.load_profile("fast")


_REAL_SECONDS = 600
"""For a test with real parts, which may be the one that starts those of the session."""
_LONGEST_FIRST = ("engine", "ray", "prefect", "browser", "cloud", "slow")
# Files that kill processes by the dozen or wait for deadlines, by how their paths begin; everything else in
# `make check` takes seconds.
_SLOW = (
    "cli/test_exit_codes.py",
    "cli/test_interrupt.py",
    "crash/",
    "origins/test_https.py",
    "serve/test_group",
    "serve/test_prefect_rung",
    "serve/test_stage_rung.py",
    "serve/test_whole_start.py",
    "transfer/test_crew.py",
)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers, a long file that begins last is waited for alone."""
    for item in items:
        if item.nodeid.startswith(tuple(f"tests/{name}" for name in _SLOW)):
            item.add_marker("slow")
        real = {"ray", "prefect"} & {mark.name for mark in item.iter_markers()}
        if real and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_REAL_SECONDS))
    marks = {item.nodeid: {mark.name for mark in item.iter_markers()} for item in items}
    items.sort(
        key=lambda item: next(
            (place for place, name in enumerate(_LONGEST_FIRST) if name in marks[item.nodeid]), 9
        )
    )


@pytest.fixture(autouse=True)
def clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of ours, no cloud credentials, and a home and a store that end with the test."""
    ours = (
        "LLM_PREFETCH_",
        "AWS_",
        "AZURE_",
        "AZURITE_",
        "GOOGLE_",
        "STORAGE_EMULATOR_HOST",
        "GCE_METADATA_",
    )
    for name in [name for name in os.environ if name.startswith(ours)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LLM_PREFETCH_ROOT", str(tmp_path / "store"))


@pytest.fixture
def store(tmp_path: Path) -> NodeStore:
    """An empty node store."""
    return open_store(tmp_path / "store", create=True)


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    """A published folder."""
    make_published(tmp_path / "origin")
    return tmp_path / "origin"


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """After the test no thread is left, and no descriptor but those from before."""
    threads, descriptors = set(threading.enumerate()), _descriptors()
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in threads]
    assert not left
    assert _descriptors() - descriptors == set()


@pytest.fixture
def nobodys_folder() -> Iterator[Path]:
    """A folder that an unprivileged user may write to, for tests that act as one (see `samples.as_nobody`)."""
    with tempfile.TemporaryDirectory(prefix="llm-prefetch-nobody-") as name:
        if os.geteuid() == 0:
            os.chown(name, NOBODY, NOBODY)
        yield Path(name)


def _descriptors() -> set[tuple[str, str]]:
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add((link.name, str(link.readlink())))
    return {(name, target) for name, target in found if not target.startswith("/proc/")}
