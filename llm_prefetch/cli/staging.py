"""`plan` and `stage`: on this node, or on every selected node of a Ray cluster."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from types import ModuleType
from typing import Any

from llm_prefetch import stage as staging
from llm_prefetch.cli.bars import node_bars, progress_bar
from llm_prefetch.cli.display import print_json, print_table, say, say_error, short, size
from llm_prefetch.errors import MissingExtraError, PrefetchError
from llm_prefetch.plan import PlanSummary
from llm_prefetch.spec import Spec, load_spec
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
        epilog=_EXAMPLE,
    )
    stager.add_argument("--dry-run", action="store_true", help="the same as `plan`")
    stager.set_defaults(run=_stage)


def _plan(options: argparse.Namespace) -> int:
    spec = load_spec(options.spec)
    if options.cluster:
        return _plan_cluster(spec, options)
    store = open_store(options.root, missing_ok=True)
    summaries = [planned.summary for planned in staging.plan(spec, store)]
    if options.json:
        print_json({"deployment": spec.deployment, "artifacts": summaries})
    else:
        print_table(_PLAN_COLUMNS, (_plan_row(summary) for summary in summaries))
        print(_in_sum(summaries))
    return 0


def _stage(options: argparse.Namespace) -> int:
    if options.dry_run:
        return _plan(options)
    spec = load_spec(options.spec)
    if options.cluster:
        return _stage_cluster(spec, options)
    with progress_bar(quiet=options.json) as progress:
        report = staging.stage(
            spec, open_store(options.root, create=True), progress=progress, stop=options.stop
        )
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
    cluster = _cluster()

    def ask(node: Any) -> list[PlanSummary] | PrefetchError:  # noqa: ANN401 (a Node: importing its module imports Ray)
        try:
            summaries: list[PlanSummary] = cluster.plan_node(node, spec, root=options.root)
        except PrefetchError as error:
            return error
        return summaries

    with _connected(cluster, options.address):
        nodes = cluster.select_nodes(spec.nodes)
        with ThreadPoolExecutor(min(len(nodes), _NODES_AT_ONCE)) as pool:
            answers = list(zip(nodes, pool.map(ask, nodes), strict=True))
    planned = [(node, answer) for node, answer in answers if not isinstance(answer, PrefetchError)]
    failed = [(node, answer) for node, answer in answers if isinstance(answer, PrefetchError)]
    if options.json:
        rows = [{"node": node, "artifacts": summaries, "error": None} for node, summaries in planned]
        rows += [{"node": node, "artifacts": [], "error": error} for node, error in failed]
        print_json({"deployment": spec.deployment, "nodes": rows})
    else:
        table = ((node.address, *_plan_row(summary)) for node, summaries in planned for summary in summaries)
        print_table(("node", *_PLAN_COLUMNS), table)
        for node, summaries in planned:
            print(f"{node.address}: {_in_sum(summaries)}")
    for node, error in failed:
        say(f"{node.address}: {error}")
    return failed[0][1].exit_code if failed else 0


def _stage_cluster(spec: Spec, options: argparse.Namespace) -> int:
    cluster = _cluster()
    root = options.root
    with _connected(cluster, options.address):
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


@contextmanager
def _connected(cluster: ModuleType, address: str | None) -> Iterator[None]:
    """Ray's threads print news of the cluster on stdout, where a program reads our answer: it becomes talk."""
    with redirect_stdout(sys.stderr), cluster.connected(address):
        yield


def _cluster() -> ModuleType:
    """The module that imports Ray, which takes a second and need not be installed."""
    try:
        from llm_prefetch import cluster
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise MissingExtraError(
            "--cluster needs Ray", where="this Python", hint="pip install 'llm-prefetch[ray]'"
        ) from error
    return cluster


_NODES_AT_ONCE = 64
_PLAN_COLUMNS = ("artifact", "version", "state", "files", "size", "fetch", "reuse")


def _plan_row(summary: PlanSummary) -> Sequence[str]:
    version = short(summary.version) if summary.version else "(none published)"
    numbers = (summary.total_bytes, summary.fetch_bytes, summary.reuse_bytes)
    state = "committed" if summary.committed else "to stage"
    return (summary.name, version, state, str(summary.files), *(size(number) for number in numbers))


def _in_sum(summaries: Sequence[PlanSummary]) -> str:
    fetch = sum(summary.fetch_bytes for summary in summaries)
    free = min(summary.free_bytes for summary in summaries)
    return f"{size(fetch)} to fetch, {size(free)} free{'' if fetch <= free else ': it does not fit'}"


def _node_row(node: Any) -> Sequence[str]:  # noqa: ANN401 (a NodeReport: importing its module imports Ray)
    report = node.report
    numbers = (
        (size(report.fetched_bytes), size(report.reused_bytes), f"{report.seconds:.2f}")
        if report
        else ("", "", "")
    )
    return (node.node.address, str(node.verdict), *numbers, str(node.error or ""))
