"""The examples with a parser and with a model class of a staged artifact, deployed on Ray Serve LLM."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.real.checkpoint import write_checkpoint
from tests.real.serve_app import ServeApp, ServeError, chat, serve_llm
from tests.real.world import World

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SERVE = Path(__file__).parents[2] / "deployments" / "serve"
SAYS = "Two and that make Answer: Four, surely!"


@pytest.fixture
def plugged(surroundings: World, tmp_path: Path) -> World:
    """`tiny-llama` and `house-llama` are live on every host, each with the pinned plugins beside its weights."""
    surroundings.wipe()
    if "plugged" not in {bucket["Name"] for bucket in surroundings.s3.client.list_buckets()["Buckets"]}:
        surroundings.s3.create_bucket("plugged")
    head = surroundings.head
    pin = surroundings.ask(head, "publish", SERVE / "plugins", "s3://plugged/plugins")["version"]
    for name, architecture in (("tiny-llama", "LlamaForCausalLM"), ("house-llama", "HouseLlamaForCausalLM")):
        model = write_checkpoint(tmp_path / name, says=SAYS)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
        surroundings.cli(head, "publish", model, f"s3://plugged/{name}")
        artifacts = [
            {"name": "weights", "uri": f"s3://plugged/{name}"},
            {"name": "my-plugins", "kind": "plugin", "uri": "s3://plugged/plugins", "version": pin},
        ]
        spec = {"deployment": name, "artifacts": artifacts}
        surroundings.cli(head, "stage", "--cluster", "-", stdin=json.dumps(spec))
    return surroundings


@contextmanager
def deployed(world: World, yaml: str, callback_kwargs: Mapping[str, Any] | None = None) -> Iterator[ServeApp]:
    temp_dirs = [host.folder / "ray" for host in world.cluster.hosts]
    with serve_llm(
        SERVE / yaml,
        dashboard=world.cluster.dashboard_url,
        host=world.head.ip,
        temp_dirs=temp_dirs,
        callback_kwargs=callback_kwargs,
        deadline=600,
    ) as app:
        yield app


def test_a_parser_of_a_staged_artifact_splits_the_answers_of_a_replica(plugged):
    with deployed(plugged, "reasoning-parser.yaml") as app:
        message = chat(app.base_url, "tiny-llama", "Two and two?")["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("Two and that make", "Four, surely!")
        # EngineCore has it too: there it decides where a grammar begins.
        held = chat(app.base_url, "tiny-llama", "Two and two?", structured_outputs={"choice": ["yes", "no"]})
        message = held["choices"][0]["message"]
        assert message["reasoning"] == "Two and that make"
        assert message["content"] in ("yes", "no")
        assert "registered reasoning answer_after" in app.replica_log()
        assert all(check["ready"] for check in verdicts(plugged))


def test_a_model_class_of_a_staged_artifact_loads_and_answers(plugged):
    with deployed(plugged, "out-of-tree-model.yaml") as app:
        message = chat(app.base_url, "house-llama", "Two and two?")["choices"][0]["message"]
        assert message["content"] == SAYS
        assert "registered models HouseLlamaForCausalLM" in app.replica_log()


def test_a_parser_that_is_not_there_fails_the_deployment_before_the_engine_starts(plugged):
    wrong = {"parsers": {"reasoning": ["my-plugins/answer_after.py:AnswerBeforeParser"]}}
    with pytest.raises(ServeError) as caught, deployed(plugged, "reasoning-parser.yaml", wrong):
        pass
    assert "there is no class AnswerBeforeParser" in str(caught.value)
    assert "callback_config.callback_kwargs.parsers.reasoning[0]" in str(caught.value)
    assert "EngineCore" not in str(caught.value)


def verdicts(world: World) -> list[dict[str, Any]]:
    """The quick check of what is live on the hosts that run: importing a plugin leaves nothing in its folder."""
    found = [world.ask(host, "verify", check=False) for host in world.cluster.hosts if host.running]
    return [{"ready": "CORRUPT" not in json.dumps(answer)} for answer in found]
