"""The throughput of each client on each corpus, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from tests.bench.peers import DISK, OURS
from tests.bench.table import GB, figure
from tests.bench.throughput import Sample, by_corpus, middle

_REPOSITORY = Path(__file__).parents[2]
PICTURE = _REPOSITORY / "docs" / "images" / "throughput.svg"
_LEFT, _BAR, _PANEL, _LINE, _HEAD = 150, 260, 480, 20, 44
"""Widths of the names, of the longest bar and of a panel; heights of a line and of a panel's title."""
_STYLE = """
  .h { font-weight: bold } .s { fill: #555; font-size: 12px } .n { text-anchor: end }
  .ours { fill: #3a6ea5 } .peer { fill: #b9c4cf }
"""


def write(samples: Sequence[Sample]) -> None:
    """Draw one panel for each corpus and door, plain on the left, TLS on the right; one scale for each corpus."""
    groups = by_corpus(samples)
    doors = list(dict.fromkeys(door for _, door in groups))
    parts, y = [], 50
    for corpus in dict.fromkeys(corpus for corpus, _ in groups):
        panels = {door: _rates(groups[corpus, door]) for door in doors if (corpus, door) in groups}
        longest = max(rate for rates, _ in panels.values() for rate in rates.values())
        for column, (door, (rates, disk)) in enumerate(panels.items()):
            x = 20 + column * _PANEL
            parts.append(
                f'<text x="{x}" y="{y}"><tspan class="h">{escape(corpus)}, {escape(door)}</tspan>'
                f'<tspan class="s" dx="10">disk alone {figure(disk / GB)}</tspan></text>'
            )
            for line, (name, rate) in enumerate(rates.items()):
                parts += _line(x, y + 8 + line * _LINE, name, rate, rate / longest)
        y += max(len(rates) for rates, _ in panels.values()) * _LINE + _HEAD
    width = 20 + len(doors) * _PANEL
    PICTURE.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y - 10}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">\n'
        f'<style>{_STYLE}</style>\n<rect width="{width}" height="{y - 10}" fill="#fafafa"/>\n'
        '<text class="s" x="20" y="24">GB/s, medians; longer is faster. Server, client and disk share one machine; '
        "each corpus has its own scale.</text>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _rates(clients: dict[str, list[Sample]]) -> tuple[dict[str, float], float]:
    """The median of each client, the fastest first, and that of the disk alone."""
    rates = {name: middle(those, lambda s: s.rate) for name, those in clients.items()}
    disk = rates.pop(DISK, 0.0)
    return dict(sorted(rates.items(), key=lambda pair: -pair[1])), disk


def _line(x: int, y: int, name: str, rate: float, part: float) -> list[str]:
    """Name, bar and number of one client."""
    length = max(1.0, part * _BAR)
    kind = "ours" if name == OURS else "peer"
    return [
        f'<text class="n{" h" * (name == OURS)}" x="{x + _LEFT - 8}" y="{y + 13}">{escape(name)}</text>',
        f'<rect class="{kind}" x="{x + _LEFT}" y="{y + 2}" width="{length:.1f}" height="{_LINE - 5}"/>',
        f'<text class="s" x="{x + _LEFT + length + 6:.1f}" y="{y + 13}">{figure(rate / GB)}</text>',
    ]
