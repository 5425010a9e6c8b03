"""The page of a run over many nodes: a table of them, a summary, and what the log says. Nothing where nothing was done."""

from __future__ import annotations

from prefect.logging import get_run_logger

from flows.run_page import show_markdown, show_table
from llm_prefetch.cluster import Outcome


def show_outcome(kind: str, deployment: str, outcome: Outcome) -> None:
    """Artifacts `<kind>-<deployment>` and `<kind>-summary-<deployment>`, if anything was done or is wrong."""
    log = get_run_logger()
    if outcome.note:
        log.warning("%s", outcome.note)
    if not outcome.changed and outcome.refusal is None:
        log.info("%s is ready on %d nodes; nothing to do", deployment, outcome.ready_nodes)
        return
    for node in outcome.nodes:
        if node.did or not node.ready:
            log.info(
                "%s: %s",
                node.node.address,
                "; ".join(filter(None, [str(node.verdict), node.did, node.reason])),
            )
    count = (
        f"`{deployment}`: {outcome.ready_nodes} of {len(outcome.nodes)} nodes ready, {outcome.needed} needed."
    )
    show_table(kind, deployment, outcome.rows(), count)
    show_markdown(f"{kind}-summary", deployment, outcome.markdown(f"{kind}: `{deployment}`"))
