"""A real replica on a node where nothing is staged: it stages there itself, starts, and holds its generation."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.real.checkpoint import write_checkpoint
from tests.real.hosts import Host
from tests.real.processes import wait_until
from tests.real.serve_app import chat, serve_llm
from tests.real.world import World

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

YAML = Path(__file__).parents[2] / "deployments" / "serve" / "tiny-llama-cpu.yaml"
SAYS = "My own replica has staged me."
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


def test_a_replica_on_an_unstaged_node_stages_there_and_holds_a_lease_until_it_dies(
    surroundings: World, tmp_path: Path
) -> None:
    surroundings.wipe()
    surroundings.s3.create_bucket("fallback")
    model = write_checkpoint(tmp_path / "model", says=SAYS)
    surroundings.cli(surroundings.head, "publish", model, "s3://fallback/tiny-llama")
    spec = {
        "deployment": "tiny-llama",
        "artifacts": [{"name": "weights", "uri": "s3://fallback/tiny-llama"}],
    }
    temp_dirs = [host.folder / "ray" for host in surroundings.cluster.hosts]
    with serve_llm(
        YAML,
        dashboard=surroundings.cluster.dashboard_url,
        host=surroundings.head.ip,
        temp_dirs=temp_dirs,
        callback_kwargs={"on_miss": ["wait", "stage", "fail"], "spec": spec},
        deadline=600,
    ) as app:
        said = chat(app.base_url, "tiny-llama", "Who has brought you?")["choices"][0]["message"]["content"]
        assert said == SAYS
        (host,) = [host for host in surroundings.cluster.hosts if surroundings.ledger(host)]
        rows = surroundings.ledger(host)
        (start,) = [row for row in rows if row["kind"] == "start"]
        assert (start["verdict"], start["rung"]) == ("MISSING", "stage")
        assert [step["rung"] for step in start["ladder"]] == ["wait", "stage"]
        assert "ServeReplica" in start["replica"] or "SERVE_REPLICA" in start["replica"]
        assert [row["outcome"] for row in rows if row["kind"] == "engine"] == ["ready"]
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
