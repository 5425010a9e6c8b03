"""A run on one page, as Markdown: what was to stage, what became of it, and what to do next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llm_prefetch import manifest
from llm_prefetch.cluster.reports import ClusterReport, NodeReport
from llm_prefetch.errors import PrefetchError
from llm_prefetch.progress import size
from llm_prefetch.redact import redact
from llm_prefetch.spec import Artifact, Spec

SHOWN_NODES = 64
"""Rows of a table on a page; all of them are in the table of the run."""
_BROWSABLE = ("https://", "http://")


def summary(spec: Spec, report: ClusterReport | None, error: PrefetchError | None) -> str:
    """The page of a run that ended with `report`, or with `error`, or with both."""
    parts = [
        f"## `{spec.deployment}`: {_outcome(report, error)}",
        *_what_next(error),
        _artifacts(spec, report),
    ]
    if report is not None:
        parts += [_bundle(report), _verdicts(report)]
    return "\n\n".join(part for part in parts if part) + "\n"


def plan_summary(spec: Spec, plan_id: str, rows: Sequence[dict[str, Any]]) -> str:
    """The page of a dry run, whose plan has these `rows`, one for each node."""
    apply = (
        f"To stage just this, run `stage` with `plan: {plan_id}`: it refuses if the spec, or what the origins hold, "
        "has changed by then."
    )
    parts = [
        f"## `{spec.deployment}`: the plan `{plan_id}` for {_nodes(len(rows))}",
        "Nothing was staged.",
        apply,
        _artifacts(spec, None),
        table(list(rows[0]), [[str(value) for value in row.values()] for row in rows[:SHOWN_NODES]])
        if rows
        else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def manifest_links(spec: Spec, report: ClusterReport) -> dict[str, str]:
    """The address of the published manifest by artifact, where a browser can open it."""
    found = {
        artifact.name: _manifest(artifact)
        for artifact in spec.artifacts
        if artifact.name in report.published and redact(artifact.uri) == artifact.uri
    }
    return {name: uri for name, uri in found.items() if uri.startswith(_BROWSABLE)}


def _manifest(artifact: Artifact) -> str:
    uri = redact(artifact.uri).rstrip("/")
    return uri if uri.startswith(_BROWSABLE) and uri.endswith("/manifest.json") else f"{uri}/{manifest.PATH}"


def _outcome(report: ClusterReport | None, error: PrefetchError | None) -> str:
    if report is None:
        return "not staged"
    ready = f"{report.ready_nodes} of {_nodes(len(report.nodes))} ready, {report.needed} needed"
    return f"{'not staged' if error else 'staged'}: {ready}"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _what_next(error: PrefetchError | None) -> list[str]:
    if error is None:
        return []
    where = f" (`{error.where}`)" if error.where else ""
    what = f"**{error.code}**: {cell(error.message)}{where}"
    again = "The same again may succeed." if error.retryable else ""
    hint = f"**What next**: {cell(error.hint)}." if error.hint else ""
    return [what, " ".join(filter(None, [hint, again, "What is done is kept on the nodes."]))]


def _artifacts(spec: Spec, report: ClusterReport | None) -> str:
    """What was to stage: by artifact the version and the bytes that one node has of it."""
    staged = report.staged if report else None
    found = {artifact.name: artifact for artifact in staged.artifacts} if staged else {}
    rows = []
    for artifact in spec.artifacts:
        done = found.get(artifact.name)
        version = done.version if done else artifact.version or "as the origin has it"
        rows.append(
            [
                artifact.name,
                artifact.kind,
                f"`{version}`",
                size(done.total_bytes) if done else "",
                f"`{redact(artifact.uri)}`",
                f"`{_manifest(artifact)}`" if report and artifact.name in report.published else "",
            ]
        )
    return table(["artifact", "kind", "version", "size", "origin", "published manifest"], rows)


def _bundle(report: ClusterReport) -> str:
    staged = report.staged
    return f"Live: `{staged.bundle}`" if staged else ""


def _verdicts(report: ClusterReport) -> str:
    """Every node up to a bound, those that failed first; all of them are in the run's table."""
    nodes = sorted(report.nodes, key=lambda node: node.ready)
    rows = [_verdict(node) for node in nodes[:SHOWN_NODES]]
    left = len(nodes) - len(rows)
    more = f"\n\n{_nodes(left)} more are in the table." if left > 0 else ""
    return table(["node", "verdict", "to stage", "fetched", "reused", "seconds", "error"], rows) + more


def _verdict(node: NodeReport) -> list[str]:
    done = node.report
    numbers = (
        [
            size(done.fetched_bytes + done.reused_bytes),
            size(done.fetched_bytes),
            size(done.reused_bytes),
            f"{done.seconds:.1f}",
        ]
        if done
        else [""] * 4
    )
    return [node.node.address, str(node.verdict), *numbers, str(node.error or "")]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell(text) for text in line)} |" for line in lines)


def cell(text: str) -> str:
    """`text` on one line, where no bar of its own ends a column."""
    return " ".join(text.split()).replace("|", "\\|")
