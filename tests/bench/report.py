"""The results as tables: on the terminal, and between the markers of docs/explanation/measurements.md.

`python -m tests.bench.report [RESULTS]` writes page and plot from what an earlier run kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench import plot, starts, table
from tests.bench.table import GB, Grid, Row, figure
from tests.bench.throughput import Sample, by_corpus, middle

if TYPE_CHECKING:
    from rich.console import Console

Results = dict[str, Any]
"""What `results.json` holds: `failed`, `machine`, `quick`, `rows`, `samples` and `starts`."""
_REPOSITORY = Path(__file__).parents[2]
PAGE = _REPOSITORY / "docs" / "explanation" / "measurements.md"
_BEGIN, _END = "<!-- make bench -->\n", "<!-- end of make bench -->\n"


def show(console: Console, results: Results) -> None:
    """Print for people."""
    for name, text in results["machine"].items():
        console.print(f"{name:9} {text}", highlight=False)
    rows, samples = read(results)
    for title, grid in [*_side_by_side(samples), *_starts(results)]:
        table.show(console, f"\n{title}", grid)
    table.show(console, "\nWith targets", table.grid(rows))


def write(results: Results) -> None:
    """Write the tables into the page, and the plot beside it."""
    rows, samples = read(results)
    machine = "\n".join(f"{name:9} {text}" for name, text in results["machine"].items())
    parts = [f"```text\n{machine}\n```\n"]
    if samples:
        parts.append("![GB/s of each client on each corpus](../images/throughput.svg)\n")
    parts.append(f"## Targets\n\n{table.markdown(table.grid(rows))}\n")
    for title, grid in [*_side_by_side(samples), *_starts(results)]:
        parts.append(f"### {title}\n\n{table.markdown(grid)}\n")
    text = PAGE.read_text()
    head, _, rest = text.partition(_BEGIN)
    tail = rest.partition(_END)[2]
    body = "\n".join(parts)
    PAGE.write_text(f"{head}{_BEGIN}\n{body}\n{_END}{tail}")
    if samples:
        plot.write(samples)


def read(results: Results) -> tuple[list[Row], list[Sample]]:
    """The objects that the data stand for."""
    return [Row(**row) for row in results["rows"]], [Sample(**sample) for sample in results["samples"]]


def _starts(results: Results) -> list[tuple[str, Grid]]:
    """Where starts of a replica spend their time; none in results that have no starts."""
    samples = [starts.Sample(**sample) for sample in results.get("starts", ())]
    return [("Where a start spends its time, medians", starts.breakdown(samples))] if samples else []


def _side_by_side(samples: Sequence[Sample]) -> list[tuple[str, Grid]]:
    """One table for each corpus and door, a line for each client."""
    header = ("client", "GB/s", "range", "with a sync", "CPU s/GB", "peak MB", "runs")
    tables: list[tuple[str, Grid]] = []
    for (corpus, door), clients in by_corpus(samples).items():
        lines = [
            (
                name,
                figure(middle(those, lambda s: s.rate / GB)),
                f"{figure(min(s.rate for s in those) / GB)} to {figure(max(s.rate for s in those) / GB)}",
                figure(middle(those, lambda s: s.bytes / s.durable / GB)),
                figure(middle(those, lambda s: s.cpu * GB / s.bytes)),
                figure(middle(those, lambda s: s.peak / 1e6)),
                str(len(those)),
            )
            for name, those in clients.items()
        ]
        tables.append((f"{corpus}, {door}", (header, sorted(lines, key=lambda line: -float(line[1])))))
    return tables


if __name__ == "__main__":
    write(
        json.loads(Path(sys.argv[1] if sys.argv[1:] else _REPOSITORY / ".bench" / "results.json").read_text())
    )
