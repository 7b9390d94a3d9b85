# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import pytest

from flownpu.graph_rewrites import testing
from flownpu.graph_rewrites.plain.gelu import fold_gelu

CONSTANTS = """
    one = Constant <value = float {1.0}> ()
    half = Constant <value = float {0.5}> ()
    two = Constant <value = float {2.0}> ()
    three = Constant <value = float {3.0}> ()
    root = Constant <value = float {1.4142135}> ()
    inverse = Constant <value = float {0.70710677}> ()
    cube = Constant <value = float {0.044715}> ()
    factor = Constant <value = float {0.7978846}> ()
"""
ERF = "a = Div (x, root) b = Erf (a) c = Add (b, one) d = Mul (x, c) y = Mul (d, half)"
TANH = (
    "a = Mul (x, x) b = Mul (x, a) c = Mul (cube, b) d = Add (x, c) e = Mul (factor, d) "
    "f = Tanh (e) g = Add (one, f) h = Mul (half, x) y = Mul (h, g)"
)


def _model(body: str, also: str = "") -> Any:
    return testing.parse(f"gelu (float[B, 8] x, float[B, 8] z) => (float[B, 8] y{also}) {{ {CONSTANTS} {body} }}")


@pytest.mark.parametrize(
    ("body", "approximate"),
    [
        (ERF, "none"),
        ("a = Mul (inverse, x) b = Erf (a) c = Add (one, b) d = Mul (c, half) y = Mul (d, x)", "none"),
        ("a = Div (x, root) b = Erf (a) c = Add (b, one) d = Mul (half, x) y = Mul (d, c)", "none"),
        ("a = Div (x, root) b = Erf (a) c = Add (b, one) d = Mul (x, c) y = Div (d, two)", "none"),
        (TANH, "tanh"),
        (TANH.replace("a = Mul (x, x) b = Mul (x, a)", "b = Pow (x, three)"), "tanh"),
        (TANH.replace("h = Mul (half, x) y = Mul (h, g)", "h = Mul (x, g) y = Mul (half, h)"), "tanh"),
    ],
)
def test_gelu_of_several_operators_becomes_one(body: str, approximate: str) -> None:
    original = _model(body)
    model, misses = testing.folded(original, fold_gelu)
    assert testing.operator_names(model) == ["Gelu"]
    assert misses == []
    (node,) = (node for node in model.graph if node.op_type == "Gelu")
    assert node.attributes["approximate"].as_string() == approximate
    x = np.linspace(-6, 6, 64, dtype=np.float32).reshape(8, 8)
    found, expected = (testing.run(m, {"x": x, "z": x})[0] for m in (model, original))
    # Ten operations with numbers of at most 6 times 2 (1 + f is at most 2), and erf and tanh are good to 8 roundings.
    assert np.max(np.abs(found - expected)) <= 2 * 18 * testing.FLOAT32_ROUNDING * 12
    testing.check(model)


@pytest.mark.parametrize(
    ("body", "also", "reason"),
    [
        (ERF.replace("(x, root)", "(x, two)"), "", "the argument of Erf is 0.5 x, expected x / sqrt(2)"),
        (ERF.replace("a = Div (x, root)", "a = Add (x, z)"), "", "the argument of Erf is not x / sqrt(2)"),
        (ERF.replace("Add (b, one)", "Add (b, two)"), "", "1 is not added to Erf(..), which alone reads it"),
        (ERF.replace("Mul (d, half)", "Mul (d, two)"), "", "1 + f(x) is multiplied by 2 x, and not by x / 2"),
        (ERF.replace("d = Mul (x, c)", "d = Mul (z, c)"), "", "1 + f(x) is multiplied by 1, and not by x / 2"),
        (ERF, ", float[B, 8] c", "1 + f(x) is multiplied by 1, and not by x / 2"),
        (TANH.replace("Mul (cube, b)", "Mul (half, b)"), "", "the argument of Tanh is not 0.797885 (x + 0.044715 x^3)"),
        (TANH.replace("Mul (factor, d)", "Mul (two, d)"), "", "the argument of Tanh is not 0.797885"),
        (TANH.replace("b = Mul (x, a)", "b = Mul (z, a)"), "", "the argument of Tanh is not 0.797885"),
    ],
)
def test_unmatched_graph_reports_miss(body: str, also: str, reason: str) -> None:
    model, misses = testing.folded(_model(body, also), fold_gelu)
    assert "Gelu" not in testing.operator_names(model)
    assert [(miss.rule, miss.reason[: len(reason)]) for miss in misses] == [("gelu", reason)]


def test_soft_cap_is_not_reported_as_gelu() -> None:
    _, misses = testing.folded(_model("a = Div (x, two) b = Tanh (a) y = Mul (b, two)"), fold_gelu)
    assert misses == []
