# SPDX-License-Identifier: Apache-2.0
"""Draws a plan's array as SVG: tiles with their kernels and how full their memory is, fifos as lines between them.

Columns from left to right, the shim at the bottom, as in AMD's pictures. A line leaves its producer at a dot and ends
at an arrow in each consumer. Lines run in the gaps between tiles, a lane for each *family* of fifos: those whose names
differ in numbers only.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from flownpu.aie.plan.data import Tile
from flownpu.aie.plan.usage import tile_uses

if TYPE_CHECKING:
    from flownpu.aie.plan.data import Fifo, Plan
    from flownpu.aie.plan.limits import Limits
    from flownpu.aie.plan.usage import TileUse

_WIDTH, _HEIGHT = 118, 66  # a tile's
_LANE, _MARGIN, _LINE = 5, 10, 12  # distances between lanes, around the drawing, between lines of text
_FILLS = {"compute": "#eef3fb", "memory": "#fdf3e1", "shim": "#eeeeee"}
_INK, _BAR, _EMPTY = "#333333", "#7a93b8", "#d5dbe4"
# Colours that colour-blind readers can distinguish (Okabe and Ito); further families have them dashed, then dotted.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f7f7f")
_DASHES = ("", "4 2", "1 2")
_SHOWN_KERNELS = 4


def family(name: str) -> str:
    """A fifo's name with `*` for each number, which its family shares: "w_3_0_split2" gives "w_*_*_split*"."""
    return re.sub(r"\d+", "*", name)


def draw(plan: Plan, limits: Limits) -> str:
    """The SVG's text; the plan's structure must be right (`check.structure`)."""
    return _Drawing(plan, limits).text()


def _touches(fifos: list[Fifo], column: int) -> bool:
    return any(end.tile.column == column for fifo in fifos for end in (fifo.producer, *fifo.consumers))


def _crosses(fifo: Fifo) -> bool:
    return any(end.tile.column != fifo.producer.tile.column for end in fifo.consumers)


