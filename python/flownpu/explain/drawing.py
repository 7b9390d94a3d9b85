# SPDX-License-Identifier: Apache-2.0
"""Draws the placement of a model's nodes as SVG: a row for each layer, a box for consecutive nodes in one place.

A box's width is in proportion to its nodes; its tooltip counts them by operator. Colours are places; the legend counts
nodes.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from flownpu.explain.placement import CPU, DEVICE, FOLDED, HOST, by_layer

if TYPE_CHECKING:
    from flownpu.explain.overview import Explanation
    from flownpu.explain.placement import Place

# All in pixels.
_LABEL, _BOXES, _NOTE = 70, 640, 230  # widths of a row's parts
_ROW, _BOX, _MARGIN = 20, 15, 12  # heights of a row and of a box; the margin around everything
_LETTER = 5.2  # average width of a letter in text of 9 pixels
_INK = "#333333"
# Colours that colour-blind readers can tell apart (Okabe and Ito), lightened so that text on them can be read.
_COLOURS = {DEVICE: "#99c7e0", HOST: "#f5d999", CPU: "#eebf99", FOLDED: "#e4e4e4"}
_OTHER_PROVIDER = "#d9b3c9"
_NAMES = {
    HOST: "FlowNPU, on the device's host",
    CPU: "ONNX Runtime's CPU provider",
    FOLDED: "nothing to run: computed or merged before",
}


def draw(explanation: Explanation) -> str:
    """Draws an explanation; returns the SVG file's text."""
    rows = by_layer(explanation.placement.nodes)
    counts = explanation.placement.count()
    width = 2 * _MARGIN + _LABEL + _BOXES + _NOTE
    height = 2 * _MARGIN + (len(rows) + 1) * _ROW + (len(counts) + 1) * _ROW
    root = ET.Element(
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
    _add(root, "rect", x=0, y=0, width=width, height=height, fill="#ffffff")
    _text(root, _MARGIN, _MARGIN + 12, f"{explanation.path}: {sum(counts.values())} nodes", size=12)
    scale = _BOXES / max(len(nodes) for _, nodes in rows)
    notes = _notes(explanation)
    for number, (name, nodes) in enumerate(rows):
        y = _MARGIN + (number + 1) * _ROW
        _text(root, _MARGIN, y + _BOX - 4, name)
        _boxes(root, nodes, y, scale)
        _text(root, _MARGIN + _LABEL + _BOXES + 8, y + _BOX - 4, notes.get(name, ""))
    for number, (place, count) in enumerate(counts.items()):
        y = _MARGIN + (len(rows) + 2 + number) * _ROW
        _add(root, "rect", x=_MARGIN, y=y, width=22, height=_BOX, rx=2, fill=_colour(place))
        name = f"FlowNPU on {explanation.placement.device}" if place == DEVICE else _NAMES.get(place, place)
        _text(root, _MARGIN + 28, y + _BOX - 4, f"{name}: {count}")
    ET.indent(root, " ")
    return ET.tostring(root, encoding="unicode") + "\n"


def _boxes(root: ET.Element, nodes: list[Place], y: float, scale: float) -> None:
    x: float = _MARGIN + _LABEL
    for place, run in groupby(nodes, key=lambda node: node.place):
        operators = Counter(node.operator for node in run)
        count = operators.total()
        box = {"x": round(x, 1), "y": y, "width": round(count * scale, 1), "height": _BOX}
        drawn = _add(root, "rect", **box, rx=2, fill=_colour(place), stroke="#ffffff")
        listed = ", ".join(f"{name} ({times})" if times > 1 else name for name, times in operators.most_common())
        ET.SubElement(drawn, "title").text = f"{place}: {listed}"
        if (words := _fitting(operators, count * scale)) is not None:
            _text(root, x + 4, y + _BOX - 4, words)
        x += count * scale


def _fitting(operators: Counter[str], width: float) -> str | None:
    """The longest text about a box's nodes that fits its width; None if none does."""
    count = operators.total()
    listed = " ".join(name.rpartition(":")[2] for name in operators)
    for words in (f"{count}: {listed}", f"{count} nodes", str(count)):
        if len(words) * _LETTER + 8 <= width:
            return words
    return None


def _notes(explanation: Explanation) -> dict[str, str]:
    """The text beside each layer, by the layer's name: its attention, and how far it is folded."""
    notes: dict[str, str] = {}
    for number, attention in enumerate(explanation.attentions):
        levels = [level for level in (attention.prompt_level, attention.token_level) if level is not None]
        window = f", window {attention.window}" if attention.window > 0 else ""
        layer = number if attention.layer is None else attention.layer
        kind = attention.kind or "attention, not matched"
        notes[f"layer {layer}"] = f"{kind}{window}: folding level {' and '.join(map(str, dict.fromkeys(levels)))}"
    return notes


def _colour(place: str) -> str:
    return _COLOURS.get(place, _OTHER_PROVIDER)


def _add(root: ET.Element, tag: str, /, **attributes: object) -> ET.Element:
    return ET.SubElement(root, tag, {name.replace("_", "-"): str(value) for name, value in attributes.items()})


def _text(root: ET.Element, x: float, y: float, text: str, *, size: int = 9) -> None:
    if text:
        _add(root, "text", x=round(x, 1), y=y, **({"font_size": size} if size != 9 else {})).text = text
