# SPDX-License-Identifier: Apache-2.0
"""Draws tokens a second against the context's length, as SVG: decode rates of all engines, and the roof."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flownpu.benchmark_report import Report

__all__ = ["draw", "plot"]

Points = list[tuple[float, float]]

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 150, 30, 50
# Okabe and Ito's colours, which the colour-blind can tell apart.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00")
_ROOF_COLOUR = "#777777"


def plot(report: Report) -> str:
    """The drawing. A decode rate stands where its generation begins; the x axis is logarithmic."""
    cases = sorted(report.found.cases, key=lambda case: case.context)
    curves: dict[str, Points] = {}
    for name, measured in report.found.engines.items():
        rates = ((case.context, measured.decode_rate(case)) for case in cases)
        curves[name] = [(context, rate.median) for context, rate in rates if rate]
    roof = [(float(case.context), limit) for case in cases if (limit := report.roof(case))]
    return draw("decode, tokens/s", curves, roof)


def draw(title: str, curves: dict[str, Points], roof: Points) -> str:
    """Curves of (tokens in the context, value), and memory's roof over them; empty ones are left out."""
    curves = {name: points for name, points in curves.items() if points}
    every = [point for points in (*curves.values(), roof) for point in points]
    frame = _Frame(min(x for x, _ in every), max(x for x, _ in every), max(y for _, y in every))
    lines = frame.axes(title, sorted({round(x) for x, _ in every}))
    if roof:
        lines += frame.curve("memory roof", roof, _ROOF_COLOUR, dashed=True)
    for index, (name, points) in enumerate(curves.items()):
        lines += frame.curve(name, points, _COLOURS[index % len(_COLOURS)])
    lines += frame.legend([*curves, *(["memory roof"] if roof else [])])
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    style = 'font-family="sans-serif" font-size="12"'
    background = f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', background, *lines, "</svg>", ""])


class _Frame:
    """Maps contexts and rates to the drawing."""

    def __init__(self, least: float, most: float, highest: float) -> None:
        self._least, self._most = math.log(least), math.log(most)
        # A round step of which at most 8 fit below the highest rate.
        power = 10.0 ** math.floor(math.log10(highest / 8))
        self._step = next(power * factor for factor in (1, 2, 5, 10) if highest / (power * factor) <= 8)
        self._top = self._step * math.ceil(highest / self._step)

    def x(self, context: float) -> float:
        width = _WIDTH - _LEFT - _RIGHT
        share = (math.log(context) - self._least) / (self._most - self._least) if self._most > self._least else 0.5
        return _LEFT + width * share

    def y(self, rate: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * rate / self._top

    def axes(self, title: str, contexts: Iterable[int]) -> list[str]:
        right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        lines = []
        for i in range(round(self._top / self._step) + 1):
            rate = i * self._step
            lines.append(f'<path d="M{_LEFT} {self.y(rate):.1f}H{right}" stroke="#ddd"/>')
            lines.append(f'<text x="{_LEFT - 8}" y="{self.y(rate) + 4:.1f}" text-anchor="end">{rate:g}</text>')
        lines += [
            f'<text x="{self.x(context):.1f}" y="{bottom + 18}" text-anchor="middle">{context}</text>'
            for context in contexts
        ]
        lines.append(f'<text x="{_LEFT}" y="{_TOP - 12}">{escape(title)}</text>')
        lines.append(f'<text x="{right}" y="{bottom + 38}" text-anchor="end">tokens in the context</text>')
        return lines

    def curve(self, name: str, points: Points, colour: str, *, dashed: bool = False) -> list[str]:
        path = " ".join(f"{self.x(context):.1f},{self.y(rate):.1f}" for context, rate in points)
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        lines = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']
        lines += [
            f'<circle cx="{self.x(context):.1f}" cy="{self.y(rate):.1f}" r="3" fill="{colour}">'
            f"<title>{escape(name)}: {rate:.4g} at {context:g} tokens</title></circle>"
            for context, rate in points
        ]
        return lines

    def legend(self, names: list[str]) -> list[str]:
        lines = []
        for index, name in enumerate(names):
            colour = _ROOF_COLOUR if name == "memory roof" else _COLOURS[index % len(_COLOURS)]
            x, y = _WIDTH - _RIGHT + 16, _TOP + 20 * index
            lines.append(f'<path d="M{x} {y}h20" stroke="{colour}" stroke-width="2"/>')
            lines.append(f'<text x="{x + 26}" y="{y + 4}">{escape(name)}</text>')
        return lines
