# SPDX-License-Identifier: Apache-2.0
"""RoPE in its parts -> RotaryEmbedding."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir import tape

from flownpu.graph_rewrites.node import unique_name
from flownpu.graph_rewrites.plain.graph import (
    NoMatchError,
    constant,
    dimensions,
    fold_each,
    input_of_size,
    insert_before,
    integers,
    is_operator,
    last_axis_bounds,
    made_by,
    only_user,
    other_operand,
    replace,
    with_constant,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from flownpu.graph_rewrites.report import Miss

# The key of a table's metadata with its frequencies and factor, so that layers share the table.
_SOURCE = "flownpu.rotary_source"


class _Angles(NamedTuple):
    """A cosine or sine of angles, factor * function(positions * frequencies).

    Attributes:
        function: "Cos" or "Sin".
        positions: int64 [B or 1, S].
        frequencies: float32 [d/2].
        factor: a factor of the result.
    """

    function: str
    positions: ir.Value
    frequencies: NDArray[np.float32]
    factor: float


class _Match(NamedTuple):
    x: ir.Value
    cos: _Angles
    sin: _Angles
    total: ir.Node


def fold_rotary_embedding(model: ir.Model, positions: int) -> tuple[int, list[Miss]]:
    """Folds the rotation of each head's halves by the angles of a token's position.

    X * cos(p f) + Concat(-X[d/2:], X[:d/2]) * sin(p f)     for X [B, H, S, d], p positions, f frequencies
        -> com.microsoft.RotaryEmbedding(X, p, cos table [positions, d/2], sin table [positions, d/2])

    The tables have the numbers that the graph would compute: products and cosines in float32.

    Args:
        model: a plain graph; changed in place.
        positions: how many rows the tables have, which is the longest context.

    Returns:
        How many were folded, and the near misses: nodes Neg(Slice(..)) that are not part of such a rotation.
    """
    ids: dict[object, ir.Value] = {}

    def fold(node: ir.Node) -> bool:
        if not is_operator(node, "Neg") or made_by(node.inputs[0], "Slice") is None:
            return False
        _rewrite(model.graph, _match(node), positions, ids)
        return True

    return fold_each(model, "rotary_embedding", fold)


def _match(negated: ir.Node) -> _Match:
    joined = only_user(negated.outputs[0])
    if (
        joined is None
        or joined.op_type != "Concat"
        or len(joined.inputs) != 2
        or joined.inputs[0] is not negated.outputs[0]
    ):
        raise NoMatchError("the negated half is not put before the other half (Concat)")
    x = _halves(negated, joined)
    with_sin = only_user(joined.outputs[0])
    total = only_user(with_sin.outputs[0]) if with_sin is not None else None
    if with_sin is None or total is None or (with_sin.op_type, total.op_type) != ("Mul", "Add"):
        raise NoMatchError("the swapped halves are not multiplied by sin(..) and added to X cos(..)")
    with_cos = made_by(other_operand(total, with_sin.outputs[0]), "Mul")
    if with_cos is None or not any(operand is x for operand in with_cos.inputs):
        raise NoMatchError("the swapped halves are added to something else than X cos(..)")
    cos = _angles(other_operand(with_cos, x), "Cos")
    sin = _angles(other_operand(with_sin, joined.outputs[0]), "Sin")
    if cos.positions is not sin.positions or not np.array_equal(cos.frequencies, sin.frequencies):
        raise NoMatchError("the cosine and the sine are of different angles")
    sizes = dimensions(x)
    if sizes is None or len(sizes) != 4 or sizes[-1] != 2 * len(cos.frequencies):
        raise NoMatchError(f"X has the shape {x.shape}, expected [batch, heads, tokens, {2 * len(cos.frequencies)}]")
    return _Match(x, cos, sin, total)


def _halves(negated: ir.Node, joined: ir.Node) -> ir.Value:
    """The X in Concat(-X[.., d/2:], X[.., :d/2]); NoMatchError if the nodes have another form."""
    parts = made_by(negated.inputs[0], "Slice"), made_by(joined.inputs[1], "Slice")
    if parts[0] is None or parts[1] is None or parts[0].inputs[0] is not parts[1].inputs[0]:
        raise NoMatchError("the halves are not cut out of one X")
    x = parts[0].inputs[0]
    sizes = None if x is None else dimensions(x)
    if x is None or sizes is None or not isinstance(sizes[-1], int) or sizes[-1] % 2:
        raise NoMatchError(f"the last axis of X is {None if sizes is None else sizes[-1]}, expected an even number")
    size, last = sizes[-1], len(sizes) - 1
    for part, expected in zip(parts, ((size // 2, size), (0, size // 2)), strict=True):
        assert part is not None
        bounds = last_axis_bounds(part)
        if bounds is None:
            raise NoMatchError("the halves' bounds are computed, or of another axis than the last")
        if bounds != expected:
            raise NoMatchError(
                f"a half is [{bounds[0]}, {bounds[1]}) of {size}, expected [{expected[0]}, {expected[1]})"
            )
    if joined.attributes["axis"].as_int() not in {-1, last}:
        raise NoMatchError("the halves are joined along another axis than the last")
    return x


def _angles(value: ir.Value | None, function: str) -> _Angles:
    """The angles whose cosine or sine a factor [B, 1, S, d] of the halves is; NoMatchError if it has another form."""
    heads = made_by(value, "Unsqueeze")
    if heads is None or integers(heads.inputs[1]) != [1]:
        raise NoMatchError(f"{function.lower()}(..) is not repeated for each head (Unsqueeze of axis 1)")
    factor, inner = 1.0, heads.inputs[0]
    if (scaled := with_constant(made_by(inner, "Mul"))) is not None:
        inner, factor = scaled
    node = made_by(inner, function)
    twice = made_by(node.inputs[0], "Concat") if node is not None else None
    if twice is None or len(twice.inputs) != 2 or twice.inputs[0] is not twice.inputs[1]:
        raise NoMatchError(f"a factor of the halves is not {function}(Concat(angles, angles))")
    transposed = made_by(twice.inputs[0], "Transpose")
    product = made_by(transposed.inputs[0], "MatMul") if transposed is not None else None
    if transposed is None or product is None or tuple(transposed.attributes["perm"].as_ints()) != (0, 2, 1):
        raise NoMatchError("the angles are not Transpose(MatMul(frequencies, positions))")
    spread = made_by(product.inputs[0], "Expand")
    frequencies = constant(spread.inputs[0] if spread is not None else product.inputs[0])
    if frequencies is None or frequencies.size != max(frequencies.shape, default=0):
        raise NoMatchError("the frequencies are not a constant vector: they may depend on how long the text is")
    cast = made_by(product.inputs[1], "Cast")
    column = made_by(cast.inputs[0], "Unsqueeze") if cast is not None else None
    if column is None or integers(column.inputs[1]) != [1] or column.inputs[0] is None:
        raise NoMatchError("the positions are not integers [batch, tokens]")
    return _Angles(function, column.inputs[0], frequencies.astype(np.float32).reshape(-1), factor)


def _rewrite(graph: ir.Graph, match: _Match, positions: int, ids: dict[object, ir.Value]) -> None:
    builder = tape.Tape()
    tables = [_table(graph, angles, positions) for angles in (match.cos, match.sin)]
    rotated = builder.op(
        "RotaryEmbedding",
        [match.x, _position_ids(builder, graph, match, ids), *tables],
        domain="com.microsoft",
        version=1,
        name=f"{match.total.name}/rope",
    )
    rotated.type, rotated.shape = match.x.type, match.x.shape
    insert_before(match.total, builder.nodes)
    replace(match.total.outputs[0], rotated)


def _position_ids(builder: tape.Tape, graph: ir.Graph, match: _Match, ids: dict[object, ir.Value]) -> ir.Value:
    """The positions [B, S]; a single row [1, S] is repeated for the batch, once for all layers."""
    positions = match.cos.positions
    sizes, of = dimensions(positions), dimensions(match.x)
    if sizes is not None and sizes[0] != 1:
        return positions
    batch_size = None if of is None else of[0]
    key = positions, match.x if batch_size is None else batch_size
    if key not in ids:
        source, axis = input_of_size(graph, batch_size) or (match.x, 0)
        batch = builder.op("Shape", [source], {"start": axis, "end": axis + 1})
        one = builder.op("Constant", [], {"value_ints": [1]})
        repeated = builder.op("Expand", [positions, builder.op("Concat", [batch, one], {"axis": 0})])
        repeated.type = ir.TensorType(ir.DataType.INT64)
        repeated.shape = ir.Shape([batch_size, None if sizes is None else sizes[1]])
        ids[key] = repeated
    return ids[key]


def _table(graph: ir.Graph, angles: _Angles, positions: int) -> ir.Value:
    source = angles.function, angles.frequencies.tobytes(), angles.factor, positions
    for existing in graph.initializers.values():
        if existing.meta.get(_SOURCE) == source:
            return existing
    compute = {"Cos": np.cos, "Sin": np.sin}[angles.function]

    def rows() -> ir.TensorProtocol:
        products = np.arange(positions, dtype=np.float32)[:, None] * angles.frequencies
        return ir.Tensor((compute(products) * np.float32(angles.factor)).astype(np.float32))

    name = unique_name(graph, f"rotary.{angles.function.lower()}")
    shape = ir.Shape([positions, len(angles.frequencies)])
    tensor = ir.LazyTensor(rows, ir.DataType.FLOAT, shape, name=name)
    value = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=shape, const_value=tensor)
    value.meta[_SOURCE] = source
    graph.register_initializer(value)
    return value
