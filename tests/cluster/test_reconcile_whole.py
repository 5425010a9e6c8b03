"""What a reconcile does besides deciding: it stages where something lacks, and is judged by the whole of its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from llm_prefetch.cluster import ClusterReport, Node, Outcome, reconcile_cluster, reconciled
from llm_prefetch.cluster.asking import Answer
from llm_prefetch.cluster.inspection import LiveBundle, LiveMember, Wanted, live_bundle
from llm_prefetch.live import Member
from llm_prefetch.record import Verdict
from llm_prefetch.spec import Spec
from tests.test_cluster_logic import failed, ready

WEIGHTS = Member("weights", "model", "b3-1")
THERE = LiveBundle("bundle-1", Verdict.HIT, "", (LiveMember(WEIGHTS, "s3://b/m", ""),))
NOTHING = LiveBundle("", Verdict.MISSING, "nothing is live on this node", ())


@dataclass
class Fleet:
    """Nodes that answer and are staged as a test says."""

    nodes: list[Node]
    lives: dict[str, LiveBundle]
    broken: set[str] = field(default_factory=set)
    reports: list[ClusterReport] = field(default_factory=list)

    def ask(self, nodes: Sequence[Node], question: Any, *_arguments: Any, **_how: Any) -> list[Answer[Any]]:
        if question is live_bundle:
            return [Answer(node, self.lives[node.id]) for node in nodes]
        return [Answer(node, (Wanted(WEIGHTS),)) for node in nodes]

    def stage(self, spec: Spec, nodes: Sequence[Node]) -> ClusterReport:
        found = [failed(node) if node.id in self.broken else ready(node) for node in nodes]
        self.lives |= {one.node.id: THERE for one in found if one.ready}
        self.reports.append(ClusterReport(tuple(found), spec.policy.needed(len(nodes))))
        return self.reports[-1]

    def join(self) -> None:
        number = len(self.nodes)
        self.nodes.append(Node(f"id{number}", f"10.0.0.{number}", f"host{number}"))
        self.lives[f"id{number}"] = NOTHING

    def reconcile(self, min_ready: str, **how: Any) -> Outcome:
        artifacts = [{"name": "weights", "uri": "s3://b/m"}]
        spec = Spec.model_validate(
            {"deployment": "llama", "artifacts": artifacts, "policy": {"min_ready": min_ready}}
        )
        return reconcile_cluster(spec, list(self.nodes), self.stage, **how)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """Five nodes that are ready, and one that has joined."""
    fleet = Fleet([], {})
    for _ in range(6):
        fleet.join()
    fleet.lives |= {f"id{number}": THERE for number in range(5)}
    monkeypatch.setattr("llm_prefetch.cluster.reconcile.ask_nodes", fleet.ask)
    return fleet


def counts(payload: Any) -> tuple[int, ...]:
    return tuple(payload[key] for key in ("nodes", "ready", "needed", "failed"))


def test_a_node_that_is_made_ready_is_announced_and_counted_among_all_nodes(fleet: Fleet) -> None:
    outcome = fleet.reconcile("3")
    (report,) = fleet.reports
    assert [one.node.id for one in report.nodes] == ["id5"]
    assert report.ready, "the progress of this staging is complete"
    bundle, node = reconciled("llama", report, outcome)
    assert (bundle.event, counts(bundle.payload)) == ("llm-prefetch.bundle.staged", (6, 6, 3, 0))
    assert (bundle.payload["bundle"], bundle.payload["error"]) == ("bundle-1", "")
    assert (node.event, node.name) == ("llm-prefetch.node.ready", "host5")


def test_a_node_that_fails_is_no_failed_staging_where_enough_others_are_ready(fleet: Fleet) -> None:
    fleet.broken = {"id5"}
    outcome = fleet.reconcile("3")
    outcome.require_ready()
    (report,) = fleet.reports
    assert not report.ready, "the progress of this staging is not complete"
    (bundle,) = reconciled("llama", report, outcome)
    assert (bundle.event, counts(bundle.payload)) == ("llm-prefetch.bundle.staged", (6, 5, 3, 1))
    assert bundle.payload["error"] == "no-space"


def test_where_too_few_of_all_nodes_are_ready_the_event_says_what_the_run_says(fleet: Fleet) -> None:
    fleet.broken = {"id5"}
    fleet.lives["id4"] = NOTHING
    outcome = fleet.reconcile("all")
    (report,) = fleet.reports
    bundle, node = reconciled("llama", report, outcome)
    assert (bundle.event, counts(bundle.payload)) == ("llm-prefetch.bundle.stage-failed", (6, 5, 6, 1))
    assert "5 of 6 nodes are ready, 6 are needed; full" in bundle.payload["message"]
    assert node.name == "host4"  # that much is true


def test_where_nothing_lacks_or_nothing_shall_be_done_nothing_is_staged(fleet: Fleet) -> None:
    assert [one.did for one in fleet.reconcile("all", dry_run=True).nodes][-1] == "to stage"
    fleet.lives["id5"] = THERE
    assert fleet.reconcile("all").ready
    assert fleet.reports == []
