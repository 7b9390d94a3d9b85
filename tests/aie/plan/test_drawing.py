# SPDX-License-Identifier: Apache-2.0
"""The picture of an array has its parts, and no line runs through a tile."""

import itertools
import re
from xml.etree import ElementTree as ET

import pytest

from flownpu.aie.plan.drawing import draw, family
from flownpu.aie.plan.limits import LIMITS, NPU2
from flownpu.aie.plan.usage import tile_uses
from tests.aie.designs.test_plans import ALL, plan_of
from tests.aie.small_programs import chain

SVG = "{http://www.w3.org/2000/svg}"


def picture(plan):
    return ET.fromstring(draw(plan, LIMITS[plan.array.target]))  # noqa: S314 our own text


def test_drawing_of_chain_names_kernels_and_fifos():
    root = picture(chain())
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert "compute (0, 2)" in texts
    # The stack's 1024 bytes, 2 x 256 for each of b and c, 64 of parameters and two counters' words: 2120.
    assert "2/64 KB" in texts
    assert "scale" in texts
    assert "b: objects of 64xi32, depth 2" in texts
    assert {title.text for title in root.iter(f"{SVG}title")} == {f"{name}: 64xi32" for name in "abc"}


def test_design_families_are_drawn():
    assert family("w_3_0_split2") == family("w_11_0_split0") == "w_*_*_split*"


@pytest.mark.parametrize("design", ALL)
def test_drawing_has_every_part_and_no_line_runs_through_tile(design):
    plan = plan_of(ALL[design]())
    root = picture(plan)
    texts = [element.text for element in root.iter(f"{SVG}text")]
    limits = LIMITS[plan.array.target]
    for use in tile_uses(plan, limits):
        assert f"{use.kind} {use.tile}" in texts
    places = re.findall(r"(?:shim|memory|compute) \(\d, \d\)", " ".join(texts))
    assert len(places) == limits.columns * limits.rows
    titles = {title.text.partition(":")[0] for title in root.iter(f"{SVG}title")}
    assert titles == {fifo.name for fifo in plan.array.fifos}
    check_lines(root)


def lines(root):
    """The straight pieces of all lines, as pairs of points."""
    for path in root.iter(f"{SVG}path"):
        if path.find(f"{SVG}title") is not None:
            for part in path.get("d").split("M")[1:]:
                points = [tuple(map(float, point.split())) for point in part.strip().split("L")]
                yield from itertools.pairwise(points)


def check_lines(root):
    """Asserts that lines run between tiles and inside the picture."""
    width, height = float(root.get("width")), float(root.get("height"))
    tiles = [
        [float(rect.get(name)) for name in ("x", "y", "width", "height")]
        for rect in root.iter(f"{SVG}rect")
        if rect.get("rx")
    ]
    assert len(tiles) == NPU2.columns * NPU2.rows
    pieces = set(lines(root))
    assert pieces
    for (x0, y0), (x1, y1) in pieces:
        left, right, top, bottom = min(x0, x1), max(x0, x1), min(y0, y1), max(y0, y1)
        assert 0 <= left <= right <= width
        assert 0 <= top <= bottom <= height
        for x, y, w, h in tiles:
            assert right <= x or left >= x + w or bottom <= y or top >= y + h
