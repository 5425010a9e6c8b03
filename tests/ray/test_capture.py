"""On which node of a real cluster a cache would be captured; with the engine it is shown in `tests/engine`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.real.processes import wait_until
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


WHOSE_TURN_IT_IS = """
import time
from llm_prefetch.capturing.turn import turn
from llm_prefetch.cluster import connected
with connected(), turn("tiny-llama", "an-application", print):
    print("it is mine", flush=True)
    time.sleep(600)
"""


def test_there_is_one_at_a_time_and_one_that_was_killed_is_over(surroundings: World):
    surroundings.wipe()
    head = surroundings.head
    other = head.popen([sys.executable, "-c", WHOSE_TURN_IT_IS], name="capture")
    commands = [("capture", YAML, "--to", "s3://none/such"), ("prove", YAML)]
    try:
        wait_until(lambda: "it is mine" in other.tail(), 60, "a capture is under way", watch=other)
        for command in commands:
            code, _, talk = surroundings.cli(head, *command, check=False)
            assert (code, "another capture or proof of tiny-llama is under way" in talk) == (1, True), talk
    finally:
        other.stop(grace=0)

    def is_over() -> bool:
        _, _, talk = surroundings.cli(head, *commands[0], check=False)
        return "no node has tiny-llama ready: no node store here" in talk

    wait_until(is_over, 60, "the killed one is over")
    _, _, talk = surroundings.cli(head, *commands[1], check=False)  # what failed has let go of its turn
    assert "no node has tiny-llama ready: no node store here" in talk
