"""The results as tables: on the terminal, and between the markers of docs/explanation/measurements.md.

Each group of a benchmark keeps its results in a file of its own, so that one can be measured again without the others:
what is compared was measured side by side within its group.

`python -m tests.bench.report [FOLDER]` writes page and plot from what earlier runs kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench import plot, starts, table
from tests.bench.table import GB, Grid, Row, figure
from tests.bench.throughput import Sample, by_corpus, middle

if TYPE_CHECKING:
    from rich.console import Console

_REPOSITORY = Path(__file__).parents[2]
KEPT = _REPOSITORY / ".bench" / "results"
PAGE = _REPOSITORY / "docs" / "explanation" / "measurements.md"
_BEGIN, _END = "<!-- make bench -->\n", "<!-- end of make bench -->\n"


@dataclass(frozen=True)
class Results:
    """What one group has measured, and on what machine."""

    group: str
    day: str
    machine: dict[str, str]
    rows: list[Row]
    samples: list[Sample] = field(default_factory=list)
    starts: list[starts.Sample] = field(default_factory=list)


def keep(results: Results, folder: Path) -> None:
    """Write one group's results down, in place of its last ones."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{results.group}.json").write_text(json.dumps(asdict(results), indent=1))


def kept(folder: Path, order: Sequence[str]) -> list[Results]:
    """What was measured last of each group."""
    paths = [folder / f"{group}.json" for group in order]
    return [_read(json.loads(path.read_text())) for path in paths if path.exists()]


def show(console: Console, found: Sequence[Results]) -> None:
    """Print for people."""
    for name, text in found[-1].machine.items() if found else ():
        console.print(f"{name:9} {text}", highlight=False)
    for title, grid in _grids(found):
        table.show(console, f"\n{title}", grid)
    table.show(console, "\nWith targets", table.grid(row for one in found for row in one.rows))


def write(found: Sequence[Results]) -> None:
    """Write the tables into the page, and the plot beside it."""
    machine = "\n".join(f"{name:9} {text}" for name, text in found[-1].machine.items() if name != "load")
    measured = "; ".join(f"{one.group} {one.day}, load {one.machine.get('load', '?')}" for one in found)
    parts = [f"```text\n{machine}\n```\n", f"Groups, with the day and the load before: {measured}.\n"]
    samples = [sample for one in found for sample in one.samples]
    if samples:
        parts.append("![GB/s of each client on each corpus](../images/throughput.svg)\n")
    rows = (row for one in found for row in one.rows)
    parts.append(f"## Targets\n\n{table.markdown(table.grid(rows))}\n")
    parts += [f"### {title}\n\n{table.markdown(grid)}\n" for title, grid in _grids(found)]
    text = PAGE.read_text()
    head, _, rest = text.partition(_BEGIN)
    tail = rest.partition(_END)[2]
    body = "\n".join(parts)
    PAGE.write_text(f"{head}{_BEGIN}\n{body}\n{_END}{tail}")
    if samples:
        plot.write(samples)


def _read(data: dict[str, Any]) -> Results:
    """The objects that the data stand for."""
    return Results(
        data["group"],
        data["day"],
        data["machine"],
        [Row(**row) for row in data["rows"]],
        [Sample(**sample) for sample in data["samples"]],
        [starts.Sample(**sample) for sample in data["starts"]],
    )


def _grids(found: Sequence[Results]) -> list[tuple[str, Grid]]:
    """Clients side by side, and where starts spend their time, as far as they were measured."""
    samples = [sample for one in found for sample in one.samples]
    started = [sample for one in found for sample in one.starts]
    grids = _side_by_side(samples)
    if started:
        grids.append(("Where a start spends its time, medians", starts.breakdown(started)))
    return grids


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
    from tests.bench.__main__ import GROUPS

    write(kept(Path(sys.argv[1]) if sys.argv[1:] else KEPT, GROUPS))
