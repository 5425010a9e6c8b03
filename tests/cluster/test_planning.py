"""The plan of a cluster: the origins are read once, every node plans for itself, and no node hides another."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from llm_prefetch import ledger
from llm_prefetch.cluster import Answer, Node
from llm_prefetch.cluster.planning import Planned, plan_here, plan_nodes
from llm_prefetch.errors import DiskPermissionError, OriginNotFoundError, PrefetchError
from llm_prefetch.forecast import Forecast, find_sources, forecast
from llm_prefetch.plan import PlanSummary
from llm_prefetch.spec import Policy
from llm_prefetch.stage import stage
from llm_prefetch.store import open_store
from tests.samples import FILES, TOTAL, make_artifact, make_folder, make_published, make_spec, raises

NODES = [Node(f"id{n}", f"10.0.0.{n}", f"host{n}") for n in range(5)]


@dataclass
class Nodes:
    """Five nodes, each with a store of its own in this process; `broken` ones answer with an error."""

    folder: Path
    broken: dict[str, PrefetchError] = field(default_factory=dict)
    asked: list[tuple[list[str], list[str] | None]] = field(default_factory=list)
    """Who was asked together, and what they were told of the origins."""

    def store(self, node):
        return open_store(self.folder / node.id, create=True)

    def plan(self, spec):
        def ask(nodes, known):
            self.asked.append(([node.id for node in nodes], None if known is None else sorted(known)))
            return [self._answer(node, spec, known) for node in nodes]

        return plan_nodes(spec, NODES, ask)

    def _answer(self, node, spec, known):
        try:
            if node.id in self.broken:
                raise self.broken[node.id]
            return Answer(node, plan_here(spec, self.store(node), known))
        except PrefetchError as error:
            return Answer(node, error=error)


@pytest.fixture
def nodes(tmp_path):
    return Nodes(tmp_path / "nodes")


@pytest.fixture
def origin(tmp_path):
    return tmp_path / "origin"


@pytest.fixture
def spec(origin):
    return make_spec(make_published(origin))


def test_every_node_has_a_row_that_a_table_can_show(nodes, spec, origin):
    stage(spec, nodes.store(NODES[1]))
    found = nodes.plan(spec)
    rows = found.rows()
    assert [row["node"] for row in rows] == [node.address for node in NODES]
    assert [row["fetch_bytes"] for row in rows] == [TOTAL, 0, TOTAL, TOTAL, TOTAL]
    assert [row["reuse_bytes"] for row in rows] == [0, TOTAL, 0, 0, 0]
    assert found.fetch_bytes == 4 * TOTAL
    assert {row["source"] for row in rows} == {f"file://{origin}"}
    assert {row["fits"] for row in rows} == {True}
    assert all(row["free_bytes"] > 0 for row in rows)
    assert len({tuple(row) for row in rows}) == 1
    assert all(isinstance(value, str | int | float | bool | None) for row in rows for value in row.values())
    assert json.loads(json.dumps(rows)) == rows


def test_one_node_reads_the_origin_and_the_others_are_told(nodes, spec):
    nodes.plan(spec)
    assert nodes.asked == [(["id0"], None), (["id1", "id2", "id3", "id4"], ["weights"])]


def test_what_is_sent_back_does_not_grow_with_the_files(nodes, spec):
    known = {source.artifact.name: source.content for source in find_sources(spec, nodes.store(NODES[0]))}
    answer = plan_here(spec, nodes.store(NODES[1]), known)
    assert answer.contents == {}
    assert len(answer.forecast.artifacts) == 1


def test_where_the_first_node_fails_the_next_one_reads_the_origin(nodes, spec):
    nodes.broken["id0"] = DiskPermissionError("no", where="/x", hint="chmod")
    found = nodes.plan(spec)
    assert nodes.asked[1:] == [(["id1"], None), (["id2", "id3", "id4"], ["weights"])]
    assert [plan.node.id for plan in found.failed] == ["id0"]
    row = found.rows()[0]
    assert (row["error"], row["fits"], row["fetch_bytes"]) == ("no (/x): chmod", None, None)
    assert [row["fetch_bytes"] for row in found.rows()[1:]] == [TOTAL] * 4


def test_where_no_node_can_read_the_origin_each_says_why_after_few_rounds(nodes, tmp_path):
    found = nodes.plan(make_spec(f"file://{tmp_path}/nowhere"))
    assert len(found.failed) == len(NODES)
    assert {type(plan.error) for plan in found.failed} == {OriginNotFoundError}
    assert [ids for ids, _ in nodes.asked] == [["id0"], ["id1"], ["id2"], ["id3", "id4"]]
    assert found.id.startswith("plan-")


def test_a_node_that_may_not_read_what_another_one_read_says_so(nodes, spec, origin):
    known = {source.artifact.name: source.content for source in find_sources(spec, nodes.store(NODES[0]))}
    origin.rename(origin.with_name("elsewhere"))
    with raises(OriginNotFoundError, 3, "no such folder"):
        plan_here(spec, nodes.store(NODES[1]), known)


def test_a_node_that_finds_other_bytes_at_the_origin_says_so(nodes, tmp_path):
    """As a folder of each machine's own does, under one path."""
    spec = make_spec(f"file://{make_folder(tmp_path / 'plain')}")
    known = {source.artifact.name: source.content for source in find_sources(spec, nodes.store(NODES[0]))}
    assert plan_here(spec, nodes.store(NODES[1]), known).forecast.fetch_bytes == TOTAL
    (tmp_path / "plain" / "config.json").write_bytes(b"longer than it was")
    with pytest.raises(PrefetchError, match="this node finds ls-") as caught:
        plan_here(spec, nodes.store(NODES[1]), known)
    assert caught.value.code == "origin-changed"


