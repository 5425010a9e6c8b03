"""The examples with LoRA adapters and with a download of the user's own, deployed on Ray Serve LLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.real.adapter import write_adapter
from tests.real.checkpoint import _CHAT_TEMPLATE, write_checkpoint
from tests.real.serve_app import ServeApp, ServeError, chat, serve_llm
from tests.real.world import World

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SERVE = Path(__file__).parents[2] / "deployments" / "serve"
SAYS = "My adapters and files are here."


@contextmanager
def deployed(world: World, path: Path) -> Iterator[ServeApp]:
    temp_dirs = [host.folder / "ray" for host in world.cluster.hosts]
    with serve_llm(
        path, dashboard=world.cluster.dashboard_url, host=world.head.ip, temp_dirs=temp_dirs, deadline=600
    ) as app:
        yield app


def said(app: ServeApp, model: str) -> str:
    return str(chat(app.base_url, model, "Where are they?")["choices"][0]["message"]["content"])


def test_the_first_request_for_a_staged_adapter_finds_it_on_the_node(
    surroundings: World, tmp_path: Path
) -> None:
    surroundings.wipe()
    s3 = surroundings.s3
    if "models" not in {bucket["Name"] for bucket in s3.client.list_buckets()["Buckets"]}:
        s3.create_bucket("models")  # where Ray would look for adapters
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


def test_what_ray_cannot_download_is_staged_by_the_replica_and_linked_where_the_engine_looks(
    surroundings: World, tmp_path: Path
) -> None:
    surroundings.wipe()
    model = write_checkpoint(tmp_path / "model", says=SAYS)
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "plain.jinja").write_text("{# mine #}" + _CHAT_TEMPLATE)
    (model / "tokenizer_config.json").write_text(_without_template(model))
    path, links = _moved(tmp_path)
    with deployed(surroundings, path) as app:
        assert said(app, "tiny-llama") == SAYS
        (host,) = [host for host in surroundings.cluster.hosts if surroundings.ledger(host)]
        (start,) = [row for row in surroundings.ledger(host) if row["kind"] == "start"]
        assert (start["verdict"], start["rung"]) == ("MISSING", "stage")
        assert f"engine path {host.root}/live/tiny-llama/weights" in app.replica_log()
    for name, link in links.items():
        assert str(link.readlink()) == f"{host.root}/live/tiny-llama/{name}"


def _without_template(model: Path) -> str:
    """So that the one that is linked is the only one."""
    config: dict[str, Any] = json.loads((model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    return json.dumps(config)


def _moved(folder: Path) -> tuple[Path, dict[str, Path]]:
    """The example with its origins and links below `folder`."""
    text = (SERVE / "custom-download.yaml").read_text()
    for origin, here in {
        "https://models.example.com/tiny-llama": f"file://{folder / 'model'}",
        "file:///mnt/share/templates": f"file://{folder / 'templates'}",
        "/var/lib/models/": f"{folder / 'links'}/",
    }.items():
        assert origin in text
        text = text.replace(origin, here)
    path = folder / "serve.yaml"
    path.write_text(text)
    (llm,) = yaml.safe_load(text)["applications"][0]["args"]["llm_configs"]
    artifacts = llm["callback_config"]["callback_kwargs"]["spec"]["artifacts"]
    return path, {artifact["name"]: Path(artifact["link"]) for artifact in artifacts}
