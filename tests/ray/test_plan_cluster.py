"""`plan --cluster` and `timeline --cluster` on three real hosts: what each node says, and what it costs to ask."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.ray.conftest import Staging

pytestmark = pytest.mark.ray


def test_a_plan_says_what_each_node_would_do_and_writes_nothing(staging: Staging) -> None:
    size = staging.put("weights") + staging.put("adapter", files=1)
    spec = staging.spec("weights", "adapter")
    addresses = [host.ip for host in staging.hosts]

    code, first, err = staging.cli("plan", spec)
    assert code == 0, err
    assert [row["node"] for row in first["nodes"]] == addresses
    for row in first["nodes"]:
        assert (row["fetch_bytes"], row["reuse_bytes"], row["evict_bytes"], row["fits"]) == (size, 0, 0, True)
        assert (row["eta_seconds"], row["error"]) == (None, "")
        assert f"s3://{staging.bucket}/weights" in row["source"]
    assert not any(list(host.disk.iterdir()) for host in staging.hosts)
    assert staging.bytes_read() == 0
    manifests = [r.key for r in staging.world.s3.requests("read") if r.key.endswith("manifest.json")]
    assert sorted(manifests) == ["adapter/.llm-prefetch/manifest.json", "weights/.llm-prefetch/manifest.json"]

    # One node has it, another cannot even plan: neither hides the third, nor changes what the plan is called.
    staging.world.cli(staging.hosts[1], "stage", "-", stdin=json.dumps(spec))
    (staging.hosts[0].disk / "LAYOUT").write_text("99")
    code, second, err = staging.cli("plan", spec)
    assert code == 4
    rows = {row["node"]: row for row in second["nodes"]}
    assert "layout '99'" in rows[addresses[0]]["error"]
    assert rows[addresses[0]]["fetch_bytes"] is None
    assert f"{addresses[0]}: this node store has layout '99'" in err
    assert (rows[addresses[1]]["fetch_bytes"], rows[addresses[1]]["reuse_bytes"]) == (0, size)
    assert rows[addresses[1]]["eta_seconds"] == 0
    assert rows[addresses[2]]["fetch_bytes"] == size
    assert second["plan"] == first["plan"]
    code, other, _ = staging.cli("plan", {**spec, "policy": {"min_ready": "1"}, "nodes": {"ids": ["host1"]}})
    assert code == 0
    assert other["plan"] != first["plan"]
    code, table, _ = staging.world.cli(
        staging.world.head, "plan", "--cluster", "-", stdin=json.dumps(spec), check=False
    )
    assert [line.split()[0] for line in table.splitlines()] == ["node", *addresses]


def test_the_ledgers_of_all_nodes_are_one_timeline(staging: Staging) -> None:
    size = staging.put("weights", files=1)
    staging.cli("stage", staging.spec("weights", nodes={"ids": ["host0", "host1"]}))
    one, two, broken = staging.hosts
    for number, host in enumerate((one, two)):
        started(host, "same-id", seconds=10.0 + number)
    (broken.disk / "LAYOUT").write_text("99")

    code, found, err = timeline(staging)
    assert code == 4
    assert f"{broken.ip}: this node store has layout '99'" in err
    assert sorted((start["node"], start["id"], start["seconds"]) for start in found["starts"]) == [
        (one.ip, "same-id", 10.0), (two.ip, "same-id", 11.0),
    ]  # fmt: skip
    assert [(failed["node"]["address"], failed["error"]["code"]) for failed in found["failed"]] == [
        (broken.ip, "layout")
    ]
    (broken.disk / "LAYOUT").unlink()
    code, found, _ = timeline(staging, "--stagings", staging.bucket)
    assert code == 0
    assert sorted((each["node"], each["bytes"]) for each in found["stagings"]) == [
        (one.ip, size), (two.ip, size),
    ]  # fmt: skip
    assert all(phase["seconds"] >= 0 for each in found["stagings"] for phase in each["phases"])
    page = staging.folder / "starts.html"
    assert timeline(staging, "--html", str(page))[0] == 0
    text = page.read_text()
    assert f"llama on {one.ip}" in text
    assert f"llama on {two.ip}" in text


def started(host: Any, name: str, *, seconds: float) -> None:
    """A start as a replica on `host` writes it down."""
    phases = [{"phase": "weights", "at": 0.0, "seconds": seconds, "within": 0.0, "source": "clock"}]
    rows = [
        {"kind": "start", "at": time.time(), "start": name, "deployment": "llama", "replica": "r", "verdict": "HIT",
         "rung": "hit", "seconds": 0.002},
        {"kind": "engine", "at": time.time(), "start": name, "outcome": "ready", "phases": phases},
    ]  # fmt: skip
    (host.disk / "ledger").mkdir(exist_ok=True)
    with (host.disk / "ledger" / "ledger.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)


def timeline(staging: Staging, *argv: str) -> tuple[int, Any, str]:
    """`llm-prefetch timeline --cluster --json` on the head."""
    code, out, err = staging.world.cli(
        staging.world.head, "timeline", "--cluster", "--json", *argv, check=False
    )
    return code, json.loads(out), err
