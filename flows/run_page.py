"""What a person sees on the page of a run: its artifacts. None of them can fail a run, or hold up a staging."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from llm_prefetch.cluster import ClusterReport, manifest_links, summary
from llm_prefetch.progress import InBackground, PercentOfNodes, Snapshot, how_far

if TYPE_CHECKING:
    from llm_prefetch.errors import PrefetchError
    from llm_prefetch.spec import Spec

_AGAIN_SECONDS = (2.0, 4.0, 8.0, 16.0, 30.0)
"""Together as long as Prefect itself tries to tell a server that is restarted how a run has ended."""
_LAST_REPORT_SECONDS = 75.0
_Written = TypeVar("_Written")
_log = logging.getLogger("llm_prefetch.flows")


def artifact_key(*parts: str) -> str:
    """An artifact key: Prefect allows lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


@contextmanager
def live_progress(deployment: str, nodes: int) -> Iterator[PercentOfNodes]:
    """One progress artifact for a run over `nodes` nodes; each update of it is an event, so they are few.

    The block says by `finish` how it ended.
    """
    artifact = written(
        lambda: create_progress_artifact(
            progress=0.0,
            key=artifact_key("progress", deployment),
            description=f"`{deployment}` on {nodes} nodes",
        ),
        again=(),
    )

    def report(percent: float, total: Snapshot) -> None:
        if artifact is not None:
            text = f"`{deployment}` on {how_far(total)}"
            written(lambda: update_progress_artifact(artifact, progress=percent, description=text))  # type: ignore[arg-type]

    reports = InBackground(report)
    try:
        yield PercentOfNodes(reports, nodes=nodes)
    except BaseException:  # such as a cancellation, which waits for nothing
        reports.close(0)
        raise
    reports.close(_LAST_REPORT_SECONDS)


def show_run(spec: Spec, report: ClusterReport | None, error: PrefetchError | None) -> None:
    """A table with a row for each node, a page of Markdown, and links to the manifests that a browser can open."""
    name = spec.deployment
    if report is not None:
        count = f"{report.ready_nodes} of {len(report.nodes)} nodes ready, {report.needed} needed."
        if not show_table("stage", name, report.rows(), f"`{name}`: {count}"):
            return  # the server is away: nothing else would be taken either
        for artifact, link in manifest_links(spec, report).items():
            _show_link(name, artifact, link)
    show_markdown("summary", name, summary(spec, report, error))


def show_table(kind: str, name: str, rows: list[dict[str, Any]], description: str) -> bool:
    """A table artifact `<kind>-<name>`; whether the server has taken it."""
    key = artifact_key(kind, name)
    return written(lambda: create_table_artifact(key=key, table=rows, description=description)) is not None


def show_markdown(kind: str, name: str, text: str) -> None:
    """A Markdown artifact `<kind>-<name>`."""
    written(lambda: create_markdown_artifact(key=artifact_key(kind, name), markdown=text))


def written(write: Callable[[], _Written], again: tuple[float, ...] = _AGAIN_SECONDS) -> _Written | None:
    """What `write` answers, tried `again` after so many seconds; `None` when the server does not take it."""
    for wait in (*again, None):
        try:
            return write()
        except Exception as error:  # noqa: BLE001 (whatever Prefect's client raises; the files count, not the page)
            if wait is None or _is_refusal(error):
                _log.warning("cannot write to the page of the run: %s", error)
                return None
            time.sleep(wait)
    return None


def _is_refusal(error: Exception) -> bool:
    """Whether the server has answered, and would answer the same again."""
    return isinstance(error, httpx.HTTPStatusError) and not error.response.is_server_error


def _show_link(name: str, artifact: str, link: str) -> None:
    written(
        lambda: create_link_artifact(
            link=link,
            link_text=f"Manifest of {artifact}",
            key=artifact_key("manifest", name, artifact),
            description=f"Every file of `{artifact}`, with its digests.",
        )
    )
