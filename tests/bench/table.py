"""The lines of the benchmark, and how they look on a terminal and in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

GB = 10**9
_TARGET = re.compile(r"([<>]=) ([\d.]+) (.+)")
Grid = tuple[Sequence[str], Sequence[Sequence[str]]]
"""The names of the columns, and the rows."""


@dataclass(frozen=True)
class Row:
    """One line of the table: a median, the range it came from, and the target of the design, if it has one."""

    what: str
    value: float
    unit: str
    low: float
    high: float
    runs: int
    target: str = ""
    note: str = ""

    @property
    def verdict(self) -> str:
        """Whether the target is met, as the table says it."""
        match = _TARGET.fullmatch(self.target)
        if match is None:
            return ""
        met = self.value >= float(match[2]) if match[1] == ">=" else self.value <= float(match[2])
        return "met" if met else "missed"


def row(what: str, values: Sequence[float], unit: str, target: str = "", note: str = "") -> Row:
    """The median of `values`."""
    return Row(what, median(values), unit, min(values), max(values), len(values), target, note)


def ratio(what: str, ours: Sequence[float], theirs: Sequence[float], target: str = "") -> Row:
    """How many times `theirs` `ours` is, by medians; the range sets the worst against the best."""
    low, high = min(ours) / max(theirs), max(ours) / min(theirs)
    return Row(what, median(ours) / median(theirs), "x", low, high, min(len(ours), len(theirs)), target)


def grid(rows: Iterable[Row]) -> Grid:
    """The lines as text."""
    header = ("what", "median", "range", "runs", "target", "", "note")
    return header, [
        (
            row.what,
            f"{figure(row.value)} {row.unit}",
            f"{figure(row.low)} to {figure(row.high)}",
            str(row.runs),
            row.target,
            row.verdict,
            row.note,
        )
        for row in rows
    ]


def figure(value: float) -> str:
    """Three digits that count, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def show(console: Console, title: str, found: Grid) -> None:
    """Print for people."""
    header, rows = found
    table = Table(*header, title=title, title_justify="left", box=None, header_style="bold")
    for line in rows:
        table.add_row(*line)
    console.print(table)


def markdown(found: Grid) -> str:
    """The same for a page; a leading space is kept as one that does not collapse."""
    header, rows = found
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('  ', '&emsp;', 1) for cell in line)} |" for line in lines)