class _Drawing:
    def __init__(self, plan: Plan, limits: Limits) -> None:
        self.plan, self.limits = plan, limits
        self.families: dict[str, list[Fifo]] = {}
        for fifo in plan.array.fifos:
            self.families.setdefault(family(fifo.name), []).append(fifo)
        # Lanes above a row of tiles are for families that cross columns, lanes beside a column for those that touch it.
        crossing = [name for name, fifos in self.families.items() if any(map(_crosses, fifos))]
        self.lanes_above = {name: number for number, name in enumerate(crossing)}
        self.lanes = [
            {name: number for number, name in enumerate(n for n, f in self.families.items() if _touches(f, column))}
            for column in range(limits.columns)
        ]
        self.gap, self.gap_above = (max(map(len, self.lanes)) + 2) * _LANE, (len(crossing) + 2) * _LANE
        self.top = _MARGIN + _LINE
        width = 2 * _MARGIN + limits.columns * (_WIDTH + self.gap)
        bottom = self.top + limits.rows * (_HEIGHT + self.gap_above)
        height = bottom + (len(self.families) + 1) * _LINE + 2 * _MARGIN
        self.root = ET.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "viewBox": f"0 0 {width} {height}",
                "width": str(width),
                "height": str(height),
                "font-family": "sans-serif",
                "font-size": "9",
                "fill": _INK,
            },
        )
        self._add("rect", x=0, y=0, width=width, height=height, fill="#ffffff")
        self.bottom = bottom

    def text(self) -> str:
        plan, limits = self.plan, self.limits
        self._text(_MARGIN, _MARGIN + _LINE, f"{plan.name} on {limits.name}", size=13)
        used = {use.tile: use for use in tile_uses(plan, limits)}
        for column in range(limits.columns):
            for row in range(limits.rows):
                tile = Tile(column, row)
                self._tile(tile, used.get(tile))
        for number, (name, fifos) in enumerate(self.families.items()):
            self._family(number, name, fifos)
        ET.indent(self.root, " ")
        return ET.tostring(self.root, encoding="unicode") + "\n"

    # --- Tiles --------------------------------------------------------------------------------------------------------

    def _corner(self, tile: Tile) -> tuple[int, int]:
        """The upper left corner of a tile."""
        x = _MARGIN + tile.column * (_WIDTH + self.gap)
        return x, self.top + (self.limits.rows - 1 - tile.row) * (_HEIGHT + self.gap_above) + self.gap_above

    def _tile(self, tile: Tile, use: TileUse | None) -> None:
        kind, (x, y) = self.limits.kind(tile.column, tile.row), self._corner(tile)
        fill = _FILLS[kind] if use else "none"
        self._add("rect", x=x, y=y, width=_WIDTH, height=_HEIGHT, rx=3, fill=fill, stroke="#9aa5b1")
        self._text(x + 4, y + _LINE - 2, f"{kind} {tile}", fill=_INK if use else "#9aa5b1")
        if use is None:
            return
        names = list(use.kernels)
        if len(names) > _SHOWN_KERNELS:
            names[_SHOWN_KERNELS - 1 :] = [f"and {len(names) - _SHOWN_KERNELS + 1} more"]
        for number, name in enumerate(names):
            self._text(x + 4, y + (number + 2) * (_LINE - 2), name, size=8)
        if kind != "compute":
            channels = f"DMA in {use.input_channels}, out {use.output_channels}"
            self._text(x + 4, y + 2 * _LINE, channels, size=8)
            self._text(x + 4, y + 3 * _LINE, f"descriptors {use.descriptors}", size=8)
        if use.memory.available:
            share = min(1.0, use.memory.used / use.memory.available)
            bar = {"x": x + 4, "y": y + _HEIGHT - 8, "height": 5}
            self._add("rect", **bar, width=_WIDTH - 64, fill=_EMPTY)
            self._add("rect", **bar, width=round(share * (_WIDTH - 64), 1), fill=_BAR)
            text = f"{use.memory.used / 1024:.0f}/{use.memory.available // 1024} KB"
            self._text(x + _WIDTH - 4, y + _HEIGHT - 3, text, size=8, anchor="end")

    # --- Fifos --------------------------------------------------------------------------------------------------------

    def _family(self, number: int, name: str, fifos: list[Fifo]) -> None:
        """Draw a family's lines with their ends, and its line of the legend."""
        colour = _COLOURS[number % len(_COLOURS)]
        style: dict[str, object] = {"stroke": colour, "fill": "none"}
        if dash := _DASHES[number // len(_COLOURS) % len(_DASHES)]:
            style["stroke-dasharray"] = dash
        ends: list[str] = []
        for fifo in fifos:
            paths = [self._path(fifo.producer.tile, end.tile, name) for end in fifo.consumers]
            text = " ".join("M" + "L".join(f"{x} {y}" for x, y in path) for path in paths)
            line = self._add("path", d=text, **style)
            ET.SubElement(line, "title").text = f"{fifo.name}: {fifo.type}"
            x, y = paths[0][0]
            ends.append(f"M{x - 2} {y}a2 2 0 1 1 4 0a2 2 0 1 1 -4 0z")
            ends += [f"M{path[-1][0]} {path[-1][1]}l4 -2.5v5z" for path in paths]
        self._add("path", d="".join(ends), fill=colour)
        y = self.bottom + (number + 2) * _LINE
        self._add("path", d=f"M{_MARGIN} {y - 3}h22", **style, **{"stroke-width": 2})
        all_ends = (fifos[0].producer, *fifos[0].consumers)
        depths = "/".join(map(str, dict.fromkeys(end.depth for end in all_ends)))
        count = f" ({len(fifos)})" if len(fifos) > 1 else ""
        self._text(_MARGIN + 28, y, f"{name}{count}: objects of {fifos[0].type}, depth {depths}")

    def _port(self, tile: Tile, name: str) -> tuple[int, int, int]:
        """The points where a family's lines meet a tile, on its right side, and the place of their lane."""
        x, y = self._corner(tile)
        lanes = self.lanes[tile.column]
        x += _WIDTH
        return x, y + 4 + lanes[name] * (_HEIGHT - 8) // len(lanes), x + (lanes[name] + 1) * _LANE

    def _path(self, source: Tile, target: Tile, name: str) -> list[tuple[int, int]]:
        """The lane right of the source; to another column, the lane above it as well; then the target's right side."""
        x0, y0, lane0 = self._port(source, name)
        x1, y1, lane1 = self._port(target, name)
        if source.column == target.column:
            return [(x0, y0), (lane0, y0), (lane0, y1), (x1, y1)]
        above = self._corner(source)[1] - (self.lanes_above[name] + 1) * _LANE
        return [(x0, y0), (lane0, y0), (lane0, above), (lane1, above), (lane1, y1), (x1, y1)]

    # --- Elements -----------------------------------------------------------------------------------------------------

    def _add(self, tag: str, /, **attributes: object) -> ET.Element:
        return ET.SubElement(self.root, tag, {name: str(value) for name, value in attributes.items()})

    def _text(self, x: float, y: float, text: str, *, size: int = 9, anchor: str = "start", fill: str = _INK) -> None:
        style: dict[str, object] = {"fill": fill, "font-size": size, "text-anchor": anchor}
        usual = {"fill": _INK, "font-size": 9, "text-anchor": "start"}
        self._add("text", x=x, y=y, **{name: style[name] for name in style if style[name] != usual[name]}).text = text
