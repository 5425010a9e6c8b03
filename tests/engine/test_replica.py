"""A real Ray Serve LLM replica on a real vLLM engine: from the staged files, and from Ray's download when they fail.

Each start costs a minute or more on two cores, so each of the two tests shows all that its start can show.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from llm_prefetch.serve.lifecycle import HOOKS
from tests.engine.deployed import SERVE, bucket, deployed, message, rows, started, streamed
from tests.real.checkpoint import write_checkpoint
from tests.real.processes import wait_until
from tests.real.world import World

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

REPOSITORY = SERVE.parents[1]
SAYS, AT_ORIGIN = "Two and that make Answer: Four, surely!", "Ray fetched me from the bucket."
WITNESS = (
    "\nimport os, multiprocessing\n"
    "with open(os.environ['WITNESS'], 'a') as witness:\n"
    "    print(multiprocessing.current_process().name, __name__.rpartition('.')[2], file=witness)\n"
)
"""What a plugin does when it is imported: it says where."""


def hooked(folder: Path) -> Path:
    """The example with a parser, in a chain with a callback that writes down all eight hooks."""
    config = yaml.safe_load((SERVE / "reasoning-parser.yaml").read_text())
    (llm,) = config["applications"][0]["args"]["llm_configs"]
    recorder = {
        "callback_class": "tests.engine.recorder.Recorder",
        "callback_kwargs": {"path": str(folder / "seen.jsonl"), "max_model_len": 200},
    }
    llm["server_cls"] = "llm_prefetch.serve.server.LLMServer"
    llm["callback_config"] = {
        "callback_class": "llm_prefetch.serve.LifecycleCallback",
        "callback_kwargs": {"callbacks": [recorder, llm["callback_config"]]},
    }
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
def staged(surroundings: World, tmp_path: Path) -> World:
    """`live/tiny-llama` on every host holds one model and a parser, the prefix that Ray would download another model."""
    surroundings.wipe()
    head, plugins = surroundings.head, tmp_path / "plugins"
    plugins.mkdir()
    for file in (SERVE / "plugins").glob("*.py"):
        (plugins / file.name).write_text(file.read_text() + WITNESS)
    for name, says in (("staged", SAYS), ("models", AT_ORIGIN)):
        model = write_checkpoint(tmp_path / name, says=says)
        surroundings.cli(head, "publish", model, f"s3://{bucket(surroundings, name)}/tiny-llama")
    published = surroundings.ask(head, "publish", plugins, "s3://staged/plugins")
    artifacts = [
        {"name": "weights", "uri": "s3://staged/tiny-llama"},
        {
            "name": "my-plugins",
            "kind": "plugin",
            "uri": "s3://staged/plugins",
            "version": published["version"],
        },
    ]
    spec = {"deployment": "tiny-llama", "artifacts": artifacts}
    surroundings.cli(head, "stage", "--cluster", "-", stdin=json.dumps(spec))
    surroundings.s3.forget()
    return surroundings


def test_a_replica_on_a_staged_node_starts_from_the_engine_path_with_its_parser_and_all_hooks(
    staged: World, tmp_path: Path
) -> None:
    witness = {"PYTHONPATH": str(REPOSITORY), "WITNESS": str(tmp_path / "witness")}
    with deployed(staged, hooked(tmp_path), **witness) as app:
        # The parser splits the answers, whole or in parts.
        found = message(app)
        assert (found["reasoning"], found["content"]) == ("Two and that make", "Four, surely!")
        assert streamed(app) == ("Two and that make", "Four, surely!")
        # EngineCore has it too: there it decides where a grammar begins.
        held = message(app, structured_outputs={"choice": ["yes", "no"]})
        assert held["reasoning"] == "Two and that make"
        assert held["content"] in ("yes", "no")

        host, start = started(staged)
        (engine,) = rows(staged, host, "engine")
        assert (start["verdict"], start["rung"]) == ("HIT", "hit")
        assert (engine["outcome"], engine["start"]) == ("ready", start["start"])
        phases = {phase["phase"] for phase in engine["phases"]}
        assert {"imports", "verify", "engine config", "weights", "ready"} <= phases
        log = app.replica_log()
        assert f"{host.root}/live/tiny-llama/weights" in log
        assert "registered reasoning answer_after" in log
        assert staged.s3.bytes_read() == 0

        # The engine is up, so the generation is free: a switch need not wait for the replica's end.
        bundle = staged.ask(host, "ls")["deployments"][0]["bundle"]
        respec = "{deployment: tiny-llama, artifacts: [{name: weights, uri: 's3://models/tiny-llama'}]}"
        staged.cli(host, "stage", "-", stdin=respec)
        back = staged.ask(host, "rollback", "tiny-llama")
        assert back["to"] == bundle
        # Importing a plugin has left nothing in its folder.
        assert staged.ask(host, "verify", "tiny-llama")["ready"]
    assert_hooks(tmp_path / "seen.jsonl", log)
    seen = {tuple(line.split()) for line in (tmp_path / "witness").read_text().splitlines()}
    processes = {process for process, module in seen if module == "answer_after"}
    assert processes >= {"MainProcess", "EngineCore"}


def assert_hooks(path: Path, log: str) -> None:
    """What the callback with all eight hooks has seen, and what it changed."""
    seen = {row["hook"]: row for row in map(json.loads, path.read_text().splitlines())}
    assert list(seen) == list(HOOKS)
    assert [row["count"] for row in seen.values()] == list(range(1, 9))
    # Ray makes the group with its callback; here the hooks come before.
    assert [seen[hook]["placement_group"] for hook in HOOKS[:3]] == [False, False, True]
    # The other callback of the chain found the staged files, so nothing was downloaded.
    assert seen["on_post_download"]["run_init_node"] is False
    assert seen["on_post_download"]["download_result"].endswith("/live/tiny-llama/weights")
    assert "max_seq_len=200" in log  # EngineCore says what it was given; the YAML says 256


def test_a_replica_never_starts_from_files_that_changed_and_commits_what_ray_downloaded_instead(
    staged: World,
) -> None:
    for host in staged.cluster.hosts:
        for shard in host.disk.glob("artifacts/weights/b3-*/model-00001-*.safetensors"):
            with shard.open("r+b") as file:
                file.seek(-1, 2)
                byte = file.read(1)
                file.seek(-1, 2)
                file.write(bytes([byte[0] ^ 1]))
    spec = {"deployment": "tiny-llama", "artifacts": [{"name": "weights", "uri": "s3://models/tiny-llama"}]}
    with deployed(staged, SERVE / "tiny-llama-cpu.yaml", {"spec": spec}) as app:
        assert message(app)["content"] == AT_ORIGIN
        host, start = started(staged)
        assert (start["verdict"], start["rung"]) == ("CORRUPT", "ray")
        assert "was changed since it was committed" in start["reason"]
        assert "is CORRUPT on this node" in app.replica_log()
        # The next replica on this node is a hit, and nobody has read the model from the bucket again for that.
        wait_until(lambda: bool(rows(staged, host, "adopt")), 60, "what Ray downloaded is committed")
        assert staged.ask(host, "verify", "tiny-llama", "--full")["ready"]
        (staging,) = [row for row in rows(staged, host, "stage") if row["at"] > start["at"]]
        assert [one["fetched"] for one in staging["artifacts"]] == [0]
        asked = [
            request.key for request in staged.s3.requests("read") if request.key.endswith(".safetensors")
        ]
        assert asked
        assert len(asked) == len(set(asked))
