"""`prefect.yaml` and the form, without a server."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from llm_prefetch.spec import Spec

ROOT = Path(__file__).parents[2]
DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())[
    "deployments"
]


@pytest.fixture(autouse=True)
def home(clean_environment: None) -> None:
    """Prefect makes its folder there when it is imported."""
    Path.home().mkdir(exist_ok=True)


def test_prefect_finds_the_file_from_the_root() -> None:
    assert (ROOT / "prefect.yaml").samefile(ROOT / "deployments" / "prefect.yaml")


@pytest.mark.prefect
@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["name"])
def test_a_deployment_fits_its_flow(deployment: dict[str, Any]) -> None:
    parameters = dict(deployment["parameters"])
    spec = Spec.model_validate(parameters.pop("spec"))
    assert spec.deployment == deployment["name"]
    assert set(parameters) <= {"address", "root"}
    assert deployment["enforce_parameter_schema"] is True
    assert not any(schedule["active"] for schedule in deployment.get("schedules", []))
    module, _, name = deployment["entrypoint"].rpartition(".")
    assert getattr(importlib.import_module(module), name).name == "stage"
