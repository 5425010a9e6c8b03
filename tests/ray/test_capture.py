"""On which node of a real cluster a cache would be captured; with the engine it is shown in `tests/engine`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.real.world import World
from tests.real_fixtures import REPLICAS
from tests.samples import make_folder

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

YAML = Path(__file__).parents[2] / "deployments" / "serve" / "tiny-llama-cpu.yaml"


def test_a_node_that_has_the_model_ready_and_the_most_processors_is_the_one(
    surroundings: World, tmp_path: Path
):
    surroundings.wipe()
    head, replicas = surroundings.head, surroundings.cluster.hosts[REPLICAS]
    capture = ("capture", YAML, "--to", "s3://none/such", "--dry-run")
    code, _, talk = surroundings.cli(head, *capture, check=False)
    assert (code, "no node has tiny-llama ready: no node store here" in talk) == (1, True), talk
    model = make_folder(tmp_path / "model")
    spec = {"deployment": "tiny-llama", "artifacts": [{"name": "weights", "uri": f"file://{model}"}]}
    surroundings.cli(head, "stage", "--cluster", "-", stdin=json.dumps(spec))
    report = surroundings.ask(head, *capture)
    assert (report["node"], report["captured"]) == (replicas.ip, None)
    report = surroundings.ask(head, *capture, "--node", head.name)
    assert report["node"] == head.ip
