"""The figures as one picture: SVG, written by hand, readable on light and dark pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.results import ResultLine, ResultSheet

_WIDTH, _PANEL, _BAR, _GAP = 960, 460, 20, 40
_OURS, _OTHERS, _INK, _FAINT = "#d9480f", "#7a8ca5", "#6b7280", "#9ca3af"
_LINES = ("#d9480f", "#4c78a8", "#54a24b", "#8e6bbf")
_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" '
    'font-family="system-ui, sans-serif" font-size="12" fill="{ink}">'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    label: str
    value: float
    ours: bool


def draw(sheets: Sequence[ResultSheet]) -> str:
    """Bars for drains and latencies, lines for the rate curve; a panel whose figures are missing is left out."""
    by_name = {sheet.name: sheet for sheet in sheets}
    panels: list[tuple[str, int, str]] = []
    for name, title in (
        ("drain", "Drain, no-op handler: messages per second"),
        ("drain-5ms-20k", "Drain, 5 ms stage, 20,000 keys: messages per second"),
    ):
        if name in by_name:
            panels += _bars(title, [_bar(line, "per_second") for line in by_name[name].lines], ",.0f")
    if "offered" in by_name:
        lines = by_name["offered"].lines
        for rate in dict.fromkeys(line.at for line in lines if line.at):
            at = [line for line in lines if line.at == rate and not line.notes]
            panels += _bars(
                f"p99 at {rate:,.0f} messages per second: ms", [_bar(x, "p99") for x in at], ",.1f"
            )
    if "chat" in by_name:
        kept = [_bar(line, "p99") for line in by_name["chat"].lines if not line.notes]
        panels += _bars("Chat pipeline, 2,000/s, 10% fail at first: p99, ms", kept, ",.0f")
    if "curve" in by_name:
        panels += _curve("Latency by rate, ms: p50 (dashed) and p99", by_name["curve"].lines)
    return _page(panels)


def _page(panels: Sequence[tuple[str, int, str]]) -> str:
    body, y = [], 0
    for first in range(0, len(panels), 2):
        row = panels[first : first + 2]
        for column, (title, _, inner) in enumerate(row):
            x = column * (_PANEL + _GAP)
            heading = f'<text x="0" y="16" font-weight="600" font-size="13">{escape(title)}</text>'
            body.append(f'<g transform="translate({x} {y})">{heading}{inner}</g>')
        y += max(height for _, height, _ in row) + 24
    return "\n".join([_HEAD.format(w=_WIDTH, h=max(y, 20), ink=_INK), *body, "</svg>\n"])


def _bar(line: ResultLine, figure: str) -> _Bar | None:
    spread = line.spread(figure)
    label = line.label if line.at is None else line.label.removesuffix(f", {line.at:,.0f}/s")
    return None if spread is None else _Bar(label=label, value=spread.median, ours=line.peer == "keylane")


def _bars(title: str, found: Sequence[_Bar | None], form: str) -> list[tuple[str, int, str]]:
    """Lengths are logarithms, because the peers differ by orders of magnitude."""
    bars = [bar for bar in found if bar is not None and bar.value > 0]
    if not bars:
        return []
    low = 10 ** math.floor(math.log10(min(bar.value for bar in bars)) - 0.3)
    high = max(bar.value for bar in bars) * 1.05
    made, y, room = [], 28, _PANEL - 250
    for bar in bars:
        length = room * math.log(bar.value / low) / math.log(high / low)
        weight = ' font-weight="600"' if bar.ours else ""
        colour = _OURS if bar.ours else _OTHERS
        made.append(
            f'<text x="172" y="{y + 14}" text-anchor="end"{weight}>{escape(bar.label.partition(",")[0])}</text>'
            f'<rect x="180" y="{y}" width="{length:.1f}" height="{_BAR - 4}" rx="2" fill="{colour}"/>'
            f'<text x="{186 + length:.1f}" y="{y + 14}"{weight}>{bar.value:{form}}</text>'
        )
        y += _BAR
    made.append(f'<text x="180" y="{y + 12}" fill="{_FAINT}" font-size="10">logarithmic</text>')
    return [(title, y + 16, "".join(made))]


def _curve(title: str, lines: Sequence[ResultLine]) -> list[tuple[str, int, str]]:
    points = {
        figure: [
            (line, float(line.at), spread.median)
            for line in lines
            if line.at and (spread := line.spread(figure))
        ]
        for figure in ("p50", "p99")
    }
    every = [*points["p50"], *points["p99"]]
    if not every:
        return []
    left, top, width, height = 44, 28, _PANEL - 150, 190
    x_low, x_high = min(x for _, x, _ in every), max(x for _, x, _ in every) * 1.01
    y_low, y_high = min(y for _, _, y in every) * 0.8, max(y for _, _, y in every) * 1.2

    def across(x: float) -> float:
        return left + width * math.log(x / x_low) / math.log(x_high / x_low)

    def down(y: float) -> float:
        return top + height * (1 - math.log(y / y_low) / math.log(y_high / y_low))

    made = []
    for exponent in range(math.ceil(math.log10(y_low)), math.floor(math.log10(y_high)) + 1):
        y = down(10**exponent)
        made.append(
            f'<line x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_FAINT}" stroke-opacity=".4"/>'
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10**exponent:,g}</text>'
        )
    for x in dict.fromkeys(x for _, x, _ in every):
        label = f"{x / 1000:g}k" if x >= 1000 else f"{x:g}"
        made.append(
            f'<text x="{across(x):.1f}" y="{top + height + 16}" text-anchor="middle" font-size="10">{label}</text>'
        )
    for number, peer in enumerate(dict.fromkeys(line.peer for line in lines)):
        colour = _LINES[number % len(_LINES)]
        for figure, dash in (("p99", ""), ("p50", ' stroke-dasharray="4 3"')):
            track = sorted((x, y) for line, x, y in points[figure] if line.peer == peer)
            path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in track)
            made.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        made.append(
            f'<text x="{left + width + 8}" y="{top + 12 + 16 * number}" fill="{colour}">{escape(peer)}</text>'
        )
    return [(title, top + height + 24, "".join(made))]
