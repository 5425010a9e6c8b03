"""`llm-prefetch doctor`, where there is neither Prefect nor a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_prefect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_a_healthy_machine_is_one_line_and_0(run: Run, root: Path) -> None:
    done = run("doctor", "--only", "node", "--root", root)
    assert done.code == 0
    [row] = done.rows
    assert row[0].startswith("ok")
    assert str(root) in done.out
    assert "nothing staged yet" in done.out
    assert not root.exists()


def test_an_unhealthy_machine_is_1_with_the_mend_below(run: Run, root: Path) -> None:
    root.write_text("a file")
    done = run("doctor", "--only", "node", "--root", root)
    assert done.code == 1
    first, second = done.out.splitlines()
    assert first.startswith("failed")
    assert "in the way" in first
    assert second.strip().startswith("-> ")
    assert done.err == "1 failed\n"


def test_json_has_every_finding(run: Run, root: Path) -> None:
    done = run("doctor", "--only", "node", "--root", root, "--json")
    assert done.json["healthy"] is True
    [finding] = done.json["findings"]
    assert set(finding) == {"about", "outcome", "says", "mend"}


def test_a_cluster_that_is_not_there_is_a_finding_and_not_an_error(run: Run, root: Path) -> None:
    done = run("doctor", "--only", "cluster", "--address", "127.0.0.1:1", "--root", root)
    assert done.code == 1
    assert "no Ray cluster answers" in done.out
    assert "--address" in done.out


def test_without_prefect_that_part_is_skipped_and_does_not_fail(run: Run) -> None:
    done = run("doctor", "--only", "prefect")
    assert done.code == 0
    assert done.out.startswith("skipped  prefect server")
