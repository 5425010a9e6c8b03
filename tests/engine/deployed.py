"""An example of `deployments/serve` on the cluster of the session, with a real engine: a minute or more on two cores."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.real.hosts import Host
from tests.real.serve_app import ServeApp, chat, serve_llm
from tests.real.world import World

SERVE = Path(__file__).parents[2] / "deployments" / "serve"


@contextmanager
def deployed(
    world: World, yaml: Path, callback_kwargs: Mapping[str, Any] | None = None, **env: str
) -> Iterator[ServeApp]:
    """Deploy `yaml`; `env` is added to the replica's environment."""
    temp_dirs = [host.folder / "ray" for host in world.cluster.hosts]
    with serve_llm(
        yaml,
        dashboard=world.cluster.dashboard_url,
        host=world.head.ip,
        temp_dirs=temp_dirs,
        callback_kwargs=callback_kwargs,
        env=env,
        deadline=600,
    ) as app:
        yield app


def message(app: ServeApp, model: str = "tiny-llama", **fields: Any) -> dict[str, Any]:
    """What the model says; the checkpoints of the tests say the same to everything."""
    found: dict[str, Any] = chat(app.base_url, model, "Who are you?", **fields)["choices"][0]["message"]
    return found


def streamed(app: ServeApp, model: str = "tiny-llama") -> tuple[str, str]:
    """What the model says when it is asked for parts: its thoughts, and its answer."""
    body = {"model": model, "messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0}
    body |= {"max_tokens": 64, "stream": True}
    thoughts, words = "", ""
    with (
        httpx.Client(timeout=60.0, trust_env=False) as client,
        client.stream("POST", f"{app.base_url}/v1/chat/completions", json=body) as answer,
    ):
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            for choice in json.loads(data).get("choices", []) if data.startswith("{") else []:
                thoughts += choice["delta"].get("reasoning") or ""
                words += choice["delta"].get("content") or ""
    return thoughts.strip(), words.strip()


def bucket(world: World, name: str) -> str:
    """The bucket of this name, made if another test has not."""
    if name not in {found["Name"] for found in world.s3.client.list_buckets()["Buckets"]}:
        world.s3.create_bucket(name)
    return name


def started(world: World) -> tuple[Host, dict[str, Any]]:
    """The one host that a replica has started on, and its row in the ledger."""
    found = [(host, row) for host in world.cluster.hosts for row in rows(world, host, "start")]
    assert len(found) == 1, found
    return found[0]


def rows(world: World, host: Host, kind: str) -> list[dict[str, Any]]:
    """The rows of one kind in a host's ledger."""
    return [row for row in world.ledger(host) if row["kind"] == kind]
