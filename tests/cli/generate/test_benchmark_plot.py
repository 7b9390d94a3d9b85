# SPDX-License-Identifier: Apache-2.0
"""The drawing of `--plot`: its names, and the places of its points."""

import re
from xml.etree import ElementTree as ET

import pytest

from flownpu.bench.plot import draw

RATES = {1024: 10.0, 4096: 20.0, 16384: 40.0}


def texts(drawing: str) -> list[str]:
    return [each.text or "" for each in ET.fromstring(drawing).findall(".//{*}text")]  # noqa: S314 (what we wrote)


def points(drawing: str, curve: str) -> list[tuple[float, float]]:
    """The points of the curve's path, in the drawing's units; y goes down."""
    (path,) = ET.fromstring(drawing).findall(f".//{{*}}g[@id='{curve}']/{{*}}path")  # noqa: S314 (what we wrote)
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))]


def test_drawing_names_engines_axes_and_roof():
    drawing = draw("decode", {"flownpu": list(RATES.items()), "nothing": []}, [(1024.0, 50.0)])
    shown = texts(drawing)
    assert {"decode", "flownpu", "memory roof", "tokens in the context", "1024", "4096", "16384"} <= set(shown)
    assert "nothing" not in shown
    assert "memory roof" not in texts(draw("decode", {"flownpu": list(RATES.items())}, []))


def test_contexts_are_on_logarithmic_axis_and_rates_on_one_that_begins_at_zero():
    drawing = draw("decode", {"flownpu": list(RATES.items())}, [])
    (x0, y10), (x1, y20), (x2, y40) = points(drawing, "flownpu")
    y0 = max(y for _, y in points(drawing, "patch_2"))  # the axes' own rectangle
    # Coordinates have 6 decimals, so that each is off by up to 5e-7; 4 or 8 of them are in each comparison.
    assert x2 - x1 == pytest.approx(x1 - x0, abs=4 * 5e-7)
    assert (y0 - y10) * 2 == pytest.approx(y0 - y20, abs=4 * 5e-7)
    assert (y0 - y10) * 4 == pytest.approx(y0 - y40, abs=8 * 5e-7)
    assert x0 < x1


def test_drawing_has_same_bytes_again():
    assert draw("decode", {"a": [(1.0, 2.0)]}, [(1.0, 3.0)]) == draw("decode", {"a": [(1.0, 2.0)]}, [(1.0, 3.0)])
