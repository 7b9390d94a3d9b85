# SPDX-License-Identifier: Apache-2.0
"""A layer norm in its parts -> LayerNormalization."""

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

_RULE = "layer_norm"


class _Parts(NamedTuple):
    """D = X - ReduceMean(X), D / Sqrt(ReduceMean(Pow(D, power)) + epsilon)."""

    mean: ir.Node
    centred: ir.Node
    power: ir.Node
    variance: ir.Node
    total: ir.Node
    root: ir.Node
    quotient: ir.Node


class _Match(NamedTuple):
    epsilon: float
    weight: ir.Value
    bias: ir.Value
    last: ir.Node


def fold_layer_norm(model: ir.Model) -> tuple[int, list[Miss]]:
    """The norm over the last axis, as opsets before 17 have it.

    D = X - ReduceMean(X);  D / Sqrt(ReduceMean(Pow(D, 2)) + epsilon) * weight + bias
        -> LayerNormalization(X, weight, bias; axis=-1, epsilon)

    Args:
        model: a plain graph; changed in place.

    Returns:
        How many were folded, and the near misses: where all parts up to the quotient are there.
    """
    count, misses = 0, []
    for node in list(model.graph):
        parts = _parts(node)
        if parts is None:
            continue
        x = parts.centred.inputs[0]
        assert x is not None
        match = _match(parts, x)
        if isinstance(match, str):
            misses.append(Miss(_RULE, node.name or "Div", match))
            continue
        builder = tape.Tape()
        value = builder.op(
            "LayerNormalization",
            [x, match.weight, match.bias],
            {"axis": -1, "epsilon": match.epsilon},
            name=f"{match.weight.name}/norm",
        )
        value.shape = x.shape
        insert_before(match.last, builder.nodes)
        replace(match.last.outputs[0], value)
        count += 1
    return count, misses


def _parts(quotient: ir.Node) -> _Parts | None:
    if not is_operator(quotient, "Div"):
        return None
    centred, root = made_by(quotient.inputs[0], "Sub"), made_by(quotient.inputs[1], "Sqrt")
    mean = None if centred is None else made_by(centred.inputs[1], "ReduceMean")
    total = None if root is None else made_by(root.inputs[0], "Add")
    if centred is None or root is None or mean is None or total is None or mean.inputs[0] is not centred.inputs[0]:
        return None
    for value in total.inputs:
        variance = made_by(value, "ReduceMean")
        power = None if variance is None else made_by(variance.inputs[0], "Pow")
        if variance is not None and power is not None and power.inputs[0] is centred.outputs[0]:
            return _Parts(mean, centred, power, variance, total, root, quotient)
    return None


def _match(parts: _Parts, x: ir.Value) -> _Match | str:  # noqa: PLR0911 # each is a reason
    if (power := scalar(parts.power.inputs[1])) != 2:
        return f"the variance is of X to the power {power}, expected 2"
    sizes = dimensions(x)
    for name, reduce in (("mean", parts.mean), ("variance", parts.variance)):
        axes = integers(reduce.inputs[1]) if len(reduce.inputs) > 1 else None
        if axes != [-1] and (sizes is None or axes != [len(sizes) - 1]):
            return f"the {name} is over the axes {axes}, expected the last one"
        if "keepdims" in reduce.attributes and not reduce.attributes["keepdims"].as_int():
            return f"the {name} drops its axis (keepdims = 0), so that it belongs to another one"
    added = with_constant(parts.total)
    if added is None:
        return "epsilon is not a constant number"
    inner = [node.outputs[0] for node in parts[:-1] if node is not parts.centred]
    if any(only_user(value) is None for value in inner) or len(list(parts.centred.outputs[0].uses())) != 2:
        return "something else reads a part of the norm"
    scaled = only_user(parts.quotient.outputs[0])
    last = only_user(scaled.outputs[0]) if scaled is not None and is_operator(scaled, "Mul") else None
    if scaled is None or last is None or not is_operator(last, "Add"):
        return "what is normalised is not multiplied by a weight, with a bias added to it"
    operands = other_operand(scaled, parts.quotient.outputs[0]), other_operand(last, scaled.outputs[0])
    for name, value in zip(("weight", "bias"), operands, strict=True):
        if not is_constant(value) or value.shape is None or value.shape.rank() != 1:
            return f"the {name} is not a constant vector"
        if last_dimension(x) not in {None, last_dimension(value)}:
            return f"the {name} has {last_dimension(value)} numbers, and X {last_dimension(x)} in its last axis"
    weight, bias = operands
    assert weight is not None
    assert bias is not None
    return _Match(added[1], weight, bias, last)
