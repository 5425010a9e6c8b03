"""What needs no cluster: counting nodes, pinning versions, and waiting for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from llm_prefetch.cluster import (
    ClusterReport,
    Node,
    NodeReport,
    Run,
    require_complete,
    require_planned,
    require_ready,
    stage_cluster,
)
from llm_prefetch.cluster.bandwidth import SharedBandwidth
from llm_prefetch.cluster.failures import on_the_node
from llm_prefetch.cluster.nodes import what_there_is
from llm_prefetch.cluster.pins import Pins
from llm_prefetch.cluster.planning import ClusterPlan, NodePlan
from llm_prefetch.cluster.staging import looked_at
from llm_prefetch.errors import (
    ClusterError,
    NoSpaceError,
    NotReadyError,
    OriginAccessError,
    OriginChangedError,
    OriginNotFoundError,
    PrefetchError,
    SpecError,
)
from llm_prefetch.live import DeploymentCheck
from llm_prefetch.progress import PercentOfNodes, Snapshot, how_far
from llm_prefetch.record import Verdict
from llm_prefetch.spec import NodeSelector, Spec
from llm_prefetch.stage import StageReport
from llm_prefetch.stage_artifact import ArtifactReport
from tests.samples import make_manifest, raises

NODES = [Node(f"id{n}", f"10.0.0.{n}", f"host{n}") for n in range(3)]
ONE, OTHER = make_manifest({"a": b"one"}), make_manifest({"a": b"other"})


def ready(node: Node, *, verdict: Verdict = Verdict.HIT) -> NodeReport:
    artifact = ArtifactReport("weights", ONE.version, verdict, 10, 7, 3, 0.5)
    return NodeReport(node, StageReport("llama", "bundle-1", True, (artifact,), 1.234), root="/mnt/llm")


def failed(node: Node, error: PrefetchError | None = None) -> NodeReport:
    return NodeReport(node, error=error or NoSpaceError("full", where="/mnt", hint="free some"))


def spec(min_ready: str = "all", **rest: Any) -> Spec:
    artifacts = [{"name": "weights", "uri": "s3://b/m"}, {"name": "adapter", "uri": "s3://b/a"}]
    return Spec.model_validate(
        {"deployment": "llama", "artifacts": artifacts, "policy": {"min_ready": min_ready}, **rest}
    )


def check(bundle: str = "bundle-1", verdict: Verdict = Verdict.HIT, reason: str = "") -> DeploymentCheck:
    return DeploymentCheck("llama", bundle, verdict, reason, (), ())


class Percents:
    """A `PercentOfNodes` with a clock to turn, and what it reported."""

    def __init__(self, nodes: int) -> None:
        self.now, self.said = 0.0, list[float]()
        self.of = PercentOfNodes(
            lambda percent, _total: self.said.append(percent), nodes=nodes, clock=lambda: self.now
        )

    def after(self, seconds: float, node: str, done: int, total: int = 1000) -> list[float]:
        self.now += seconds
        self.of.update(node, Snapshot("weights", total, done, self.now))
        return self.said


def test_progress_is_reported_seldom_and_only_when_it_moved() -> None:
    percents = Percents(nodes=1)
    assert percents.after(1, "a", 500) == []  # too soon
    assert percents.after(5, "a", 501) == [50.1]
    assert percents.after(5, "a", 505) == [50.1]  # less than one percent
    assert percents.after(1, "a", 900) == [50.1, 90.0]
    assert percents.after(9, "a", 800) == [50.1, 90.0]  # a range that is fetched again: not backwards


def test_progress_counts_nodes_that_have_not_begun() -> None:
    percents = Percents(nodes=4)
    assert percents.after(5, "a", 1000) == [25.0]
    assert percents.after(5, "b", 0, total=0) == [25.0]  # its actor is up, and knows nothing yet
    assert percents.after(5, "b", 1000) == [25.0, 50.0]


def test_progress_is_100_when_all_is_done_and_not_before() -> None:
    percents = Percents(nodes=1)
    assert percents.after(5, "a", 1000) == [99.0]  # another artifact may follow
    assert percents.after(5, "a", 1000, total=4000) == [99.0]
    percents.of.finish()
    assert percents.said == [99.0, 100.0]
    nothing_to_do = Percents(nodes=2)
    nothing_to_do.of.finish()
    assert nothing_to_do.said == [100.0]


def test_what_was_there_before_is_no_speed_and_the_rate_is_that_of_the_last_report() -> None:
    told = list[str]()
    clock = [0.0]
    percents = PercentOfNodes(lambda _, total: told.append(how_far(total)), nodes=2, clock=lambda: clock[0])
    for seconds, node, done in ((10, "a", 500), (5, "a", 600), (5, "b", 400), (10, "b", 900), (0, "a", 1000)):
        clock[0] += seconds
        percents.update(node, Snapshot("weights", 1000, done, clock[0]))
    percents.finish()
    assert told == [
        "2 nodes: 500 B of 2.0 kB (25%), 0 B/s",
        "2 nodes: 600 B of 2.0 kB (30%), 20 B/s, 1 min 10 s left",
        "2 nodes: 1.0 kB of 2.0 kB (50%), 0 B/s",
        "2 nodes: 1.5 kB of 2.0 kB (75%), 50 B/s, 10 s left",
        "2 nodes: 1.9 kB of 2.0 kB (95%), 50 B/s, 2 s left",
    ]


def test_a_run_that_failed_ends_where_it_stood() -> None:
    percents = Percents(nodes=2)
    percents.after(5, "a", 1000)
    percents.of.finish(complete=False)
    assert percents.said == [50.0, 50.0]


def test_a_report_has_a_row_for_every_node() -> None:
    report = ClusterReport((ready(NODES[0]), failed(NODES[1]), ready(NODES[2], verdict=Verdict.STALE)), 2)
    first, second, third = report.rows()
    assert first == {
        "node": "10.0.0.0", "host": "host0", "verdict": "HIT", "fetched_bytes": 7, "reused_bytes": 3, "evicted_bytes": 0,
        "seconds": 1.23,
        "root": "/mnt/llm", "error": "",
    }  # fmt: skip
    assert (second["verdict"], second["seconds"], second["error"]) == (
        "MISSING",
        None,
        "full (/mnt): free some",
    )
    assert (third["verdict"], third["error"]) == ("STALE", "")
    assert (report.ready_nodes, report.ready) == (1, False)


def test_too_few_nodes_are_the_error_of_the_first_that_failed() -> None:
    require_ready(ClusterReport((ready(NODES[0]), failed(NODES[1])), 1))
    with pytest.raises(NoSpaceError) as raised:
        require_ready(ClusterReport((ready(NODES[0]), failed(NODES[1])), 2))
    assert str(raised.value) == "1 of 2 nodes are ready, 2 are needed; 10.0.0.1: full (/mnt): free some"
    with pytest.raises(NoSpaceError, match=r"; 10\.0\.0\.1 \(and 1 more\): full"):
        require_ready(ClusterReport((ready(NODES[0]), failed(NODES[1]), failed(NODES[2])), 2))
    with raises(NotReadyError, 1, "0 of 1 nodes are ready, 1 are needed", "10.0.0.0"):
        require_ready(ClusterReport((ready(NODES[0], verdict=Verdict.STALE),), 1))
    with raises(NotReadyError, 1, "1 of 1 nodes are ready, 5 are needed", "the Ray cluster"):
        require_ready(ClusterReport((ready(NODES[0]),), 5))


def test_what_lies_there_after_the_switch_decides_and_not_what_was_done() -> None:
    assert looked_at(ready(NODES[0]), check()).ready
    for found, verdict, said in (
        (
            check(verdict=Verdict.CORRUPT, reason="weights: 'a' was changed"),
            Verdict.CORRUPT,
            "'a' was changed",
        ),
        (check("", Verdict.MISSING, "nothing is live on this node"), Verdict.MISSING, "nothing is live"),
        (check("bundle-2"), Verdict.MISSING, "bundle-2 is live there and not what this run staged"),
    ):
        report = looked_at(ready(NODES[0]), found)
        assert (report.ready, report.verdict) == (False, verdict)
        assert said in str(report.error)
        assert report.error is not None
        assert (report.error.where, bool(report.error.hint)) == ("10.0.0.0", True)
        assert report.report is not None  # what it did is still told
    again = looked_at(looked_at(ready(NODES[0]), check()), check(verdict=Verdict.PARTIAL))
    assert (again.ready, again.verdict) == (False, Verdict.PARTIAL)


def test_a_node_that_was_staged_and_then_lost_does_not_count() -> None:
    lost = replace(looked_at(ready(NODES[0]), check()), check=None, error=ClusterError("it died"))
    assert (lost.ready, lost.verdict) == (False, Verdict.MISSING)
    with pytest.raises(ClusterError, match=r"0 of 1 nodes are ready, 1 are needed; 10\.0\.0\.0: it died"):
        require_ready(ClusterReport((lost,), 1))


def test_an_empty_selection_says_what_there_is() -> None:
    def node(name: str, **labels: str) -> dict[str, Any]:
        labels |= {"ray.io/node-id": f"id-{name}"}
        resources = {"GPU": 8.0, "node:10.0.0.1": 1.0, "memory": 5.0}
        return {"NodeManagerHostname": name, "Labels": labels, "Resources": resources}

    alive = [node("a", disk="nvme"), node("b", disk="nvme"), node("c", disk="tape")]
    cases: dict[str, dict[str, Any]] = {
        "the labels disk=nvme (2 nodes), disk=tape": {"labels": {"disk": "ssd"}},
        "the resources GPU: 8 (3 nodes)": {"resources": {"TPU": 1}},
        "the nodes a, b, c": {"ids": ["d"]},
        "the labels disk=nvme (2 nodes), disk=tape; the nodes a, b, c": {
            "labels": {"disk": "tape"},
            "ids": ["a"],
        },
    }
    for said, selector in cases.items():
        assert what_there_is(alive, NodeSelector.model_validate(selector)) == said
    assert what_there_is([node("bare")], NodeSelector(labels={"a": "b"})) == "the labels (none)"
    many = what_there_is([node(f"host{n}") for n in range(30)], NodeSelector(ids=["x"]))
    assert many.endswith("host11, and 18 more")


def test_a_node_that_may_not_read_is_named_with_the_mend() -> None:
    denied = OriginAccessError("access denied", where="s3://b/m", hint="check the credentials")
    told = on_the_node(NODES[1], denied)
    assert type(told) is OriginAccessError
    assert str(told).startswith(
        "access denied (s3://b/m): check the credentials; it is 10.0.0.1 that must be allowed"
    )
    other = NoSpaceError("full")
    assert on_the_node(NODES[1], other) is other


def test_a_plan_is_applied_only_while_it_is_true() -> None:
    wanted, other = "plan-0123456789ab", "plan-ba9876543210"
    broken = NodePlan(NODES[0], error=OriginAccessError("denied", where="s3://b/m", hint="mend it"))
    require_planned(wanted, ClusterPlan(wanted, (NodePlan(NODES[0]),), ""))
    with pytest.raises(SpecError, match=f"nothing was staged.*{wanted}, now {other}.*make a dry run"):
        require_planned(wanted, ClusterPlan(other, (broken, NodePlan(NODES[1])), ""))
    with pytest.raises(OriginAccessError, match=r"1 of 1 nodes could not plan; 10\.0\.0\.0: denied"):
        require_planned(wanted, ClusterPlan(other, (broken,), ""))  # nobody knows whether it changed
    require_complete(ClusterPlan(wanted, (NodePlan(NODES[0]),), ""))
    with pytest.raises(OriginAccessError, match=r"1 of 2 nodes could not plan; 10\.0\.0\.0: denied"):
        require_complete(ClusterPlan(wanted, (NodePlan(NODES[1]), broken), ""))


def test_all_nodes_run_at_once_and_none_hides_another() -> None:
    together = threading.Barrier(3, timeout=30)

    def work(node: Node, run: Run) -> NodeReport:
        together.wait()  # would time out if one waited for another
        assert not run.pins.complete
        return ready(node) if node is not NODES[1] else failed(node)

    with ThreadPoolExecutor(3) as pool:
        report = stage_cluster(
            spec("2"), NODES, lambda node, run: pool.submit(work, node, run), stop=threading.Event()
        )
    assert [r.node for r in report.nodes] == NODES
    assert [r.ready for r in report.nodes] == [True, False, True]
    assert report.ready
    assert isinstance(report.first_error, NoSpaceError)


def test_an_interrupted_run_tells_its_nodes_to_stop_and_waits_for_them() -> None:
    stop, ended = threading.Event(), list[str]()

    def work(node: Node) -> NodeReport:
        stop.wait(30)
        ended.append(node.id)
        return failed(node, ClusterError("the staging was cancelled"))

    class Interrupted:
        def __init__(self, future: Future[NodeReport]) -> None:
            self.future = future

        def result(self) -> NodeReport:
            if not stop.is_set():
                raise KeyboardInterrupt
            return self.future.result()

    with ThreadPoolExecutor(3) as pool, pytest.raises(KeyboardInterrupt):
        stage_cluster(spec(), NODES, lambda node, _: Interrupted(pool.submit(work, node)), stop=stop)
    assert sorted(ended) == ["id0", "id1", "id2"]


def in_thread(pool: ThreadPoolExecutor, work: Callable[[], Any]) -> tuple[Future[Any], threading.Event]:
    began = threading.Event()

    def run() -> Any:
        began.set()
        return work()

    return pool.submit(run), began


def test_the_first_answer_pins_an_artifact() -> None:
    pins = Pins(frozenset({"weights"}))
    pins.offer({})
    assert not pins.complete
    pins.offer({"weights": ONE})
    pins.offer({"weights": OTHER})
    assert pins.complete
    assert pins.known == {"weights": ONE}
    assert pins.published == {"weights"}
    pins.settle({"weights": ONE})
    with raises(OriginChangedError, 3, OTHER.version, "the origin of weights"):
        pins.settle({"weights": OTHER})


def test_nodes_take_turns_until_one_knows_the_versions() -> None:
    pins, stop = Pins(frozenset({"weights"})), threading.Event()

    def second() -> dict[str, Any]:
        with pins.turn(stop):
            return pins.known

    def third() -> dict[str, Any]:
        with pins.turn(stop):
            raise OriginNotFoundError("not for me")

    with ThreadPoolExecutor(2) as pool:
        with pins.turn(stop):
            waiting, began = in_thread(pool, second)
            failing, _ = in_thread(pool, third)
            began.wait(30)
            assert not waiting.done()
            pins.settle({"weights": ONE})
        assert waiting.result(30) == {"weights": ONE}
        assert not pins.published  # the node made it
        with pytest.raises(OriginNotFoundError):
            failing.result(30)
    with pins.turn(stop), pins.turn(stop):  # nobody waits any more
        pass


def test_a_node_that_fails_hands_its_turn_on() -> None:
    pins, stop = Pins(frozenset({"weights"})), threading.Event()
    with pytest.raises(NoSpaceError), pins.turn(stop):
        raise NoSpaceError("full")
    with pins.turn(stop), ThreadPoolExecutor(1) as pool:

        def after_me() -> bool:
            with pins.turn(stop):
                return pins.complete

        waiting, began = in_thread(pool, after_me)
        began.wait(30)
        assert not waiting.done()
        stop.set()  # a cancelled run waits for nothing
        assert waiting.result(30) is False


def test_the_nodes_at_work_share_the_bandwidth_of_a_run() -> None:
    shared = SharedBandwidth(12e9)
    with shared.joined():
        assert shared.share == 12e9
        with shared.joined(), shared.joined():
            assert shared.share == 4e9
        assert shared.share == 12e9


def test_a_node_that_fails_leaves_its_share_to_the_others() -> None:
    shared = SharedBandwidth(12e9)
    with shared.joined():
        with pytest.raises(NoSpaceError), shared.joined():
            raise NoSpaceError("full")
        assert shared.share == 12e9


def test_a_run_without_a_cap_shares_nothing() -> None:
    with SharedBandwidth(None).joined() as _:
        assert SharedBandwidth(None).share is None
