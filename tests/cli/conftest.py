"""The command line as its user meets it: arguments in; an exit code, data on stdout and talk on stderr out."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from llm_prefetch.cli import main
from tests.samples import FILES, make_folder

REPOSITORY = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "llm_prefetch.cli")


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What was printed on stdout, which must be one JSON document and nothing else."""
        return json.loads(self.out)

    @property
    def rows(self) -> list[list[str]]:
        """The lines on stdout, each cut where two spaces or more separate columns."""
        return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in self.out.splitlines()]


@pytest.fixture
def run(capsys, monkeypatch) -> Callable[..., Outcome]:
    """Run a command in this process."""

    def run(*arguments: object, stdin: str | None = None) -> Outcome:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as left:  # --help and --version
            code = int(left.code or 0)
        printed = capsys.readouterr()
        return Outcome(code, printed.out, printed.err)

    return run


@pytest.fixture
def spawn() -> Callable[..., subprocess.Popen[bytes]]:
    """Run a command in a process of its own."""

    def spawn(*arguments: object, **options: Any) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **options.pop("env", {})}
        return subprocess.Popen([*COMMAND, *map(str, arguments)], env=environment, **options)

    return spawn


@pytest.fixture
def root(tmp_path) -> Path:
    """The root of the node store, which is not there yet."""
    return tmp_path / "store"


@pytest.fixture
def model(tmp_path) -> Path:
    """A folder to publish."""
    return make_folder(tmp_path / "model")


@pytest.fixture
def write_spec(tmp_path) -> Callable[..., Path]:
    """Write a SPEC: one artifact for each URI, `weights`, `weights1`, ..."""

    def write(*uris: object, deployment: str = "llama", name: str = "spec.yaml", **more: Any) -> Path:
        artifacts = [{"name": f"weights{n or ''}", "uri": str(uri)} for n, uri in enumerate(uris)]
        path = tmp_path / name
        path.write_text(yaml.safe_dump({"deployment": deployment, "artifacts": artifacts, **more}))
        return path

    return write


@pytest.fixture
def spec(run, model, tmp_path, write_spec) -> Path:
    """A SPEC of one published artifact."""
    assert run("publish", model, f"file://{tmp_path}/origin").code == 0
    return write_spec(f"file://{tmp_path}/origin")


@pytest.fixture
def staged(run, spec) -> Path:
    """The same, staged."""
    assert run("stage", spec).code == 0
    return spec


@pytest.fixture
def two_generations(run, staged, tmp_path, write_spec) -> list[str]:
    """Two generations of `llama`, the second one live; the names of their bundles."""
    other = make_folder(tmp_path / "model2", {**FILES, "config.json": b"{}"})
    assert run("publish", other, f"file://{tmp_path}/origin2").code == 0
    assert run("stage", write_spec(f"file://{tmp_path}/origin2", name="second.yaml")).code == 0
    [deployment] = run("ls", "--json").json["deployments"]
    assert len(deployment["history"]) == 2
    return deployment["history"]
