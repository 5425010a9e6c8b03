"""Many nodes as few pieces of work, without Ray and Prefect."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from llm_prefetch.cluster import Batch, Batches, Node, NodeReport, stage_cluster
from llm_prefetch.errors import ClusterError, NoSpaceError, OriginUnavailableError, PrefetchError
from tests.test_cluster_logic import failed, ready, spec


def nodes(count: int) -> list[Node]:
    return [Node(f"id{n}", f"10.0.{n // 100}.{n % 100}", f"host{n}") for n in range(count)]


class Cluster:
    """Nodes that fail as often as they are told to, and how often each was staged on."""

    def __init__(self, **errors: Sequence[PrefetchError]) -> None:
        self.errors = {name: list(left) for name, left in errors.items()}
        self.staged: list[str] = []

    def stage(self, node: Node, *_: object) -> NodeReport:
        self.staged.append(node.id)
        left = self.errors.get(node.id)
        return failed(node, left.pop(0)) if left else ready(node)


@pytest.mark.parametrize(
    ("count", "pieces", "largest"), [(1, 1, 1), (3, 3, 1), (64, 64, 1), (65, 33, 2), (1000, 63, 16)]
)
def test_up_to_64_nodes_are_a_piece_each_and_more_nodes_are_no_more_pieces(
    count: int, pieces: int, largest: int
) -> None:
    cluster, submitted = Cluster(), list[Batch]()

    def submit(batch: Batch) -> Future[None]:
        submitted.append(batch)
        return pool.submit(batch)

    with ThreadPoolExecutor(8) as pool:
        batches = Batches(nodes(count), cluster.stage, submit)
        report = stage_cluster(spec(), nodes(count), batches.start, stop=threading.Event())
    assert (len(submitted), max(len(batch.nodes) for batch in submitted)) == (pieces, largest)
    assert sorted(cluster.staged) == sorted(node.id for node in nodes(count))
    assert [row["node"] for row in report.rows()] == [node.address for node in nodes(count)]  # a row for each
    assert report.ready_nodes == count


def test_a_batch_is_named_by_its_node_or_by_how_many_there_are() -> None:
    assert Batch(nodes(1), Cluster().stage, 1).name == "10.0.0.0"
    assert Batch(nodes(16), Cluster().stage, 1).name == "10.0.0.0-and-15-more"


def test_trying_again_repeats_only_what_may_succeed() -> None:
    passing = OriginUnavailableError("busy")
    cluster = Cluster(id1=[NoSpaceError("full"), NoSpaceError("full")], id2=[passing, passing])
    batch = Batch(nodes(4), cluster.stage, 4)
    with pytest.raises(OriginUnavailableError):  # of the two errors, the one that is worth another try
        batch()
    assert sorted(cluster.staged) == ["id0", "id1", "id2", "id3"]
    with pytest.raises(OriginUnavailableError):
        batch()
    with pytest.raises(NoSpaceError):  # that one stays
        batch()
    assert cluster.staged[4:] == ["id2", "id2"]
    reports = [batch.report(node) for node in nodes(4)]
    assert [report.ready for report in reports if report] == [True, False, True, True]


def test_a_node_that_fails_hides_no_other_of_its_batch() -> None:
    cluster = Cluster(id1=[NoSpaceError("full")])
    with ThreadPoolExecutor(2) as pool:
        batches = Batches(nodes(6), cluster.stage, pool.submit, most=2)
        report = stage_cluster(spec("5"), nodes(6), batches.start, stop=threading.Event())
    assert [node.ready for node in report.nodes] == [True, False, True, True, True, True]
    assert [type(node.error) for node in report.failed] == [NoSpaceError]


def test_a_piece_of_work_that_breaks_is_an_error_of_each_of_its_nodes() -> None:
    def submit(batch: Batch) -> Future[None]:
        future = Future[None]()
        if batch.nodes[0].id == "id0":
            future.set_exception(RuntimeError("the task run crashed: token=s3cret\nand more"))
        else:
            batch()
            future.set_result(None)
        return future

    batches = Batches(nodes(4), Cluster().stage, submit, most=2)
    report = stage_cluster(spec("2"), nodes(4), batches.start, stop=threading.Event())
    assert [node.ready for node in report.nodes] == [False, False, True, True]
    error = report.first_error
    assert isinstance(error, ClusterError)
    assert str(error) == (
        "the task run failed: the task run crashed: token=[hidden] (10.0.0.0): see the log of the task run"
    )


def test_what_a_node_of_a_batch_logs_belongs_to_the_run() -> None:
    run: contextvars.ContextVar[str] = contextvars.ContextVar("run")
    run.set("mine")
    seen = list[str]()

    def stage(node: Node) -> NodeReport:
        seen.append(run.get("nobody's"))
        return ready(node)

    Batch(nodes(3), stage, 3)()
    assert seen == ["mine"] * 3
