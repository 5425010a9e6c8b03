"""What a person sees in Prefect's UI: the form with its fields described, and a run that was started from it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.flows.conftest import Flows, call
from tests.real.browser import Page, browser

pytestmark = [pytest.mark.browser, pytest.mark.prefect, pytest.mark.ray, pytest.mark.timeout(600)]

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def test_a_run_started_in_the_ui_completes_and_its_artifacts_render(flows: Flows) -> None:
    size = flows.publish("models", "tiny-llama", files=3)
    deployment = call(flows.api, "/deployments/name/stage/tiny-llama")
    site = flows.api.removesuffix("/api")
    hosts = [host for host in flows.world.cluster.hosts if host.running]
    count, addresses = len(hosts), [host.ip for host in hosts]
    with browser() as page:
        page.open(f"{site}/deployments/deployment/{deployment['id']}")
        page.click("Description")
        page.shows(deployment["description"])
        page.click("Run", "button")
        page.click("Custom run")

        page.shows("Validate parameters", *descriptions(deployment))
        assert {"tiny-llama", "weights", "s3://models/tiny-llama"} <= set(page.values)
        picture(page, "prefect-form.png")
        page.click("Submit", "button")

        page.shows("scheduled to start now")
        runs = call(flows.api, "/flow_runs/filter", {"deployments": {"id": {"any_": [deployment["id"]]}}})
        run = max(runs, key=lambda run: run["created"])["id"]
        page.open(f"{site}/runs/flow-run/{run}")
        page.shows("Completed", within=180)
        page.open(f"{site}/runs/flow-run/{run}")  # it counts only once
        page.shows("Completed", f"{count} Task runs")
        page.click("Artifacts")
        page.shows("PROGRESS", "TABLE", "MARKDOWN", f"{count} of {count} nodes ready")
        picture(page, "prefect-run.png")

        asked = {"artifacts": {"flow_run_id": {"any_": [run]}}}
        artifacts = {each["type"]: each["id"] for each in call(flows.api, "/artifacts/filter", asked)}
        page.open(f"{site}/artifacts/artifact/{artifacts['progress']}")
        page.shows("Progress: 100%")
        page.open(f"{site}/artifacts/artifact/{artifacts['table']}")
        page.shows(f"{count} Items", *addresses, "HIT", str(size))
        page.open(f"{site}/artifacts/artifact/{artifacts['markdown']}")
        page.shows("s3://models/tiny-llama", *addresses)
        assert (
            page.run("document.querySelectorAll('.p-markdown-renderer table, article table, table').length")
            >= 2
        )
    for host in hosts:
        assert flows.world.ask(host, "verify", "tiny-llama", "--full")["ready"]


def descriptions(deployment: dict[str, Any]) -> list[str]:
    """Of every field that the form of `stage` shows before anything is added to it."""
    schema = deployment["parameter_openapi_schema"]
    shown = [
        schema,
        *(schema["definitions"][name] for name in ("Spec", "Artifact", "NodeSelector", "Policy")),
    ]
    fields = [field for model in shown for field in model["properties"].values()]
    assert len(fields) > 15
    return [field["description"].replace("`", "").strip() for field in fields]


def picture(page: Page, name: str) -> None:
    """Renew a picture of the documentation, if that is asked for: DOCS_PICTURES=1."""
    assert (IMAGES / name).exists() or os.environ.get("DOCS_PICTURES")
    if os.environ.get("DOCS_PICTURES"):
        page.screenshot(IMAGES / name)
