"""What the nodes' ledgers tell, on one page, as Markdown with the picture in it."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from llm_prefetch.cluster.ledgers import ClusterLedger
from llm_prefetch.progress import size
from llm_prefetch.waterfall import picture

_DRAWN = 40
"""A page of a run is kept by a server: some ten kilobytes will do."""


def ledger_page(found: ClusterLedger, deployment: str, hours: float) -> str:
    """The page: counts, the nodes that did not answer, and the newest starts as bars."""
    counts = found.counts()
    of = f"`{deployment}`" if deployment else "all deployments"
    parts = [
        f"## Starts and stagings of {of} in the last {hours:g} h",
        "\n".join([
            "| | |",
            "|---|---|",
            f"| starts | {counts['starts']} |",
            f"| verdicts | {_counted(counts['verdicts'])} |",
            f"| rungs | {_counted(counts['rungs'])} |",
            f"| median start | {_seconds(counts['median_seconds'])} |",
            f"| slowest start | {_seconds(counts['slowest_seconds'])} |",
            f"| stagings | {counts['stagings']} |",
            f"| fetched | {size(counts['fetched_bytes'])} |",
            f"| reused | {size(counts['reused_bytes'])} |",
        ]),
    ]  # fmt: skip
    if found.failed:
        parts.append("\n".join(["**Nodes that did not answer**", "", *(
            f"- `{node.address}`: {' '.join(str(error).split())}" for node, error in found.failed
        )]))  # fmt: skip
    if found.left_out:
        parts.append(f"{found.left_out} older rows are left out; ask for fewer hours, or one deployment.")
    drawn = found.starts[:_DRAWN]
    if drawn:
        image = base64.b64encode(picture(drawn).encode()).decode()
        parts.append(
            f"### The newest {len(drawn)} starts\n\n![where the time of each start went](data:image/svg+xml;base64,{image})"
        )
    return "\n\n".join(parts) + "\n"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name or 'none'}: {count}" for name, count in counts.items()) or "none"


def _seconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds:.1f} s"
