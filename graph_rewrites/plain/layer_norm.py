# SPDX-License-Identifier: Apache-2.0
"""A layer norm in its parts -> LayerNormalization."""

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


class _Parts(NamedTuple):
    """The nodes of D = X - ReduceMean(X), D / Sqrt(ReduceMean(Pow(D, power)) + epsilon)."""

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
    """Folds the norm over the last axis, as graphs of opsets before 17 have it.

    D = X - ReduceMean(X);  D / Sqrt(ReduceMean(Pow(D, 2)) + epsilon) * weight + bias
        -> LayerNormalization(X, weight, bias; axis=-1, epsilon)

    Args:
        model: a plain graph; changed in place.

    Returns:
        How many were folded, and the near misses: all parts up to the quotient are there, but what follows differs.
    """
    return fold_each(model, "layer_norm", _fold)


def _fold(node: ir.Node) -> bool:
    parts = _parts(node)
    if parts is None:
        return False
    x = parts.centred.inputs[0]
    assert x is not None
    match = _match(parts, x)
    attributes = {"axis": -1, "epsilon": match.epsilon}
    inputs = [x, match.weight, match.bias]
    put(match.last, "LayerNormalization", inputs, attributes, name=f"{match.weight.name}/norm")
    return True


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


def _match(parts: _Parts, x: ir.Value) -> _Match:
    if (power := scalar(parts.power.inputs[1])) != 2:
        raise NoMatchError(f"the variance is of X to the power {power}, expected 2")
    check_mean(parts.mean, x, "mean")
    check_mean(parts.variance, x, "variance")
    added = with_constant(parts.total)
    if added is None:
        raise NoMatchError("epsilon is not a constant number")
    inner = [node.outputs[0] for node in parts[:-1] if node is not parts.centred]
    if any(only_user(value) is None for value in inner) or len(list(parts.centred.outputs[0].uses())) != 2:
        raise NoMatchError("something else reads a part of the norm")
    scaled = only_user(parts.quotient.outputs[0])
    last = only_user(scaled.outputs[0]) if scaled is not None and is_operator(scaled, "Mul") else None
    if scaled is None or last is None or not is_operator(last, "Add"):
        raise NoMatchError("what is normalised is not multiplied by a weight, with a bias added to it")
    weight = vector(other_operand(scaled, parts.quotient.outputs[0]), x, "weight")
    bias = vector(other_operand(last, scaled.outputs[0]), x, "bias")
    return _Match(added[1], weight, bias, last)
