"""`prefect.yaml` against the server's deployments."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from llm_prefetch.doctor.deployments import deployment_findings, read_declared
from llm_prefetch.doctor.findings import Finding
from llm_prefetch.errors import SpecError

FILE = """
definitions:
  pool: &pool {name: llm-prefetch, job_variables: {env: {A: b}}}
deployments:
  - name: llama
    entrypoint: flows.scale_up.scale_up
    description: Llama.
    tags: [b, a]
    parameters: {spec: {deployment: llama}}
    schedules:
      - {cron: "0 7 * * *", timezone: UTC, slug: morning, active: false}
      - {interval: 60, slug: often, active: false, parameters: {dry_run: true}}
    work_pool: *pool
"""
THERE: dict[str, Any] = {
    "name": "llama",
    "flow": "scale-up",
    "entrypoint": "flows.scale_up.scale_up",
    "description": "Llama.",
    "tags": ["a", "b"],
    "parameters": {"spec": {"deployment": "llama"}},
    "work_pool_name": "llm-prefetch",
    "job_variables": {"env": {"A": "b"}},
    "paused": False,
    "schedules": [
        {"schedule": {"cron": "0 7 * * *", "timezone": "UTC", "day_or": True}, "slug": "morning", "active": True,
         "parameters": {}},
        {"schedule": {"interval": 60.0, "anchor_date": "2026-01-01", "timezone": "UTC"}, "slug": "often",
         "active": False, "parameters": {"dry_run": True}},
    ],
}  # fmt: skip


def compare(tmp_path: Path, *there: dict[str, Any], text: str = FILE) -> list[Finding]:
    path = tmp_path / "prefect.yaml"
    path.write_text(text)
    return deployment_findings(read_declared(path), there)


def changed(**fields: Any) -> dict[str, Any]:
    return copy.deepcopy(THERE) | fields


def test_a_deployment_as_the_file_has_it_is_well_and_its_switched_on_schedule_is_no_difference(
    tmp_path: Path,
) -> None:
    [finding] = compare(tmp_path, THERE)
    assert finding.about == "deployment scale-up/llama"
    assert (str(finding.outcome), finding.says) == ("ok", "as in prefect.yaml; 1 of 2 schedules active")


def test_a_missing_one_is_a_failure_with_the_command(tmp_path: Path) -> None:
    for there in ([], [changed(name="other")], [changed(entrypoint="flows.stage.stage", flow="stage")]):
        [finding] = compare(tmp_path, *there)
        assert (str(finding.outcome), finding.says) == ("failed", "missing on the server")
        assert finding.mend == "prefect deploy --all"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("description", "old"),
        ("tags", ["a"]),
        ("parameters", {"spec": {"deployment": "other"}}),
        ("entrypoint", "flows.old.scale_up"),
        ("work_pool_name", "gpu"),
        ("job_variables", {}),
        ("schedules", THERE["schedules"][:1]),
    ],
)
def test_a_stale_one_names_what_differs(tmp_path: Path, field: str, value: object) -> None:
    [finding] = compare(tmp_path, changed(**{field: value}))
    word = {"work_pool_name": "work pool"}.get(field, field.replace("_", " "))
    assert (str(finding.outcome), finding.says) == ("warning", f"stale: {word} differ from prefect.yaml")


def test_what_prefect_fills_in_is_not_compared(tmp_path: Path) -> None:
    text = FILE.replace("description: Llama.", 'description: "{{ $WHO }}"')
    assert str(compare(tmp_path, THERE, text=text)[0].outcome) == "ok"


def test_a_schedule_that_is_there_twice_is_a_failure(tmp_path: Path) -> None:
    twice = [*THERE["schedules"], {**THERE["schedules"][0], "slug": "again"}]
    [finding] = compare(tmp_path, changed(schedules=twice))
    assert str(finding.outcome) == "failed"
    assert "'cron 0 7 * * * UTC' is there twice" in finding.says
    asleep = [*THERE["schedules"], {**THERE["schedules"][0], "slug": "again", "active": False}]
    [finding] = compare(tmp_path, changed(schedules=asleep))
    assert (str(finding.outcome), finding.says) == ("warning", "schedule 'again' is not in prefect.yaml")
    assert "does not remove" in finding.mend


def test_a_paused_one_is_said(tmp_path: Path) -> None:
    [finding] = compare(tmp_path, changed(paused=True))
    assert (str(finding.outcome), finding.says) == ("warning", "paused")


def test_a_name_that_is_declared_twice_is_one_failure(tmp_path: Path) -> None:
    one = FILE.partition("deployments:")[2]
    [finding] = compare(tmp_path, THERE, text=FILE + one)
    assert (str(finding.outcome), finding.says) == ("failed", "declared 2 times; the last one wins")


def test_one_name_under_two_flows_is_two_deployments(tmp_path: Path) -> None:
    other = FILE.partition("deployments:")[2].replace("scale_up", "stage")
    staged = changed(flow="stage", entrypoint="flows.stage.stage")
    found = compare(tmp_path, THERE, staged, text=FILE + other)
    assert [(finding.about, str(finding.outcome)) for finding in found] == [
        ("deployment scale-up/llama", "ok"),
        ("deployment stage/llama", "ok"),
    ]


@pytest.mark.parametrize("text", ["[", "just words", "deployments: [{name: x}]", "deployments: 3"])
def test_what_is_no_prefect_yaml_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "prefect.yaml").write_text(text)
    with pytest.raises(SpecError, match=r"is no prefect\.yaml"):
        read_declared(tmp_path / "prefect.yaml")
    with pytest.raises(SpecError, match="cannot be read"):
        read_declared(tmp_path / "none.yaml")
