# SPDX-License-Identifier: Apache-2.0
"""GELU in its parts -> Gelu."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flownpu.graph_rewrites.plain.graph import (
    NoMatchError,
    fold_each,
    is_operator,
    made_by,
    only_user,
    other_operand,
    put,
    scalar,
    with_constant,
)

if TYPE_CHECKING:
    import onnx_ir as ir

    from flownpu.graph_rewrites.report import Miss

# Constants of the tanh approximation. Exporters write them in float32, with a relative rounding error of 2^-24.
_CUBE, _TANH_SCALE = 0.044715, math.sqrt(2 / math.pi)
_CLOSE = 2.0**-20


def fold_gelu(model: ir.Model) -> tuple[int, list[Miss]]:
    """Folds the activation, exact or approximated.

    x/2 (1 + Erf(x / sqrt 2))                                     -> Gelu(x)
    x/2 (1 + Tanh(sqrt(2/pi) (x + 0.044715 x^3)))                 -> Gelu(x; approximate="tanh")

    The products may come in any order, and the factor 1/2 at any place.

    Args:
        model: a plain graph; changed in place.

    Returns:
        How many were folded, and the near misses: an Erf, or a Tanh to which 1 is added, that is not part of a GELU.
    """
    return fold_each(model, "gelu", _fold)


def _fold(node: ir.Node) -> bool:
    if not is_operator(node, "Erf", "Tanh"):
        return False
    exact = node.op_type == "Erf"
    one_more = only_user(node.outputs[0])
    added = with_constant(one_more) if one_more is not None and one_more.op_type == "Add" else None
    if one_more is None or added is None or added[1] != 1:
        if exact:
            raise NoMatchError("1 is not added to Erf(..), which alone reads it")
        return False
    x = _argument_of_erf(node) if exact else _argument_of_tanh(node)
    last = _product(x, one_more)
    put(last, "Gelu", [x], {"approximate": "none" if exact else "tanh"}, name=f"{node.name}/gelu")
    return True


def _argument_of_erf(node: ir.Node) -> ir.Value:
    """The x in Erf(x / sqrt 2); NoMatchError if it has another form."""
    scaled = made_by(node.inputs[0], "Div", "Mul")
    pair = with_constant(scaled)
    if scaled is None or pair is None:
        raise NoMatchError("the argument of Erf is not x / sqrt(2)")
    factor = 1 / pair[1] if scaled.op_type == "Div" else pair[1]
    if not _close(factor, math.sqrt(0.5)):
        raise NoMatchError(f"the argument of Erf is {factor:.6g} x, expected x / sqrt(2)")
    return pair[0]


def _argument_of_tanh(node: ir.Node) -> ir.Value:
    """The x in Tanh(sqrt(2/pi) (x + 0.044715 x^3)); NoMatchError if it has another form."""
    outer = with_constant(made_by(node.inputs[0], "Mul"))
    if outer is None or not _close(outer[1], _TANH_SCALE):
        raise NoMatchError(f"the argument of Tanh is not {_TANH_SCALE:.6f} (x + {_CUBE} x^3)")
    total = made_by(outer[0], "Add")
    for position in (0, 1) if total is not None else ():
        assert total is not None
        x = total.inputs[position]
        inner = with_constant(made_by(total.inputs[1 - position], "Mul"))
        if x is not None and inner is not None and _close(inner[1], _CUBE) and _is_cube(inner[0], x):
            return x
    raise NoMatchError(f"the argument of Tanh is not {_TANH_SCALE:.6f} (x + {_CUBE} x^3)")


def _is_cube(value: ir.Value, x: ir.Value) -> bool:
    if (power := made_by(value, "Pow")) is not None:
        return power.inputs[0] is x and scalar(power.inputs[1]) == 3
    product = made_by(value, "Mul")
    if product is None or not any(operand is x for operand in product.inputs):
        return False
    square = other_operand(product, x)
    if (power := made_by(square, "Pow")) is not None:
        return power.inputs[0] is x and scalar(power.inputs[1]) == 2
    factors = made_by(square, "Mul")
    return factors is not None and all(operand is x for operand in factors.inputs)


def _product(x: ir.Value, one_more: ir.Node) -> ir.Node:
    """The last node of the products of 1 + Erf(..) or 1 + Tanh(..) with x and 1/2; NoMatchError if one is missing."""
    node, factor, has_x = one_more, 1.0, False
    while not (has_x and factor == 0.5):
        user = only_user(node.outputs[0])
        if user is None or user.domain != "" or user.op_type not in {"Mul", "Div"}:
            break
        value, number = other_operand(user, node.outputs[0]), None
        if user.op_type == "Div" and user.inputs[0] is not node.outputs[0]:
            break
        if (number := scalar(value)) is not None:
            factor = factor / number if user.op_type == "Div" else factor * number
        elif value is x and user.op_type == "Mul" and not has_x:
            has_x = True
        elif (half := with_constant(made_by(value, "Mul"))) is not None and half[0] is x and not has_x:
            has_x, factor = True, factor * half[1]
        else:
            break
        node = user
    if has_x and factor == 0.5:
        return node
    raise NoMatchError(f"1 + f(x) is multiplied by {factor:g}{' x' if has_x else ''}, and not by x / 2")


def _close(number: float, expected: float) -> bool:
    return abs(number - expected) <= _CLOSE * abs(expected)
