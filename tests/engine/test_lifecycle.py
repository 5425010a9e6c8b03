"""All eight hooks in a real replica: our server class around Ray's, and what they change in the real engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from llm_prefetch.serve.lifecycle import HOOKS
from tests.real.checkpoint import write_checkpoint
from tests.real.serve_app import chat, serve_llm

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
YAML = ROOT / "deployments" / "serve" / "tiny-llama-cpu.yaml"


def test_a_replica_runs_all_hooks_around_a_start_from_staged_files(surroundings, tmp_path):
    surroundings.wipe()
    model = write_checkpoint(tmp_path / "model", says="I was hooked.")
    spec = f"{{deployment: tiny-llama, artifacts: [{{name: weights, uri: 'file://{model}'}}]}}"
    surroundings.cli(surroundings.head, "stage", "--cluster", "-", stdin=spec)

    seen = tmp_path / "seen.jsonl"
    config = yaml.safe_load(YAML.read_text())
    (llm,) = config["applications"][0]["args"]["llm_configs"]
    llm["server_cls"] = "llm_prefetch.serve.server.LLMServer"
    recorder = {
        "callback_class": "tests.engine.recorder.Recorder",
        "callback_kwargs": {"path": str(seen), "max_model_len": 200},
    }
    llm["callback_config"] = {
        "callback_class": "llm_prefetch.serve.lifecycle.LifecycleCallback",
        "callback_kwargs": {"callbacks": [recorder, {**llm["callback_config"]}]},
    }
    llm["runtime_env"]["env_vars"]["PYTHONPATH"] = str(ROOT)
    changed = tmp_path / "serve.yaml"
    changed.write_text(yaml.safe_dump(config))

    temp_dirs = [host.folder / "ray" for host in surroundings.cluster.hosts]
    with serve_llm(
        changed,
        dashboard=surroundings.cluster.dashboard_url,
        host=surroundings.head.ip,
        temp_dirs=temp_dirs,
        deadline=600,
    ) as app:
        answer = chat(app.base_url, "tiny-llama", "Were you hooked?")
        log = app.replica_log()
    assert answer["choices"][0]["message"]["content"] == "I was hooked."

    rows = {row["hook"]: row for row in map(json.loads, seen.read_text().splitlines())}
    assert list(rows) == list(HOOKS)
    assert [row["count"] for row in rows.values()] == list(range(1, 9))
    # Ray makes the group with its callback; here the hooks come before.
    assert [rows[hook]["placement_group"] for hook in HOOKS[:3]] == [False, False, True]
    # The other callback of the chain found the staged files, so nothing was downloaded.
    assert rows["on_post_download"]["run_init_node"] is False
    assert rows["on_post_download"]["download_result"].endswith("/live/tiny-llama/weights")
    assert "max_seq_len=200" in log  # EngineCore says what it was given; the YAML says 256
