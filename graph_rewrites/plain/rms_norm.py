# SPDX-License-Identifier: Apache-2.0
"""A root mean square norm in its parts -> SimplifiedLayerNormalization."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flownpu.graph_rewrites.plain.graph import (
    NoMatchError,
    check_mean,
    fold_each,
    is_operator,
    made_by,
    only_user,
    other_operand,
    put,
    scalar,
    vector,
    with_constant,
)

if TYPE_CHECKING:
    import onnx_ir as ir

    from flownpu.graph_rewrites.report import Miss


class _Match(NamedTuple):
    epsilon: float
    weight: ir.Value
    last: ir.Node


def fold_rms_norm(model: ir.Model) -> tuple[int, list[Miss]]:
    """Folds the norm over the last axis, of activations or of a head.

    X * (1 / Sqrt(ReduceMean(X^2) + epsilon)) * weight     (or X / Sqrt(..), or X * Reciprocal(Sqrt(..)))
        -> SimplifiedLayerNormalization(X, weight; axis=-1, epsilon)

    Args:
        model: a plain graph; changed in place.

    Returns:
        How many were folded, and the near misses: means of squares that are not part of such a norm.
    """
    return fold_each(model, "rms_norm", _fold)


def _fold(node: ir.Node) -> bool:
    if not is_operator(node, "ReduceMean") or (x := _squared(node.inputs[0])) is None:
        return False
    match = _match(node, x)
    attributes = {"axis": -1, "epsilon": match.epsilon, "stash_type": 1}
    put(match.last, "SimplifiedLayerNormalization", [x, match.weight], attributes, name=f"{match.last.name}/norm")
    return True


def _squared(value: ir.Value | None) -> ir.Value | None:
    """The X in X^2, as Pow or Mul; None if the value has another form."""
    if (power := made_by(value, "Pow")) is not None:
        return power.inputs[0] if scalar(power.inputs[1]) == 2 else None
    product = made_by(value, "Mul")
    return product.inputs[0] if product is not None and product.inputs[0] is product.inputs[1] else None


def _match(mean: ir.Node, x: ir.Value) -> _Match:
    check_mean(mean, x, "mean")
    total = only_user(mean.outputs[0])
    added = with_constant(total) if total is not None and total.op_type == "Add" else None
    root = only_user(total.outputs[0]) if total is not None else None
    if total is None or added is None or root is None or root.op_type != "Sqrt":
        raise NoMatchError("the mean of squares is not in Sqrt(mean + epsilon)")
    normalised = _normalised(x, root)
    last = only_user(normalised.outputs[0])
    if last is None or last.op_type != "Mul" or last.domain != "":
        raise NoMatchError("what is normalised is not multiplied by a weight")
    weight = vector(other_operand(last, normalised.outputs[0]), x, "weight")
    return _Match(added[1], weight, last)


def _normalised(x: ir.Value, root: ir.Node) -> ir.Node:
    """The node that yields X / Sqrt(..); NoMatchError if there is none."""
    node = only_user(root.outputs[0])
    if node is not None and node.op_type == "Div" and node.inputs[0] is x:
        return node
    if node is None or not (node.op_type == "Reciprocal" or (node.op_type == "Div" and scalar(node.inputs[0]) == 1)):
        raise NoMatchError("the root is not used as 1 / Sqrt(..) or X / Sqrt(..)")
    product = only_user(node.outputs[0])
    if product is None or product.op_type != "Mul" or other_operand(product, node.outputs[0]) is not x:
        raise NoMatchError("1 / Sqrt(..) does not multiply the X whose mean of squares it is")
    return product