def test_the_id_changes_with_the_spec_and_the_origin_and_not_with_the_nodes(nodes, spec, origin):
    first = nodes.plan(spec).id
    assert len(first) == len("plan-") + 12
    stage(spec, nodes.store(NODES[2]))
    nodes.broken["id0"] = DiskPermissionError("no", where="/x", hint="chmod")
    assert nodes.plan(spec).id == first
    other = spec.model_copy(update={"policy": Policy(min_ready="1")})
    make_published(origin, {**FILES, "new": b"new"})
    assert len({first, nodes.plan(other).id, nodes.plan(spec).id}) == 3


def test_the_id_of_a_prefix_without_a_manifest_changes_with_its_listing(nodes, tmp_path):
    spec = make_spec(f"file://{make_folder(tmp_path / 'plain')}")
    first = nodes.plan(spec).id
    assert nodes.plan(spec).id == first
    (tmp_path / "plain" / "new").write_bytes(b"x")
    assert nodes.plan(spec).id != first


def test_a_compile_cache_that_a_node_would_not_take_is_left_out_of_its_plan(nodes, spec, tmp_path):
    cache = make_artifact(f"file://{tmp_path}/nowhere", "compile", kind="compile-cache")
    found = nodes.plan(spec.model_copy(update={"artifacts": [*spec.artifacts, cache]}))
    assert not found.failed
    assert {row["left_out"] for row in found.rows()} == {"compile: UNTRUSTED"}
    assert {row["fetch_bytes"] for row in found.rows()} == {TOTAL}


# The forecast of one node


def test_the_time_is_that_of_the_last_staging_that_went_well(store, spec, tmp_path):
    sources = find_sources(spec, store)
    assert forecast(spec, store, sources).eta_seconds is None  # never measured
    transfer = {"step": "transfer", "bytes": 10, "seconds": 2.0}
    ledger.append(store, "stage", outcome="ready", steps=[transfer, {**transfer, "bytes": 30}])
    ledger.append(store, "stage", outcome="ready", steps=[{"step": "resolve", "seconds": 1.0}])  # a no-op
    ledger.append(store, "stage", outcome="interrupted", steps=[{**transfer, "bytes": 10**9}])
    ledger.append(store, "stage", outcome="ready", steps=["?", {"step": "transfer", "bytes": "many"}])
    ledger.append(store, "stage", outcome="ready", steps=None)
    with store.ledger.open("ab") as file:
        file.write(b'{"kind": "stage", "outc')
    assert forecast(spec, store, sources).rate == 10.0
    assert forecast(spec, store, sources).eta_seconds == TOTAL / 10
    stage(spec, store)
    assert forecast(spec, store, find_sources(spec, store)).eta_seconds == 0.0


def test_what_does_not_fit_is_told_with_what_would_go():
    artifact = PlanSummary("w", "s3://b/w", "", False, 1, 100, 80, 20, 90, 50)
    short = Forecast((artifact,), (), 50, None)
    assert (short.fits, short.evict_bytes) == (False, 0)
    assert replace(short, free_bytes=90).fits


def test_planning_writes_nothing(store, spec):
    stage(spec, store)
    before = {path: path.lstat().st_mtime_ns for path in store.root.rglob("*")}
    plan_here(spec, store, None)
    assert {path: path.lstat().st_mtime_ns for path in store.root.rglob("*")} == before


def test_a_plan_is_small(store, spec):
    answer = plan_here(spec, store, None)
    assert isinstance(answer, Planned)
    assert answer.keys == (answer.contents["weights"].version,)
