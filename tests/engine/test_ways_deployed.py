"""The examples with LoRA adapters and with a download of the user's own, deployed on Ray Serve LLM."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engine.deployed import SERVE, bucket, deployed, message, rows, started
from tests.real.adapter import write_adapter
from tests.real.checkpoint import _CHAT_TEMPLATE, write_checkpoint
from tests.real.hosts import Host
from tests.real.processes import wait_until
from tests.real.serve_app import ServeApp, ServeError
from tests.real.world import World

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SAYS = "My adapters and files are here."
_LEASES = """
import json
from dataclasses import asdict
from llm_prefetch.leases import leased
from llm_prefetch.store import open_store
print(json.dumps([asdict(lease) for lease in leased(open_store())]))
"""


def leases(host: Host) -> list[dict[str, Any]]:
    """The leases that are held on a host."""
    return list(json.loads(host.run([sys.executable, "-c", _LEASES]).stdout))


def said(app: ServeApp, model: str) -> str:
    return str(message(app, model)["content"])


def test_the_first_request_for_a_staged_adapter_finds_it_on_the_node(
    surroundings: World, tmp_path: Path
) -> None:
    surroundings.wipe()
    s3 = surroundings.s3
    bucket(surroundings, "models")  # where Ray would look for adapters
    model = write_checkpoint(tmp_path / "model", says=SAYS)
    write_adapter(tmp_path / "adapters" / "my-lora")
    artifacts = [
        {"name": "weights", "uri": f"file://{model}"},
        {"name": "adapters", "kind": "adapter", "uri": f"file://{tmp_path / 'adapters'}"},
    ]
    spec = json.dumps({"deployment": "tiny-llama", "artifacts": artifacts})
    surroundings.cli(surroundings.head, "stage", "--cluster", "-", stdin=spec)
    with deployed(surroundings, SERVE / "lora-adapters.yaml") as app:
        s3.forget()
        assert said(app, "tiny-llama") == SAYS
        assert said(app, "tiny-llama:my-lora") != SAYS
        assert [request for request in s3.requests() if request.bucket == "models"] == []
        assert said(app, "tiny-llama") == SAYS
        (line,) = [line for line in app.replica_log().splitlines() if "adapter my-lora from" in line][:1]
        assert "/bundles/bundle-" in line
        # One that is not staged is looked for where Ray looks.
        with pytest.raises(ServeError):
            said(app, "tiny-llama:another")
        assert "adapters/another/adapter_config.json" in {request.key for request in s3.requests()}


def test_a_replica_on_an_unstaged_node_stages_what_ray_cannot_download_and_holds_a_lease_until_it_dies(
    surroundings: World, tmp_path: Path
) -> None:
    surroundings.wipe()
    model = write_checkpoint(tmp_path / "model", says=SAYS)
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "plain.jinja").write_text("{# mine #}" + _CHAT_TEMPLATE)
    (model / "tokenizer_config.json").write_text(_without_template(model))
    origin = f"s3://{bucket(surroundings, 'custom')}/tiny-llama"
    surroundings.cli(surroundings.head, "publish", model, origin)
    path, links = _moved(tmp_path, origin)
    with deployed(surroundings, path) as app:
        assert said(app, "tiny-llama") == SAYS
        host, start = started(surroundings)
        assert (start["verdict"], start["rung"]) == ("MISSING", "stage")
        assert [step["rung"] for step in start["ladder"]] == ["wait", "stage"]
        assert "ServeReplica" in start["replica"] or "SERVE_REPLICA" in start["replica"]
        assert [row["outcome"] for row in rows(surroundings, host, "engine")] == ["ready"]
        log = app.replica_log()
        assert "trying `stage`" in log
        assert f"engine path {host.root}/live/tiny-llama/weights" in log
        (lease,) = leases(host)
        assert lease["bundle"] == start["bundle"] == surroundings.ask(host, "ls")["deployments"][0]["bundle"]
        assert lease["replica"] == start["replica"]
        host.run(["kill", "-9", str(lease["pid"])])
        wait_until(
            lambda: lease["pid"] not in [left["pid"] for left in leases(host)], 60, "the lease of the dead"
        )
    for name, link in links.items():
        assert str(link.readlink()) == f"{host.root}/live/tiny-llama/{name}"


def _without_template(model: Path) -> str:
    """So that the one that is linked is the only one."""
    config: dict[str, Any] = json.loads((model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    return json.dumps(config)


def _moved(folder: Path, origin: str) -> tuple[Path, dict[str, Path]]:
    """The example with the model at `origin`, and its template and links below `folder`."""
    text = (SERVE / "custom-download.yaml").read_text()
    for there, here in {
        "https://models.example.com/tiny-llama": origin,
        "file:///mnt/share/templates": f"file://{folder / 'templates'}",
        "/var/lib/models/": f"{folder / 'links'}/",
    }.items():
        assert there in text
        text = text.replace(there, here)
    path = folder / "serve.yaml"
    path.write_text(text)
    (llm,) = yaml.safe_load(text)["applications"][0]["args"]["llm_configs"]
    artifacts = llm["callback_config"]["callback_kwargs"]["spec"]["artifacts"]
    return path, {artifact["name"]: Path(artifact["link"]) for artifact in artifacts}
