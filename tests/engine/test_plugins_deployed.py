"""The examples with a parser and with a model class of a staged artifact, deployed on Ray Serve LLM.

What the one with a parser does when all is right is in `test_replica.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.deployed import SERVE, bucket, deployed, message
from tests.engine.test_replica import SAYS, WITNESS
from tests.real.checkpoint import write_checkpoint
from tests.real.serve_app import ServeError
from tests.real.world import World

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture
def plugged(surroundings: World, tmp_path: Path) -> World:
    """`tiny-llama` and `house-llama` are live on every host, each with the pinned plugins beside its weights."""
    surroundings.wipe()
    head, plugins = surroundings.head, tmp_path / "plugins"
    plugins.mkdir()
    for file in (SERVE / "plugins").glob("*.py"):
        (plugins / file.name).write_text(file.read_text() + WITNESS)
    origin = f"s3://{bucket(surroundings, 'plugged')}"
    pin = surroundings.ask(head, "publish", plugins, f"{origin}/plugins")["version"]
    for name, architecture in (("tiny-llama", "LlamaForCausalLM"), ("house-llama", "HouseLlamaForCausalLM")):
        model = write_checkpoint(tmp_path / name, says=SAYS)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
        surroundings.cli(head, "publish", model, f"{origin}/{name}")
        artifacts = [
            {"name": "weights", "uri": f"{origin}/{name}"},
            {"name": "my-plugins", "kind": "plugin", "uri": f"{origin}/plugins", "version": pin},
        ]
        spec = {"deployment": name, "artifacts": artifacts}
        surroundings.cli(head, "stage", "--cluster", "-", stdin=json.dumps(spec))
    return surroundings


def test_a_model_class_of_a_staged_artifact_loads_and_answers(plugged: World, tmp_path: Path) -> None:
    with deployed(plugged, SERVE / "out-of-tree-model.yaml", WITNESS=str(tmp_path / "witness")) as app:
        assert message(app, "house-llama")["content"] == SAYS
        assert "registered models HouseLlamaForCausalLM" in app.replica_log()
    seen = [line.split() for line in (tmp_path / "witness").read_text().splitlines()]
    assert any(module == "house_llama" and process.startswith("VllmWorker") for process, module in seen)


def test_a_parser_that_is_not_there_fails_the_deployment_before_the_engine_starts(
    plugged: World, tmp_path: Path
) -> None:
    wrong = {"parsers": {"reasoning": ["my-plugins/answer_after.py:AnswerBeforeParser"]}}
    yaml = SERVE / "reasoning-parser.yaml"
    with (
        pytest.raises(ServeError) as caught,
        deployed(plugged, yaml, wrong, WITNESS=str(tmp_path / "witness")),
    ):
        pass
    assert "there is no class AnswerBeforeParser" in str(caught.value)
    assert "callback_config.callback_kwargs.parsers.reasoning[0]" in str(caught.value)
    assert "EngineCore" not in str(caught.value)
