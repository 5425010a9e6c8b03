"""Starts as a picture: an HTML file that needs nothing else, in the colours that the reader's screen asks for.

Or as one SVG, with a bar for each start, for pages that take nothing but an image.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

from llm_prefetch.timeline import Phase, Start, exactly

_STYLE = """
:root { color-scheme: light dark; --line: #d8dee6; --quiet: #5b6673; --clock: #2f7d5b; --ray: #2c6cb8; --vllm: #b4581a }
@media (prefers-color-scheme: dark) {
  :root { --line: #39424d; --quiet: #9aa7b4; --clock: #57b98d; --ray: #6ea8ee; --vllm: #e79457 }
}
body { font: 14px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.3rem } h2 { font-size: 1rem; margin: 2rem 0 .2rem }
p { color: var(--quiet); margin: .2rem 0 .6rem; overflow-wrap: anywhere }
.row { display: grid; grid-template-columns: 13rem 1fr 9rem; gap: .8rem; align-items: center; padding: .1rem 0;
  border-bottom: 1px solid var(--line) }
.bar { position: relative; height: 1rem }
.bar i { position: absolute; top: .1rem; bottom: .1rem; min-width: 2px; border-radius: 2px }
.clock { background: var(--clock) } .ray { background: var(--ray) } .vllm { background: var(--vllm) }
.seconds { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.key b { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin: 0 .3rem 0 1rem }
@media (max-width: 40rem) { .row { grid-template-columns: 7rem 1fr 6rem; gap: .4rem; font-size: 12px } }
"""
_PHASE_COLOURS = (
    "#2f7d5b", "#2c6cb8", "#b4581a", "#7a4fa3", "#a8325e", "#5f7d2f", "#1f8a8a", "#8a6d1f", "#5b6673", "#d08a5b",
    "#6fa8dc", "#93c47d", "#c27ba0", "#b7b7b7", "#3d3d3d",
)  # fmt: skip
_BAR, _LABEL, _SCALE, _SECONDS = 22, 330, 560, 90
_KEY = (
    '<p class="key">Measured by <b class="clock"></b>our own clock <b class="ray"></b>lines of Ray\'s log '
    '<b class="vllm"></b>lines of vLLM\'s log (to a second)</p>'
)


def draw(starts: Sequence[Start]) -> str:
    """The page: each start with a bar for each phase, all on one scale, so that their lengths can be compared."""
    first = min((phase.at for start in starts for phase in start.phases), default=0.0)
    last = max((_end(phase) for start in starts for phase in start.phases), default=0.0)
    sections = "\n".join(_section(start, first, max(last - first, 1e-9)) for start in starts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Starts of replicas</title><style>{_STYLE}</style></head>\n<body>\n"
        "<h1>Where the time of a start went</h1>\n"
        f"{_KEY}\n{sections}\n</body></html>\n"
    )


def picture(starts: Sequence[Start]) -> str:
    """An SVG: each start is one bar of its phases, all on one scale, and says whose it is and how long it took."""
    names = list(dict.fromkeys(phase.name for start in starts for phase in start.phases))
    colours = {name: _PHASE_COLOURS[number % len(_PHASE_COLOURS)] for number, name in enumerate(names)}
    first = min((phase.at for start in starts for phase in start.phases), default=0.0)
    last = max((_end(phase) for start in starts for phase in start.phases), default=0.0)
    span = max(last - first, 1e-9)
    parts = []
    for number, start in enumerate(starts):
        y = number * _BAR
        told = "?" if start.seconds is None else f"{start.seconds:.1f} s"
        label = " ".join(filter(None, [start.node, start.deployment, start.rung or start.verdict]))
        parts.append(f'<text x="0" y="{y + 15}">{escape(label[:46])}</text>')
        parts += [
            _block(phase, y, first, span, colours[phase.name]) for phase in start.phases if phase.seconds
        ]
        parts.append(f'<text x="{_LABEL + _SCALE + 8}" y="{y + 15}">{escape(told)}</text>')
    y = len(starts) * _BAR + 8
    for number, (name, colour) in enumerate(colours.items()):
        x, row = 160 * (number % 6), y + _BAR * (number // 6)
        parts.append(f'<rect x="{x}" y="{row + 4}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="{row + 15}">{escape(name[:20])}</text>')
    width, height = _LABEL + _SCALE + _SECONDS, y + _BAR * (1 + len(colours) // 6)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>'
    )


def _block(phase: Phase, y: int, first: float, span: float, colour: str) -> str:
    x = _LABEL + _SCALE * (phase.at - first) / span
    width = max(1.0, _SCALE * (phase.seconds or 0.0) / span)
    return (
        f'<rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{_BAR - 6}" fill="{colour}">'
        f"<title>{escape(phase.name)}: {escape(exactly(phase))}</title></rect>"
    )


def _section(start: Start, first: float, span: float) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.at))
    took = "" if start.seconds is None else f", {start.seconds:.1f} s"
    rows = "\n".join(_row(phase, first, span) for phase in start.phases)
    return (
        f"<h2>{escape(' on '.join(filter(None, [start.deployment, start.node])))}, {when}: {escape(_first_line(start.outcome))}{took}</h2>\n"
        f"<p>start {escape(start.id)}, {escape(start.verdict)}, by {escape(start.rung)}, {escape(start.replica)}</p>\n{rows}"
    )


def _row(phase: Phase, first: float, span: float) -> str:
    left, width = 100 * (phase.at - first) / span, 100 * (phase.seconds or 0.0) / span
    colour = phase.source.partition(" ")[0]
    bar = (
        ""
        if phase.seconds is None
        else f'<i class="{escape(colour)}" style="left:{left:.3f}%;width:{width:.3f}%"></i>'
    )
    told = escape(exactly(phase))
    return (
        f'<div class="row" title="{escape(phase.name)}: from {phase.at:.3f} s, {told}, {escape(phase.source)}">'
        f'<span>{escape(phase.name)}</span><span class="bar">{bar}</span><span class="seconds">{told}</span></div>'
    )


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _end(phase: Phase) -> float:
    return phase.at + (phase.seconds or 0.0)
