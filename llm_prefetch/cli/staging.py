"""`plan` and `stage`: on this node, or on every selected node of a Ray cluster."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from llm_prefetch.cli.bars import node_bars, progress_bar
from llm_prefetch.cli.display import print_json, print_table, say, say_error, short
from llm_prefetch.cli.on_cluster import add_options, on_cluster
from llm_prefetch.errors import PrefetchError
from llm_prefetch.forecast import Forecast, find_sources, forecast
from llm_prefetch.plan import PlanSummary
from llm_prefetch.progress import duration, size
from llm_prefetch.spec import Spec, load_spec
from llm_prefetch.stage import stage
from llm_prefetch.store import open_store

_EXAMPLE = """\
example:
  cat > llama-3-8b.yaml <<END
  deployment: llama-3-8b
  artifacts:
    - {name: weights, kind: model, uri: "s3://bucket/models/llama-3-8b"}
  END
  llm-prefetch stage llama-3-8b.yaml

A replica then loads <root>/live/llama-3-8b/weights. What is on the node already is not fetched again, and a
staging that was interrupted continues."""


def add_commands(commands: Any, parents: list[argparse.ArgumentParser]) -> None:  # noqa: ANN401 (argparse's private type)
    """Add `plan` and `stage`."""
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("spec", metavar="SPEC", help="YAML file, or - for standard input")
    add_options(where, "every node that the SPEC selects")
    planner = commands.add_parser(
        "plan",
        parents=[*parents, where],
        help="what stage would do: bytes to fetch, to reuse, to delete; free space, time",
        description="What `stage` would do on this node, or on the cluster. Writes nothing.",
    )
    planner.set_defaults(run=_plan)
    stager = commands.add_parser(
        "stage",
        parents=[*parents, where],
        help="make a deployment ready on this node, or on the cluster",
        description="Fetch, verify and commit everything that a deployment needs, then switch it live.",
        epilog=_EXAMPLE,
    )
    stager.add_argument("--dry-run", action="store_true", help="the same as `plan`")
    stager.set_defaults(run=_stage)


def _plan(options: argparse.Namespace) -> int:
    spec = load_spec(options.spec)
    if options.cluster:
        return _plan_cluster(spec, options)
    store = open_store(options.root, missing_ok=True)
    planned = forecast(spec, store, find_sources(spec, store))
    if options.json:
        print_json({
            "deployment": spec.deployment, "artifacts": planned.artifacts, "evictions": planned.evictions,
            "fits": planned.fits, "eta_seconds": planned.eta_seconds, "left_out": planned.left_out,
        })  # fmt: skip
    else:
        print_table(_PLAN_COLUMNS, (_plan_row(summary) for summary in planned.artifacts))
        for left in planned.left_out:
            print(f"left out: {left.name} is {left.verdict}: {left.reason}")
        for eviction in planned.evictions:
            print(f"to make room: {eviction.name}, {size(eviction.bytes)}")
        print(_in_sum(planned))
    return 0


def _stage(options: argparse.Namespace) -> int:
    if options.dry_run:
        return _plan(options)
    spec = load_spec(options.spec)
    if options.cluster:
        return _stage_cluster(spec, options)
    with progress_bar(quiet=options.json) as progress:
        report = stage(spec, open_store(options.root, create=True), progress=progress, stop=options.stop)
    if options.json:
        print_json(report)
        return 0
    rows = (
        (a.name, short(a.version), a.verdict, size(a.fetched_bytes), size(a.reused_bytes), f"{a.seconds:.2f}")
        for a in report.artifacts
    )
    print_table(("artifact", "version", "verdict", "fetched", "reused", "seconds"), rows)
    print(f"{report.deployment} is {'now' if report.switched else 'still'} live with {short(report.bundle)}")
    return 0


def _plan_cluster(spec: Spec, options: argparse.Namespace) -> int:
    """One node that cannot plan does not hide what the others say."""
    with on_cluster(options.address) as cluster:
        planned = cluster.plan_cluster(
            spec, cluster.select_nodes(spec.nodes), root=options.root, stop=options.stop
        )
    if options.json:
        print_json({"deployment": spec.deployment, "plan": planned.id, "nodes": planned.rows()})
    else:
        print_table(_CLUSTER_COLUMNS, map(_cluster_row, planned.rows()))
        say(f"{planned.id}: {size(planned.fetch_bytes)} to fetch on {len(planned.nodes)} nodes")
    for node in planned.failed:
        say(f"{node.node.address}: {node.error}")
    return planned.failed[0].error.exit_code if planned.failed else 0


def _stage_cluster(spec: Spec, options: argparse.Namespace) -> int:
    root = options.root
    with on_cluster(options.address) as cluster:
        nodes = cluster.select_nodes(spec.nodes)
        say(f"staging {spec.deployment} on {len(nodes)} nodes")
        with (
            node_bars(len(nodes), quiet=options.json) as bars,
            ThreadPoolExecutor(min(len(nodes), _NODES_AT_ONCE)) as pool,
        ):

            def start(node: Any, run: Any) -> Future[Any]:  # noqa: ANN401 (a Node and the Run)
                def show(node: Any, snapshot: Any) -> None:  # noqa: ANN401 (a Node and its Snapshot)
                    bars.update(node.address, snapshot)

                return pool.submit(
                    cluster.stage_node, node, spec, run, root=root, on_progress=show, stop=options.stop
                )

            report = cluster.stage_cluster(spec, nodes, start, stop=options.stop)
    failure: PrefetchError | None = None
    try:
        cluster.require_ready(report)
    except PrefetchError as error:
        failure = error
    if options.json:
        print_json({"deployment": spec.deployment, "ready": report.ready, "needed": report.needed, "nodes": [
            {"node": n.node, "ready": n.ready, "report": n.report, "error": n.error} for n in report.nodes
        ], **({"error": failure} if failure else {})})  # fmt: skip
    else:
        print_table(
            ("node", "verdict", "fetched", "reused", "seconds", "error"), map(_node_row, report.nodes)
        )
    if failure is not None:
        say_error(failure)
        return failure.exit_code
    say(f"{report.ready_nodes} of {len(report.nodes)} nodes are ready, {report.needed} are needed")
    return 0


_NODES_AT_ONCE = 64
_CLUSTER_COLUMNS = ("node", "fits", "fetch", "reuse", "evict", "free", "about", "source", "to make room")
_PLAN_COLUMNS = ("artifact", "version", "state", "files", "size", "fetch", "reuse")


def _plan_row(summary: PlanSummary) -> Sequence[str]:
    version = short(summary.version) if summary.version else "(none published)"
    numbers = (summary.total_bytes, summary.fetch_bytes, summary.reuse_bytes)
    state = "committed" if summary.committed else "to stage"
    return (summary.name, version, state, str(summary.files), *(size(number) for number in numbers))


def _in_sum(planned: Forecast) -> str:
    fetch, free, eta = planned.fetch_bytes, planned.free_bytes, planned.eta_seconds
    soon = f", about {duration(eta)}" if eta else ""
    return f"{size(fetch)} to fetch{soon}, {size(free)} free{'' if planned.fits else ': it does not fit'}"


def _cluster_row(row: Mapping[str, Any]) -> Sequence[str]:
    numbers = (row[name] for name in ("fetch_bytes", "reuse_bytes", "evict_bytes", "free_bytes"))
    eta, fits = row["eta_seconds"], {True: "yes", False: "no", None: "?"}[row["fits"]]
    return (
        row["node"], fits, *("" if number is None else size(number) for number in numbers),
        "" if eta is None else duration(eta), row["source"], row["evict"],
    )  # fmt: skip


def _node_row(node: Any) -> Sequence[str]:  # noqa: ANN401 (a NodeReport: importing its module imports Ray)
    report = node.report
    numbers = (
        (size(report.fetched_bytes), size(report.reused_bytes), f"{report.seconds:.2f}")
        if report
        else ("", "", "")
    )
    return (node.node.address, str(node.verdict), *numbers, str(node.error or ""))
