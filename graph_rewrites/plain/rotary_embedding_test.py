# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import pytest

from flownpu.graph_rewrites import testing
from flownpu.graph_rewrites.plain.rotary_embedding import fold_rotary_embedding

# Two heads of d = 8.
MODEL = """
rope (float[B, 2, S, {d}] x, int64[{rows}, S] ids, float[1, 4, 1] fed) => (float y{also}) {{
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    three = Constant <value_ints = [3]> ()
    four = Constant <value_ints = [4]> ()
    end = Constant <value_ints = [9223372036854775807]> ()
    factor = Constant <value = float {{1.5}}> ()
    column = Unsqueeze (ids, one)
    positions = Cast <to = 1> (column)
    products = MatMul ({frequencies}, positions)
    angles = Transpose <perm = [0, 2, 1]> (products)
    both = Concat <axis = -1> ({both})
    cosine = Cos (both)
    sine = {sine} (both)
    cos = {cos}
    sin = {sin}
    cos4 = Unsqueeze (cos, {heads})
    sin4 = Unsqueeze (sin, {heads})
    low = Slice (x, zero, {middle}, three, one)
    high = Slice (x, {middle}, end, three, one)
    minus = Neg ({negated})
    swapped = Concat <axis = {axis}> (minus, {last})
    a = Mul ({a})
    b = Mul ({b})
    y = Add ({y})
}}
"""
DEFAULTS = {
    "d": "8",
    "rows": "B",
    "also": "",
    "frequencies": "frequencies",
    "both": "angles, angles",
    "sine": "Sin",
    "cos": "Mul (cosine, factor)",
    "sin": "Mul (sine, factor)",
    "heads": "one",
    "middle": "four",
    "negated": "high",
    "last": "low",
    "axis": "-1",
    "a": "x, cos4",
    "b": "swapped, sin4",
    "y": "a, b",
}
FREQUENCIES = (10000.0 ** (-np.arange(4) / 4)).astype(np.float32).reshape(1, 4, 1)
# Angles of other positions, as the end of the line that defines `both`.
LATER = """
    moved = Add (ids, one)
    later_column = Unsqueeze (moved, one)
    later_positions = Cast <to = 1> (later_column)
    later_products = MatMul (frequencies, later_positions)
    later_angles = Transpose <perm = [0, 2, 1]> (later_products)
    later = Concat <axis = -1> (later_angles, later_angles"""


def _model(**changed: str) -> Any:
    return testing.parse(MODEL.format(**(DEFAULTS | changed)), frequencies=FREQUENCIES)


def _fold(model: Any) -> tuple[Any, list[Any]]:
    return testing.folded(model, lambda graph: fold_rotary_embedding(graph, 64))


@pytest.mark.parametrize(
    "forms",
    [
        {},
        {"cos": "Mul (factor, cosine)", "sin": "Mul (factor, sine)"},
        {"a": "cos4, x", "b": "sin4, swapped", "y": "b, a", "axis": "3"},
        {"rows": "1"},
    ],
)
def test_rotary_embedding_of_several_operators_becomes_one(forms: dict[str, str]) -> None:
    original = _model(**forms)
    model, misses = _fold(original)
    assert misses == []
    assert testing.operator_names(model)[-1] == "RotaryEmbedding"
    assert not {"Cos", "Sin", "Neg"} & set(testing.operator_names(model))
    x = np.random.default_rng(1).standard_normal((2, 2, 5, 8), np.float32)
    ids = np.array([[3, 4, 5, 6, 7], [0, 1, 2, 3, 63]])[: 1 if "rows" in forms else 2]
    feeds = {"x": x, "ids": ids, "fed": FREQUENCIES}
    found, expected = (testing.run(m, feeds)[0] for m in (model, original))
    # Two products and a sum of numbers below 1.5 times the largest; cosines are good to 4 roundings.
    assert np.max(np.abs(found - expected)) <= 2 * 8 * testing.FLOAT32_ROUNDING * 2 * 1.5 * testing.largest(x)
    testing.check(model)


def test_layers_share_their_tables_and_positions() -> None:
    text = MODEL.format(**(DEFAULTS | {"rows": "1"}))
    again = """
        low_2 = Slice (y, zero, four, three, one) high_2 = Slice (y, four, end, three, one) minus_2 = Neg (high_2)
        swapped_2 = Concat <axis = -1> (minus_2, low_2) a_2 = Mul (y, cos4) b_2 = Mul (swapped_2, sin4)
        z = Add (a_2, b_2)
    }
    """
    text = text.replace("float y", "float z")
    model, misses = _fold(testing.parse(text[: text.rindex("}")] + again, frequencies=FREQUENCIES))
    assert misses == []
    first, second = (node for node in model.graph if node.op_type == "RotaryEmbedding")
    assert first.inputs[1:] == second.inputs[1:]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"last": "high"}, "a half is [4, 8) of 8, expected [0, 4)"),
        ({"middle": "three"}, "a half is [3, 8) of 8, expected [4, 8)"),
        ({"axis": "2"}, "the halves are joined along another axis than the last"),
        ({"a": "low, cos4"}, "the swapped halves are added to something else than X cos(..)"),
        ({"also": ", float swapped"}, "the swapped halves are not multiplied by sin(..) and added to X cos(..)"),
        ({"also": ", float minus"}, "the negated half is not put before the other half (Concat)"),
        ({"sine": "Cos"}, "a factor of the halves is not Sin(Concat(angles, angles))"),
        ({"both": "angles, products"}, "a factor of the halves is not Cos(Concat(angles, angles))"),
        ({"heads": "zero"}, "cos(..) is not repeated for each head (Unsqueeze of axis 1)"),
        ({"frequencies": "fed"}, "the frequencies are not a constant vector: they may depend on how long the text is"),
        ({"d": "9"}, "the last axis of X is 9, expected an even number"),
        ({"d": "6", "middle": "three"}, "X has the shape [B,2,S,6], expected [batch, heads, tokens, 8]"),
        ({"last": "x"}, "the halves are not cut out of one X"),
        ({"middle": "ids"}, "the halves' bounds are computed, or of another axis than the last"),
        ({"both": "products, products"}, "the angles are not Transpose(MatMul(frequencies, positions))"),
        ({"frequencies": "frequencies, fed) unused = MatMul (fed"}, "the positions are not integers [batch, tokens]"),
        ({"both": f"angles, angles) {LATER}", "sine": "Sin (later) unused ="}, "the cosine and the sine are of"),
    ],
)
def test_unmatched_graph_reports_miss(changed: dict[str, str], reason: str) -> None:
    model, misses = _fold(_model(**changed))
    assert "RotaryEmbedding" not in testing.operator_names(model)
    assert [(miss.rule, miss.reason[: len(reason)]) for miss in misses] == [("rotary_embedding", reason)]
