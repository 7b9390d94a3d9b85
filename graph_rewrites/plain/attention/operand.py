# SPDX-License-Identifier: Apache-2.0
"""Follows queries, keys and values of a plain attention back through transposes, heads, norm, RoPE and cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from flownpu.graph_rewrites.node import attribute_float, attribute_int, is_constant
from flownpu.graph_rewrites.plain.graph import (
    NoMatchError,
    dimensions,
    integers,
    last_axis_bounds,
    made_by,
    same_size,
    with_constant,
)
from flownpu.graph_rewrites.signature import unknown_part

if TYPE_CHECKING:
    import onnx_ir as ir

# The meaning of each axis of a value: "B" batch, "H" head, "S" token, "D" element of a head.
Axes: TypeAlias = tuple[str, ...]

BY_HEAD: Axes = ("B", "H", "S", "D")
TRANSPOSED: Axes = ("B", "H", "D", "S")
BY_TOKEN: Axes = ("B", "S", "H", "D")


@dataclass(frozen=True)
class Norm:
    """A root mean square norm over each head.

    Attributes:
        weight: float32 [d].
        epsilon: added to the mean of squares.
    """

    weight: ir.Value
    epsilon: float


@dataclass(frozen=True)
class Rotary:
    """RoPE of each head.

    Attributes:
        positions: int64 [B, S].
        cos: float32 [positions, r/2], for the first r of d dimensions.
        sin: float32 [positions, r/2].
        interleaved: 1 if dimensions 2i and 2i + 1 are rotated with each other, 0 if i and i + r/2.
    """

    positions: ir.Value
    cos: ir.Value
    sin: ir.Value
    interleaved: int


@dataclass(frozen=True)
class Operand:
    """Queries, keys or values.

    Attributes:
        value: the value that they are made of: [B, S, heads d], or four axes in the order of `axes`.
        axes: what the axes of `value` count; empty for [B, S, heads d].
        scale: a factor of the operand.
        heads: how many heads `value` has.
        repeated: how often the operand has each head (more than once if grouped heads were expanded).
        head_size: d.
        past: the KV cache that comes before the tokens of `value`, [B, G, P, d]; None: there is none.
        present: the KV cache with these tokens, [B, G, T, d].
        norm: the norm of each head, before RoPE.
        rotary: the RoPE of each head.
    """

    value: ir.Value
    axes: Axes
    scale: float = 1.0
    heads: int = 0
    repeated: int = 1
    head_size: int = 0
    past: ir.Value | None = None
    present: ir.Value | None = None
    norm: Norm | None = None
    rotary: Rotary | None = None


def read_operand(value: ir.Value, axes: Axes, *, cached: bool, rotary: bool, norm: bool, scaled: bool) -> Operand:
    """Follows an operand of attention back to the value that it is made of.

    Args:
        value: the operand [B, H, S, d], or with its axes in another order.
        axes: that order.
        cached: whether to go through the concatenation with a KV cache.
        rotary: whether to go through RoPE.
        norm: whether to go through a norm of each head.
        scaled: whether to go through products with a number.

    Raises:
        NoMatchError: the value does not have four axes, or the graph does not say its heads and their size.
    """
    operand = Operand(value, axes)
    while True:
        following = _step(operand, cached=cached, rotary=rotary, norm=norm, scaled=scaled)
        if following is None:
            return _with_heads(operand)
        operand = following
        if not operand.axes:
            return operand


def _step(operand: Operand, *, cached: bool, rotary: bool, norm: bool, scaled: bool) -> Operand | None:  # noqa: PLR0911 # a return for each operator
    """The operand one node earlier in the graph; None if the node before it must stay."""
    node = operand.value.producer()
    if node is None or unknown_part(node):
        return None
    if node.domain == "com.microsoft":
        return _through_rotary(operand, node) if rotary and node.op_type == "RotaryEmbedding" else None
    if node.domain != "":
        return None
    if node.op_type in {"Mul", "Div"} and scaled and (pair := with_constant(node)) is not None:
        factor = 1 / pair[1] if node.op_type == "Div" else pair[1]
        return replace(operand, value=pair[0], scale=operand.scale * factor)
    if node.op_type == "Transpose" and node.inputs[0] is not None:
        permutation = node.attributes["perm"].as_ints()
        axes = [""] * len(permutation)
        for position, source in enumerate(permutation):
            axes[source] = operand.axes[position]
        return replace(operand, value=node.inputs[0], axes=tuple(axes))
    if node.op_type == "Slice" and node.inputs[0] is not None and _is_whole(node):
        return replace(operand, value=node.inputs[0])
    if node.op_type == "SimplifiedLayerNormalization" and norm:
        return _through_norm(operand, node)
    if node.op_type == "Concat" and rotary and attribute_int(node, "axis") in {3, -1}:
        return _through_part_of_rotary(operand, node)
    if node.op_type == "Concat" and cached and operand.past is None:
        return _through_cache(operand, node)
    if node.op_type == "Reshape":
        return _through_repetition(operand, node) or _through_heads(operand, node)
    return None


def _is_whole(cut: ir.Node) -> bool:
    """Whether a Slice keeps all of the last axis, as it does where all of a head is rotated."""
    sizes = None if cut.inputs[0] is None else dimensions(cut.inputs[0])
    return sizes is not None and last_axis_bounds(cut) == (0, sizes[-1])


def _through_rotary(operand: Operand, node: ir.Node) -> Operand | None:
    x, positions, cos, sin = node.inputs[:4]
    if operand.axes != BY_HEAD or operand.rotary is not None or operand.norm is not None:
        return None
    assert x is not None
    assert positions is not None
    assert cos is not None
    assert sin is not None
    found = Rotary(positions, cos, sin, attribute_int(node, "interleaved", 0))
    return replace(operand, value=x, rotary=found)


def _through_part_of_rotary(operand: Operand, node: ir.Node) -> Operand | None:
    """Goes back through Concat(RotaryEmbedding(X[.., :r]), X[.., r:]), RoPE of the first r dimensions of a head."""
    if len(node.inputs) != 2 or node.inputs[0] is None or operand.axes != BY_HEAD:
        return None
    rotated, rest = node.inputs[0].producer(), made_by(node.inputs[1], "Slice")
    if rotated is None or (rotated.domain, rotated.op_type) != ("com.microsoft", "RotaryEmbedding") or rest is None:
        return None
    turned, x = made_by(rotated.inputs[0], "Slice"), rest.inputs[0]
    sizes = None if x is None else dimensions(x)
    if turned is None or turned.inputs[0] is not x or x is None or sizes is None:
        return None
    parts = [last_axis_bounds(cut) or (0, 0) for cut in (turned, rest)]
    if parts != [(0, parts[0][1]), (parts[0][1], sizes[-1])]:
        return None
    found = _through_rotary(operand, rotated)
    return None if found is None else replace(found, value=x)


def _through_norm(operand: Operand, node: ir.Node) -> Operand | None:
    x, weight = node.inputs[:2]
    # The norm is over the last axis, which must be a head's.
    if operand.axes[-1] != "D" or operand.norm is not None or x is None or not is_constant(weight):
        return None
    return replace(operand, value=x, norm=Norm(weight, attribute_float(node, "epsilon", 1e-5)))


def _through_cache(operand: Operand, node: ir.Node) -> Operand | None:
    """Goes back through Concat(past, new) along the tokens."""
    if operand.axes != BY_HEAD or len(node.inputs) != 2 or attribute_int(node, "axis") not in {2, -2}:
        return None
    past, new = node.inputs
    if past is None or new is None or not past.is_graph_input():
        return None
    return replace(operand, value=new, past=past, present=node.outputs[0])


def _through_repetition(operand: Operand, node: ir.Node) -> Operand | None:
    """Goes back through Reshape(Expand(Unsqueeze(X [B, G, T, d], 2)), [B, G n, T, d]), each head n times."""
    spread = made_by(node.inputs[0], "Expand")
    apart = made_by(spread.inputs[0], "Unsqueeze") if spread is not None else None
    if operand.axes != BY_HEAD or apart is None or apart.inputs[0] is None or integers(apart.inputs[1]) != [2]:
        return None
    before, after = dimensions(apart.inputs[0]), dimensions(operand.value)
    if before is None or after is None or len(before) != 4 or len(after) != 4:
        return None
    # If all other axes keep their sizes, only the new axis can have been expanded.
    if not all(same_size(before[axis], after[axis]) for axis in (0, 2, 3)):
        return None
    heads, expanded = before[1], after[1]
    if not isinstance(heads, int) or not isinstance(expanded, int) or expanded % heads:
        return None
    return replace(operand, value=apart.inputs[0], repeated=operand.repeated * (expanded // heads))


def _through_heads(operand: Operand, node: ir.Node) -> Operand | None:
    """Goes back through Reshape(X [B, S, heads d], [B, S, heads, d])."""
    x = node.inputs[0]
    before, after = (dimensions(value) for value in (x, operand.value) if value is not None)
    if x is None or operand.axes != BY_TOKEN or before is None or after is None or (len(before), len(after)) != (3, 4):
        return None
    width, head_size = before[2], after[3]
    if not isinstance(width, int) or not isinstance(head_size, int) or width % head_size:
        return None
    heads = width // head_size
    # The result gives head_size. If two of the other three sizes are known to be right, so is the third, because the
    # number of elements is the same.
    right = [same_size(before[0], after[0]), same_size(before[1], after[1]), after[2] == heads]
    if sum(right) < 2:
        return None
    return replace(operand, value=x, axes=(), heads=heads, head_size=head_size)


def _with_heads(operand: Operand) -> Operand:
    """An operand of four axes, with its heads and head size filled in; NoMatchError if they are not known."""
    sizes = dimensions(operand.value)
    if sizes is None or len(sizes) != 4:
        raise NoMatchError(
            f"{operand.value.name} has the shape {operand.value.shape}, expected four axes: batch, head, token, element"
        )
    heads, head_size = (sizes[operand.axes.index(axis)] for axis in ("H", "D"))
    if not isinstance(heads, int) or not isinstance(head_size, int):
        raise NoMatchError(
            f"{operand.value.name} has {heads} heads of {head_size}, expected numbers that the graph says"
        )
    return replace(operand, heads=heads, head_size=head_size)
