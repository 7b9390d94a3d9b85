# SPDX-License-Identifier: Apache-2.0
"""Reads from a mask's nodes whether the mask hides later keys from a query (causal), and keys outside a window."""

from collections.abc import Iterator
from typing import NamedTuple

import onnx_ir as ir

from flownpu.graph_rewrites.plain.attention.scores import whole_slice
from flownpu.graph_rewrites.plain.graph import dimensions, made_by, same_size, scalar, with_constant


class Visible(NamedTuple):
    """The keys that a mask leaves visible at most.

    Attributes:
        causal: no query sees a later key.
        window: how many keys a query sees, its own and those right before it; -1: all.
    """

    causal: bool
    window: int


def visible(condition: ir.Value | None, past: ir.Value | None) -> Visible:
    """The most that a mask, which is true where a query sees a key, is known to leave visible.

    The mask may also hide keys for other reasons, such as padding. A comparison that is not understood is ignored.

    Args:
        condition: boolean, [.., S, T].
        past: the KV cache before the queries' tokens, [B, G, P, d]; None if there is no cache.
    """
    causal, window = False, -1
    for part in _conjuncts(condition):
        node = made_by(part, "LessOrEqual", "GreaterOrEqual", "Less", "Greater")
        if node is None:
            continue
        low, high = node.inputs if node.op_type.startswith("Less") else node.inputs[::-1]
        if "OrEqual" in node.op_type and _is_index(low, "key", past) and _is_index(high, "query", past):
            causal = True
        before = with_constant(made_by(low, "Sub"))
        strict = "OrEqual" not in node.op_type
        if strict and before is not None and _is_index(before[0], "query", past) and _is_index(high, "key", past):
            window = int(before[1])
    return Visible(causal, window if causal and window > 0 else -1)


def _conjuncts(value: ir.Value | None) -> Iterator[ir.Value]:
    """The parts of a condition that must all be true."""
    node = made_by(value, "And", "Expand", "Cast", "Slice", "Identity")
    if value is None or node is None:
        if value is not None:
            yield value
        return
    if node.op_type == "Cast" and (node.inputs[0] is None or node.inputs[0].dtype != ir.DataType.BOOL):
        return
    if node.op_type == "Slice" and whole_slice(value) is None:
        return
    for part in node.inputs if node.op_type == "And" else node.inputs[:1]:
        yield from _conjuncts(part)


def are_next(positions: ir.Value, past: ir.Value | None) -> bool:
    """Whether positions [B, S] follow the KV cache's in every row, as attention assumes by default."""
    repeated = made_by(positions, "Expand")
    value = positions if repeated is None else repeated.inputs[0]
    sizes = None if value is None else dimensions(value)
    return sizes is not None and len(sizes) == 2 and sizes[0] == 1 and _counts_from(value, past)


def _is_index(value: ir.Value | None, of: str, past: ir.Value | None) -> bool:
    """Whether a value counts keys from 0 along its last axis (`of` is "key"), or queries from P along the one before.

    P is the capacity of the KV cache; without a cache queries count from 0.
    """
    sizes = None if value is None else dimensions(value)
    if sizes is None or len(sizes) < 2:
        return False
    counted = -1 if of == "key" else -2
    if any(size != 1 for axis, size in enumerate(sizes, -len(sizes)) if axis != counted):
        return False
    return _counts_from(value, None if of == "key" else past)


def _counts_from(value: ir.Value | None, past: ir.Value | None) -> bool:
    """Whether a value, apart from axes of size 1, counts up from P, the KV cache's capacity (0 without a cache)."""
    node = made_by(value, "Unsqueeze", "Range")
    while node is not None and node.op_type == "Unsqueeze":
        node = made_by(node.inputs[0], "Unsqueeze", "Range")
    if node is None or scalar(node.inputs[2]) != 1:
        return False
    return scalar(node.inputs[0]) == 0 if past is None else _is_capacity(node.inputs[0], past)


def _is_capacity(value: ir.Value | None, past: ir.Value) -> bool:
    """Whether a number is P, the size of axis 2 of a KV cache."""
    gather = made_by(value, "Gather")
    shape = made_by(gather.inputs[0], "Shape") if gather is not None else None
    if gather is None or shape is None or "start" in shape.attributes or scalar(gather.inputs[1]) != 2:
        return False
    of, expected = (None if v is None else dimensions(v) for v in (shape.inputs[0], past))
    return of is not None and expected is not None and len(of) == 4 and same_size(of[2], expected[2])
