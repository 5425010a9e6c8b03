"""A driver that uses the library as a program does: run on a host with `-m`, it prints what it saw as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from llm_prefetch.cluster import Run, connected, plan_cluster, select_nodes, stage_node
from llm_prefetch.errors import PrefetchError
from llm_prefetch.origins import open_origin
from llm_prefetch.spec import NodeSelector, Spec


def select(selectors: list[dict[str, Any]]) -> list[Any]:
    """The host names that each selector chooses, or the error."""
    found: list[Any] = []
    for selector in selectors:
        try:
            found.append([node.hostname for node in select_nodes(NodeSelector.model_validate(selector))])
        except PrefetchError as error:
            found.append(plain(error))
    return found


def ids() -> dict[str, str]:
    """Host name to Ray node id."""
    return {node.hostname: node.id for node in select_nodes(NodeSelector())}


def fail(spec: dict[str, Any]) -> list[Any]:
    """The errors of planning and of staging on one node."""
    parsed = Spec.model_validate(spec)
    node = select_nodes(parsed.nodes)[0]
    planned = plain(plan_cluster(parsed, [node], root=None).nodes[0].error)
    return [planned, plain(stage_node(node, parsed, Run.of(parsed), root=None).error)]


def vanish(spec: dict[str, Any]) -> dict[str, Any] | None:
    """The error of staging on a node that was selected and is not there any more."""
    parsed = Spec.model_validate(spec)
    gone = replace(select_nodes(parsed.nodes)[0], id="a" * 56)
    return plain(stage_node(gone, parsed, Run.of(parsed), root=None).error)


def change_between(spec: dict[str, Any], path: str) -> list[Any]:
    """Stage on one node, change an object at the origin, and stage on the others, in one run."""
    parsed = Spec.model_validate(spec)
    first, *others = select_nodes(parsed.nodes)
    run = Run.of(parsed)
    reports = [stage_node(first, parsed, run, root=None)]
    origin = open_origin(parsed.artifacts[0].uri)
    old = origin.read(path, 2**30)
    changed = Path(f"/tmp/{parsed.deployment}-changed")
    changed.write_bytes(bytes(len(old)))
    with changed.open("rb") as body:
        origin.write(path, body, len(old))
    changed.unlink()
    reports += [stage_node(node, parsed, run, root=None) for node in others]
    return [
        report.report.artifacts[0].version if report.report else plain(report.error) for report in reports
    ]


def plain(error: PrefetchError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {"type": type(error).__name__, "code": error.code, "message": error.message,
            "where": error.where, "hint": error.hint}  # fmt: skip


if __name__ == "__main__":
    calls = {work.__name__: work for work in (select, ids, fail, vanish, change_between)}
    with connected():
        print(json.dumps([calls[name](*arguments) for name, *arguments in json.loads(sys.argv[1])]))
