# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import pytest

from flownpu.graph_rewrites import testing
from flownpu.graph_rewrites.plain.layer_norm import fold_layer_norm

MODEL = """
norm (float[B, S, 24] x, float fed) => (float[B, S, 24] y{also}) {{
    axes = Constant <value_ints = {axes}> ()
    square_axes = Constant <value_ints = {square_axes}> ()
    two = Constant <value = float {{{power}}}> ()
    epsilon = Constant <value = float {{0.01}}> ()
    mean = ReduceMean <keepdims = {keepdims}> (x, axes)
    centred = Sub (x, mean)
    square = Pow (centred, two)
    variance = ReduceMean <keepdims = {square_keepdims}> (square, square_axes)
    total = Add ({total})
    root = Sqrt (total)
    normalised = Div (centred, root)
    scaled = Mul ({scaled})
    y = Add ({y})
}}
"""
DEFAULTS = {
    "axes": "[-1]",
    "square_axes": "[-1]",
    "power": "2.0",
    "keepdims": "1",
    "square_keepdims": "1",
    "total": "variance, epsilon",
    "scaled": "normalised, weight",
    "y": "scaled, bias",
    "also": "",
}
WEIGHTS = {
    "weight": np.linspace(0.5, 1.5, 24, dtype=np.float32),
    "bias": np.linspace(-2.0, 1.0, 24, dtype=np.float32),
    "one": np.ones(1, np.float32),
}


def _model(**changed: str) -> Any:
    return testing.parse(MODEL.format(**(DEFAULTS | changed)), **WEIGHTS)


@pytest.mark.parametrize(
    "forms",
    [
        {},
        {"total": "epsilon, variance", "scaled": "weight, normalised", "y": "bias, scaled"},
        {"axes": "[2]", "square_axes": "[2]"},
    ],
)
def test_layer_norm_of_several_operators_becomes_one(forms: dict[str, str]) -> None:
    original = _model(**forms)
    model, misses = testing.folded(original, fold_layer_norm)
    assert testing.operator_names(model) == ["LayerNormalization"]
    assert misses == []
    x = np.random.default_rng(1).standard_normal((2, 3, 24), np.float32)
    found, expected = (testing.run(m, {"x": x, "fed": np.zeros((), np.float32)})[0] for m in (model, original))
    # Mean and variance sum 24 terms, and some ten operations follow: less than 64 roundings, of numbers below 10.
    assert np.max(np.abs(found - expected)) <= 2 * 64 * testing.FLOAT32_ROUNDING * 10
    testing.check(model)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"power": "3.0"}, "the variance is of X to the power 3.0, expected 2"),
        ({"axes": "[1]"}, "the mean is over the axes [1], expected the last one"),
        ({"square_axes": "[0]"}, "the variance is over the axes [0], expected the last one"),
        ({"keepdims": "0"}, "the mean drops its axis (keepdims = 0)"),
        ({"square_keepdims": "0"}, "the variance drops its axis (keepdims = 0)"),
        ({"total": "variance, fed"}, "epsilon is not a constant number"),
        ({"scaled": "normalised, fed"}, "the weight is not a constant vector"),
        ({"y": "scaled, one"}, "the bias has 1 numbers, and X 24 in its last axis"),
        ({"also": ", float square"}, "something else reads a part of the norm"),
    ],
)
def test_unmatched_graph_reports_miss(changed: dict[str, str], reason: str) -> None:
    _, misses = testing.folded(_model(**changed), fold_layer_norm)
    assert [(miss.rule, miss.reason[: len(reason)]) for miss in misses] == [("layer_norm", reason)]
