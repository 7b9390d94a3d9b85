# SPDX-License-Identifier: Apache-2.0
"""Reads the input of a softmax: the product of queries and keys, its scale and soft cap, biases and masks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from flownpu.graph_rewrites.plain.graph import (
    NoMatchError,
    constant,
    dimensions,
    integers,
    is_operator,
    made_by,
    scalar,
    with_constant,
)

if TYPE_CHECKING:
    import onnx_ir as ir

# A score of at most this counts as masked: its exponential is 0 in float32, whatever the other scores are.
MASKED = -1e4


@dataclass(frozen=True)
class Addend:
    """A bias or a mask of the scores.

    Attributes:
        value: a bias, float32, in the scores' shape or one that broadcasts to it; None if there is a condition.
        condition: a mask, boolean; a score is masked where it is false, or if `inverted`, where it is true.
        inverted: see `condition`.
    """

    value: ir.Value | None = None
    condition: ir.Value | None = None
    inverted: bool = False


@dataclass(frozen=True)
class Scores:
    """Scores of the form softcap(scale * query key) + addends.

    Attributes:
        query: [B, H, S, d].
        key: [B, H, d, T].
        product: the node that multiplies query and key.
        scale: the factor of the product.
        softcap: the cap of the scores; 0: none.
        addends: masks and biases.
    """

    query: ir.Value
    key: ir.Value
    product: ir.Node
    scale: float = 1.0
    softcap: float = 0.0
    addends: tuple[Addend, ...] = field(default=())


def read_scores(value: ir.Value | None) -> Scores:
    """Reads a softmax's input as the scores of an attention.

    Raises:
        NoMatchError: the value is not the scores of an attention.
    """
    node = made_by(value, "MatMul", "Add", "Mul", "Div", "Where")
    if value is None or node is None:
        maker = None if value is None else value.producer()
        raise NoMatchError(
            f"the softmax is of {'an input' if maker is None else maker.op_type}, expected scores of a MatMul"
        )
    if node.op_type == "MatMul":
        query, key = node.inputs
        assert query is not None
        assert key is not None
        if constant(query) is not None or constant(key) is not None:
            raise NoMatchError("the scores are the product with a constant: a projection, not an attention")
        return Scores(query, key, node)
    if node.op_type == "Where":
        return _masked(node)
    if (pair := with_constant(node)) is not None:
        return _scaled(node, *pair)
    if node.op_type == "Add":
        return _added(node)
    raise NoMatchError(f"the scores are changed by {node.op_type} with something computed")


def _added(node: ir.Node) -> Scores:
    first, second = node.inputs
    try:
        scores, other = read_scores(first), second
    except NoMatchError as reason:
        try:
            scores, other = read_scores(second), first
        except NoMatchError:
            raise reason from None
    return replace(scores, addends=(*scores.addends, Addend(value=other)))


def _masked(node: ir.Node) -> Scores:
    """Reads Where(condition, scores, very negative), or with the two sides swapped."""
    condition, *sides = node.inputs
    for position in (0, 1):
        number = scalar(sides[1 - position])
        if number is None:
            continue
        if not number <= MASKED:
            raise NoMatchError(
                f"masked scores are {number}, expected what weighs nothing after the softmax ({MASKED:g} or less)"
            )
        scores = read_scores(sides[position])
        return replace(scores, addends=(*scores.addends, Addend(condition=condition, inverted=position == 1)))
    raise NoMatchError("both sides of the scores' Where are computed")


def _scaled(node: ir.Node, value: ir.Value, number: float) -> Scores:
    if node.op_type == "Add":
        return read_scores(value)  # the same number is added to all scores, which does not change a softmax
    if node.op_type == "Div":
        number = 1 / number
    capped = made_by(value, "Tanh")
    scores = read_scores(capped.inputs[0] if capped is not None else value)
    if scores.addends:
        raise NoMatchError("a mask or bias is added before the scores are scaled")
    if scores.softcap:
        raise NoMatchError("the scores are scaled after their soft cap")
    if capped is None:
        return replace(scores, scale=scores.scale * number)
    if number <= 0:
        raise NoMatchError(f"the soft cap is {number}, expected a positive number")
    # number * tanh(factor * product) is a soft cap with the scale number * factor: the cap divides scores by `number`.
    return replace(scores, scale=scores.scale * number, softcap=number)


def read_probabilities(softmax: ir.Node) -> ir.Node:
    """The node of the product of a softmax's result with the values.

    Between the two may be Where(IsNaN(p), 0, p), which exporters write for rows that are masked as a whole.

    Raises:
        NoMatchError: there is no such product, or something else reads the probabilities.
    """
    value = softmax.outputs[0]
    users = [use.node for use in value.uses()]
    if {user.op_type for user in users} == {"IsNaN", "Where"} and len(users) == 2:
        guard = next(user for user in users if user.op_type == "Where")
        test = made_by(guard.inputs[0], "IsNaN") if is_operator(guard, "Where") else None
        if test is None or test.inputs[0] is not value or guard.inputs[2] is not value or scalar(guard.inputs[1]) != 0:
            raise NoMatchError("the probabilities go through a Where that is not Where(IsNaN(p), 0, p)")
        value, users = guard.outputs[0], [use.node for use in guard.outputs[0].uses()]
    if len(users) != 1 or value.is_graph_output():
        raise NoMatchError(
            f"{len(users)} nodes read the probabilities, or they are an output; expected the product with values alone"
        )
    product = users[0]
    if not is_operator(product, "MatMul") or product.inputs[0] is not value:
        raise NoMatchError(f"the probabilities are read by {product.op_type}, expected MatMul(probabilities, values)")
    sizes, axis = dimensions(value), softmax.attributes["axis"].as_int() if "axis" in softmax.attributes else -1
    if axis != -1 and (sizes is None or axis != len(sizes) - 1):
        raise NoMatchError(f"the softmax is over axis {axis}, expected the last one, the keys")
    return product


def finite(number: float) -> float:
    """The number, or float32's lowest number instead of minus infinity.

    A row that is masked as a whole then has equal weights instead of NaN; it belongs to padding, so its output is not
    used.
    """
    return max(number, float(np.finfo(np.float32).min))


def whole_slice(value: ir.Value | None) -> ir.Value | None:
    """The input of a Slice that takes the first elements of axis 3: a mask for more keys than there are; else None."""
    node = made_by(value, "Slice")
    if node is None or len(node.inputs) < 4:
        return None
    steps = integers(node.inputs[4]) if len(node.inputs) > 4 else [1]
    if integers(node.inputs[1]) != [0] or integers(node.inputs[3]) not in ([3], [-1]) or steps != [1]:
        return None
    return node.inputs[0]
