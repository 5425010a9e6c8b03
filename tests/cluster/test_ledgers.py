"""The ledgers of many nodes in one: who started where, whatever their clocks say and whatever is in their files."""

from __future__ import annotations

import base64
import re
import time
import xml.etree.ElementTree as ET

import pytest

from llm_prefetch import ledger
from llm_prefetch.cluster import Answer, Node
from llm_prefetch.cluster.ledger_page import ledger_page
from llm_prefetch.cluster.ledgers import gather, told_by
from llm_prefetch.errors import ClusterError
from llm_prefetch.store import open_store
from llm_prefetch.waterfall import draw

NODES = [Node(f"id{n}", f"10.0.0.{n}", f"host{n}") for n in range(3)]
NOW = 1_700_000_000.0
PHASES = [
    {"phase": "imports", "at": 0.0, "seconds": 10.0, "within": 0.001, "source": "ray log"},
    {"phase": "weights", "at": 10.0, "seconds": 20.0, "within": 1.0, "source": "vllm log"},
    {"phase": "weights", "at": 15.0, "seconds": -0.5, "within": 1.0, "source": "vllm log"},
]


class Cluster:
    """Three nodes, each with a store."""

    def __init__(self, folder):
        self.stores = [open_store(folder / node.id, create=True) for node in NODES]

    def start(self, number, name="a", *, at=None, seconds=30.0, deployment="llama", **more):
        facts = {"verdict": "HIT", "rung": "hit", "seconds": 0.002, "ladder": [], "replica": "r", **more}
        ledger.append(
            self.stores[number], "start", start=name, deployment=deployment, bundle="b",
            **facts, **({} if at is None else {"at": at}),
        )  # fmt: skip
        phases = [*PHASES[:1], {**PHASES[1], "seconds": seconds - 10.0}, *PHASES[2:]]
        ledger.append(self.stores[number], "engine", start=name, outcome="ready", seconds=30.0, phases=phases)

    def staging(self, number, fetched, reused, deployment="llama"):
        artifact = {"name": "w", "fetched": fetched, "reused": reused}
        ledger.append(
            self.stores[number], "stage", deployment=deployment, outcome="ready", seconds=2.0,
            artifacts=[artifact], steps=[{"step": "transfer", "artifact": "w", "at": 0.0, "seconds": 1.5}],
        )  # fmt: skip

    def collect(self, deployment="", hours=24.0, *, broken=()):
        answers = [
            Answer(node, error=ClusterError("it died", where=node.address, hint="start it"))
            if node in broken
            else Answer(node, told_by(store.root, deployment, hours))
            for node, store in zip(NODES, self.stores, strict=True)
        ]
        return gather(answers, dict.fromkeys([node.id for node in NODES], NOW))


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def test_starts_of_two_nodes_are_told_apart_even_if_they_look_alike(cluster):
    cluster.start(0, "same")
    cluster.start(1, "same")
    found = cluster.collect()
    assert sorted((start.node, start.id) for start in found.starts) == [
        ("10.0.0.0", "same"),
        ("10.0.0.1", "same"),
    ]
    page = draw(found.starts)
    assert "llama on 10.0.0.0" in page
    assert "llama on 10.0.0.1" in page


def test_a_row_says_who_started_where_how_and_how_long_each_phase_took(cluster):
    cluster.start(2, "x1", verdict="MISSING", rung="stage", replica="app#llama#7")
    [row] = cluster.collect().rows()
    assert {**row, "at": ""} == {
        "at": "", "node": "10.0.0.2", "what": "start", "deployment": "llama", "replica": "app#llama#7", "id": "x1",
        "verdict": "MISSING", "rung": "stage", "fetched_bytes": None, "reused_bytes": None, "seconds": 30.0,
        "outcome": "ready", "phases": "imports 10 s, weights 20 s",
    }  # fmt: skip


def test_clocks_that_differ_by_hours_change_neither_the_order_nor_any_duration(cluster, monkeypatch):
    real = time.time
    for number, skew in enumerate((0.0, 5 * 3600.0, -7 * 3600.0)):
        monkeypatch.setattr(time, "time", lambda skew=skew: real() + skew)
        cluster.start(number, f"n{number}", at=time.time() - 30 + 10 * number)
    tolds = []
    for number, skew in enumerate((0.0, 5 * 3600.0, -7 * 3600.0)):
        monkeypatch.setattr(time, "time", lambda skew=skew: real() + skew)
        tolds.append(Answer(NODES[number], told_by(cluster.stores[number].root, "", 1.0)))
    monkeypatch.undo()
    found = gather(tolds, dict.fromkeys([node.id for node in NODES], NOW))
    assert [start.id for start in found.starts] == ["n2", "n1", "n0"]  # the newest first
    assert all(NOW - 60 < start.at <= NOW for start in found.starts)
    assert all(phase.seconds >= 0 for start in found.starts for phase in start.phases)


