# SPDX-License-Identifier: Apache-2.0
"""A root mean square norm in its parts -> SimplifiedLayerNormalization."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from onnx_ir import tape

from flownpu.graph_rewrites.node import is_constant, last_dimension
from flownpu.graph_rewrites.plain_graph import (
    dimensions,
    insert_before,
    integers,
    is_operator,
    made_by,
    only_user,
    other_operand,
    replace,
    scalar,
    with_constant,
)
from flownpu.graph_rewrites.report import Miss

if TYPE_CHECKING:
    import onnx_ir as ir

_RULE = "rms_norm"


class _Match(NamedTuple):
    x: ir.Value
    epsilon: float
    weight: ir.Value
    last: ir.Node


def fold_rms_norm(model: ir.Model) -> tuple[int, list[Miss]]:
    """The norm over the last axis, of activations or of a head.

    X * (1 / Sqrt(ReduceMean(X^2) + epsilon)) * weight     (or X / Sqrt(..), or X * Reciprocal(Sqrt(..)))
        -> SimplifiedLayerNormalization(X, weight; axis=-1, epsilon)

    Args:
        model: a plain graph; changed in place.

    Returns:
        How many were folded, and the near misses: where a mean of squares is not part of one.
    """
    count, misses = 0, []
    for node in list(model.graph):
        if not is_operator(node, "ReduceMean") or (x := _squared(node.inputs[0])) is None:
            continue
        match = _match(node, x)
        if isinstance(match, str):
            misses.append(Miss(_RULE, node.name or "ReduceMean", match))
            continue
        builder = tape.Tape()
        value = builder.op(
            "SimplifiedLayerNormalization",
            [match.x, match.weight],
            {"axis": -1, "epsilon": match.epsilon, "stash_type": 1},
            name=f"{match.last.name}/norm",
        )
        value.shape = match.x.shape
        insert_before(match.last, builder.nodes)
        replace(match.last.outputs[0], value)
        count += 1
    return count, misses


def _squared(value: ir.Value | None) -> ir.Value | None:
    """X of X^2."""
    if (power := made_by(value, "Pow")) is not None:
        return power.inputs[0] if scalar(power.inputs[1]) == 2 else None
    product = made_by(value, "Mul")
    return product.inputs[0] if product is not None and product.inputs[0] is product.inputs[1] else None


def _match(mean: ir.Node, x: ir.Value) -> _Match | str:  # noqa: PLR0911 # each is a reason
    sizes = dimensions(x)
    axes = integers(mean.inputs[1]) if len(mean.inputs) > 1 else None
    if axes != [-1] and (sizes is None or axes != [len(sizes) - 1]):
        return f"the mean is over the axes {axes}, expected the last one"
    if "keepdims" in mean.attributes and not mean.attributes["keepdims"].as_int():
        return "the mean drops its axis (keepdims = 0), so that it divides another one"
    total = only_user(mean.outputs[0])
    added = with_constant(total) if total is not None and total.op_type == "Add" else None
    root = only_user(total.outputs[0]) if total is not None else None
    if total is None or added is None or root is None or root.op_type != "Sqrt":
        return "the mean of squares is not in Sqrt(mean + epsilon)"
    normalised = _normalised(x, root)
    if isinstance(normalised, str):
        return normalised
    last = only_user(normalised.outputs[0])
    if last is None or last.op_type != "Mul" or last.domain != "":
        return "what is normalised is not multiplied by a weight"
    weight = other_operand(last, normalised.outputs[0])
    if not is_constant(weight) or weight.shape is None or weight.shape.rank() != 1:
        return "the weight is not a constant vector"
    size = last_dimension(weight)
    if last_dimension(x) not in {None, size}:
        return f"the weight has {size} numbers, and X {last_dimension(x)} in its last axis"
    return _Match(x, added[1], weight, last)


def _normalised(x: ir.Value, root: ir.Node) -> ir.Node | str:
    """The node of X / Sqrt(..), or why there is none."""
    node = only_user(root.outputs[0])
    if node is not None and node.op_type == "Div" and node.inputs[0] is x:
        return node
    if node is None or not (node.op_type == "Reciprocal" or (node.op_type == "Div" and scalar(node.inputs[0]) == 1)):
        return "the root is not used as 1 / Sqrt(..) or X / Sqrt(..)"
    product = only_user(node.outputs[0])
    if product is None or product.op_type != "Mul" or other_operand(product, node.outputs[0]) is not x:
        return "1 / Sqrt(..) does not multiply the X whose mean of squares it is"
    return product
