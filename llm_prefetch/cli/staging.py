"""`plan` and `stage`: on this node, or on every selected node of a Ray cluster."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from llm_prefetch import stage as staging
from llm_prefetch.cli.display import node_bars, print_json, print_table, progress_bar, say, size
from llm_prefetch.manifest import Manifest
from llm_prefetch.plan import PlanSummary
from llm_prefetch.spec import Spec, load_spec
from llm_prefetch.store import open_store


def add_commands(commands: Any, parents: list[argparse.ArgumentParser]) -> None:  # noqa: ANN401 (argparse's private type)
    """Add `plan` and `stage`."""
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("spec", metavar="SPEC", help="YAML file, or - for standard input")
    where.add_argument(
        "--cluster", action="store_true", help="every node that the SPEC selects, not this one"
    )
    where.add_argument(
        "--address", help="address of the Ray cluster (else RAY_ADDRESS, else the one on this machine)"
    )
    planner = commands.add_parser(
        "plan",
        parents=[*parents, where],
        help="what stage would do: bytes to fetch, to reuse, free space",
        description="What `stage` would do on this node, or on the cluster. Writes nothing.",
    )
    planner.set_defaults(run=_plan)
    stager = commands.add_parser(
        "stage",
        parents=[*parents, where],
        help="make a deployment ready on this node, or on the cluster",
        description="Fetch, verify and commit everything that a deployment needs, then switch it live.",
    )
    stager.add_argument("--dry-run", action="store_true", help="the same as `plan`")
    stager.set_defaults(run=_stage)


def _plan(options: argparse.Namespace) -> int:
    spec = load_spec(options.spec)
    if options.cluster:
        return _plan_cluster(spec, options)
    summaries = [planned.summary for planned in staging.plan(spec, open_store(options.root, create=True))]
    if options.json:
        print_json({"deployment": spec.deployment, "artifacts": summaries})
    else:
        print_table("", _PLAN_COLUMNS, (_plan_row(summary) for summary in summaries))
    return 0


def _stage(options: argparse.Namespace) -> int:
    if options.dry_run:
        return _plan(options)
    spec = load_spec(options.spec)
    if options.cluster:
        return _stage_cluster(spec, options)
    with progress_bar(quiet=options.json) as progress, _interruptible() as stop:
        report = staging.stage(spec, open_store(options.root, create=True), progress=progress, stop=stop)
    if options.json:
        print_json(report)
        return 0
    rows = (
        (a.name, a.version, a.verdict, size(a.fetched_bytes), size(a.reused_bytes), f"{a.seconds:.2f}")
        for a in report.artifacts
    )
    print_table("", ("artifact", "version", "verdict", "fetched", "reused", "seconds"), rows)
    print(f"{report.deployment} is {'now' if report.switched else 'still'} live with {report.bundle[:19]}")
    return 0


def _plan_cluster(spec: Spec, options: argparse.Namespace) -> int:
    from llm_prefetch.cluster import connected, plan_node, select_nodes

    with connected(options.address):
        nodes = select_nodes(spec.nodes)
        with ThreadPoolExecutor(len(nodes)) as pool:
            found = list(pool.map(lambda node: plan_node(node, spec, root=options.root), nodes))
    if options.json:
        rows = [{"node": node, "artifacts": summaries} for node, summaries in zip(nodes, found, strict=True)]
        print_json({"deployment": spec.deployment, "nodes": rows})
        return 0
    table = (
        (node.address, *_plan_row(summary))
        for node, summaries in zip(nodes, found, strict=True)
        for summary in summaries
    )
    print_table("", ("node", *_PLAN_COLUMNS), table)
    return 0


def _stage_cluster(spec: Spec, options: argparse.Namespace) -> int:
    from llm_prefetch.cluster import (
        Node,
        NodeReport,
        connected,
        require_ready,
        select_nodes,
        stage_cluster,
        stage_node,
    )

    root = options.root
    with connected(options.address), node_bars(quiet=options.json) as bars, _interruptible() as stop:
        nodes = select_nodes(spec.nodes)
        say(f"staging {spec.deployment} on {len(nodes)} nodes")
        with ThreadPoolExecutor(len(nodes)) as pool:

            def start(node: Node, manifests: Mapping[str, Manifest]) -> Future[NodeReport]:
                def show(node: Node, snapshot: Any) -> None:  # noqa: ANN401 (a Snapshot)
                    bars.update(node.address, snapshot)

                return pool.submit(stage_node, node, spec, manifests, root=root, on_progress=show, stop=stop)

            report = stage_cluster(spec, nodes, start, root=root)
    if options.json:
        print_json({"deployment": spec.deployment, "ready": report.ready, "needed": report.needed, "nodes": [
            {"node": n.node, "ready": n.ready, "report": n.report, "error": n.error} for n in report.nodes
        ]})  # fmt: skip
    else:
        print_table(
            "", ("node", "verdict", "fetched", "reused", "seconds", "error"), map(_node_row, report.nodes)
        )
        say(f"{report.ready_nodes} of {len(report.nodes)} nodes are ready, {report.needed} are needed")
    require_ready(report)
    return 0


_PLAN_COLUMNS = ("artifact", "version", "state", "files", "size", "fetch", "reuse", "free")


def _plan_row(summary: PlanSummary) -> Sequence[str]:
    state = "committed" if summary.committed else "to stage" if summary.fits else "does not fit"
    version = summary.version or "(computed while staging)"
    numbers = (summary.total_bytes, summary.fetch_bytes, summary.reuse_bytes, summary.free_bytes)
    return (summary.name, version, state, str(summary.files), *(size(number) for number in numbers))


def _node_row(node: Any) -> Sequence[str]:  # noqa: ANN401 (a NodeReport: importing its module imports Ray)
    report = node.report
    numbers = (
        (size(report.fetched_bytes), size(report.reused_bytes), f"{report.seconds:.2f}")
        if report
        else ("", "", "")
    )
    return (node.node.address, str(node.verdict), *numbers, str(node.error or ""))


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set, so that a transfer ends in order; the second one ends at once."""
    stop = threading.Event()

    def handle(_number: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        say("stopping; once more to stop at once")
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if stop.is_set():
            raise KeyboardInterrupt