def test_a_start_from_after_a_clock_was_set_back_is_of_now(cluster):
    cluster.start(0, at=time.time() + 9999)
    [start] = cluster.collect().starts
    assert start.at == NOW


def test_a_node_that_cannot_answer_is_a_row_and_the_others_are_there(cluster):
    cluster.start(0)
    cluster.start(2)
    found = cluster.collect(broken=[NODES[1], NODES[0]])
    rows = found.rows()
    assert [(row["what"], row["node"]) for row in rows] == [
        ("error", "10.0.0.0"), ("error", "10.0.0.1"), ("start", "10.0.0.2"),
    ]  # fmt: skip
    assert rows[0]["outcome"] == "it died (10.0.0.0): start it"
    assert len({tuple(row) for row in rows}) == 1
    assert "`10.0.0.1`: it died" in ledger_page(found, "", 24)


def test_lines_that_are_no_rows_and_rows_that_are_odd_hide_nothing(cluster):
    cluster.start(0, "good")
    odd = [
        b"\xff\xfe not json", b'{"kind": "start"', b"[1, 2]", b'{"kind": ["start"], "start": "x"}', b"[" * 100_000,
        b'{"kind": "start", "start": "y", "at": "yesterday", "ladder": {"a": 1}}',
        b'{"kind": "stage", "at": NaN, "steps": 5, "artifacts": null}',
        b'{"kind": "stage", "at": 1e400, "steps": [3], "artifacts": [{"fetched": "many"}]}',
        b'{"kind": "engine", "start": "good", "phases": 7, "outcome": null, "seconds": "long"}',
    ]  # fmt: skip
    body = cluster.stores[0].ledger.read_bytes()
    cluster.stores[0].ledger.write_bytes(b"\n".join(odd[:4]) + b"\n" + body + b"\n".join(odd[4:8]) + b"\n")
    assert [start.id for start in cluster.collect().starts] == ["good"]
    with cluster.stores[0].ledger.open("ab") as file:
        file.write(odd[8] + b"\n")
    assert [start.id for start in cluster.collect().starts] == ["good"]


def test_only_of_one_deployment_and_only_the_last_hours(cluster):
    cluster.start(0, "old", at=time.time() - 7200)
    cluster.start(0, "new")
    cluster.start(1, "other", deployment="mistral")
    cluster.staging(1, 10, 0, deployment="mistral")
    assert {start.id for start in cluster.collect(hours=1).starts} == {"new", "other"}
    found = cluster.collect("llama")
    assert ([start.id for start in found.starts], found.stagings) == (["new", "old"], ())


def test_a_node_with_very_many_starts_tells_the_newest_and_how_many_more_there_are(cluster):
    for number in range(210):
        cluster.start(0, f"s{number}", at=time.time() - 210 + number)
    found = cluster.collect()
    assert (len(found.starts), found.left_out) == (200, 10)
    assert found.starts[0].id == "s209"
    assert "10 older rows are left out" in ledger_page(found, "", 24)


def test_a_node_without_a_store_has_nothing_to_tell(tmp_path):
    told = told_by(tmp_path / "none", "", 24)
    assert (told.starts, told.stagings, told.left_out) == ((), (), 0)


def test_the_page_counts_and_draws(cluster):
    for number, seconds in enumerate((20.0, 30.0, 100.0)):
        cluster.start(number, f"s{number}", seconds=seconds)
    cluster.start(1, "miss", verdict="MISSING", rung="ray")
    cluster.staging(0, 2_000_000, 500)
    found = cluster.collect()
    counts = found.counts()
    assert counts["verdicts"] == {"HIT": 3, "MISSING": 1}
    assert counts["rungs"] == {"hit": 3, "ray": 1}
    assert (counts["median_seconds"], counts["slowest_seconds"]) == (30.0, 100.0)
    page = ledger_page(found, "llama", 24.0)
    assert "| verdicts | HIT: 3, MISSING: 1 |" in page
    assert "| slowest start | 100.0 s |" in page
    assert "| fetched | 2.0 MB |" in page
    [image] = re.findall(r"!\[[^\]]*\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)", page)
    drawing = ET.fromstring(base64.b64decode(image))
    texts = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert "10.0.0.2 llama hit" in texts
    assert "100.0 s" in texts
    assert {"imports", "weights"} <= set(texts)


def test_the_page_of_nothing_is_a_page(cluster):
    page = ledger_page(cluster.collect(), "", 24.0)
    assert "| starts | 0 |" in page
    assert "| median start | unknown |" in page
    assert "data:image" not in page
