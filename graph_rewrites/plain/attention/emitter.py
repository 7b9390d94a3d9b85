# SPDX-License-Identifier: Apache-2.0
"""Writes a FlowQKVAttention in place of the parts of an attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir
from onnx_ir import tape

from flownpu.graph_rewrites.node import unique_name
from flownpu.graph_rewrites.plain.attention.mask import are_next
from flownpu.graph_rewrites.plain.attention.scores import finite, whole_slice
from flownpu.graph_rewrites.plain.graph import constant, dimensions, input_of_size, insert_before, made_by, scalar
from flownpu.ops.definitions.onnx_function import DOMAIN, VERSION

if TYPE_CHECKING:
    from flownpu.graph_rewrites.plain.attention.operand import Operand
    from flownpu.graph_rewrites.plain.attention.scaled_dot_product_attention import Match
    from flownpu.graph_rewrites.plain.attention.scores import Addend


class Emitter:
    """Writes the operators of one graph. Values that several layers need are computed once, before the first layer."""

    def __init__(self, model: ir.Model) -> None:
        self._graph = model.graph
        self._made: dict[object, ir.Value] = {}
        self._tape = tape.Tape()

    def emit(self, match: Match) -> tuple[ir.Value, tuple[ir.Value | None, ir.Value | None]]:
        """Writes the operator for an attention, before the node of its product with the values.

        Returns:
            Its output [B, S, H d]; and present_key and present_value, or None for both without a KV cache.
        """
        query, key, value = (self._by_token(side) for side in (match.query, match.key, match.value))
        past = match.key.past, match.value.past
        sizes = dimensions(match.query.value)
        # Without a cache the inputs of lengths may be absent. But if S is a number, ONNX Runtime 1.31.1 takes the
        # lengths that the operator's definition computes from it for int64, and refuses the model.
        known = sizes is not None and isinstance(sizes[match.query.axes.index("S") if match.query.axes else 1], int)
        lengths = self._lengths(match) if past[0] is not None or known else (None, None)
        rotary, norms = match.query.rotary, (match.query.norm, match.key.norm)
        # Without positions the operator counts on from its KV cache, and needs no tensor that long prompts must slice.
        counted = rotary is not None and are_next(rotary.positions, past[0])
        inputs: list[ir.Value | None] = [query, key, value, *past, *lengths]
        inputs += [None] * 3 if rotary is None else [rotary.cos, rotary.sin, None if counted else rotary.positions]
        inputs += [self._bias(match), *(None if norm is None else norm.weight for norm in norms)]
        while inputs[-1] is None:
            inputs.pop()
        outputs = self._tape.op_multi_out(
            "FlowQKVAttention",
            inputs,
            self._attributes(match),
            num_outputs=3,  # ONNX Runtime needs all outputs of the definition, also those that nothing reads
            domain=DOMAIN,
            version=VERSION,
            name=f"{match.softmax.name}/attention",
        )
        self._type(outputs[0], ir.DataType.FLOAT, self._shape(match))
        self._write(match.product)
        if past[0] is not None:
            return outputs[0], (outputs[1], outputs[2])
        return outputs[0], (None, None)

    def by_head(self, match: Match, output: ir.Value) -> ir.Value:
        """Writes [B, S, H d] -> [B, H, S, d], for a graph that continues with separate heads."""
        sizes = self._integers([0, 0, match.query.heads, match.query.head_size])
        apart = self._tape.op("Reshape", [output, sizes])
        value = self._tape.op("Transpose", [apart], {"perm": [0, 2, 1, 3]})
        self._write(match.product)
        return value

    def _attributes(self, match: Match) -> dict[str, int | float]:
        query, rotary = match.query, match.query.rotary
        attributes: dict[str, int | float] = {
            "num_heads": query.heads,
            "kv_num_heads": match.key.heads,
            "head_size": query.head_size,
            "scale": match.scale,
            "causal": int(match.seen.causal),
        }
        if match.scores.softcap:
            attributes["softcap"] = match.scores.softcap
        if match.seen.window > 0:
            attributes["local_window_size"] = match.seen.window
        if rotary is not None:
            attributes |= {"do_rotary": 1, "rotary_interleaved": rotary.interleaved}
        if query.norm is not None:
            attributes["qk_norm_epsilon"] = query.norm.epsilon
        return attributes

    def _by_token(self, side: Operand) -> ir.Value:
        """The value of an operand as [B, S, heads d]."""
        if not side.axes:
            return side.value
        value = side.value
        if side.axes != ("B", "S", "H", "D"):
            order = [side.axes.index(axis) for axis in ("B", "S", "H", "D")]
            value = self._tape.op("Transpose", [value], {"perm": order})
        joined = self._tape.op("Reshape", [value, self._integers([0, 0, side.heads * side.head_size])])
        sizes = dimensions(side.value)
        assert sizes is not None
        batch, tokens = (sizes[side.axes.index(axis)] for axis in ("B", "S"))
        return self._type(joined, ir.DataType.FLOAT, [batch, tokens, side.heads * side.head_size])

    def _shape(self, match: Match) -> list[int | str | None]:
        sizes, axes = dimensions(match.query.value), match.query.axes or ("B", "S", "")
        assert sizes is not None
        return [sizes[axes.index("B")], sizes[axes.index("S")], match.query.heads * match.query.head_size]

    def _lengths(self, match: Match) -> tuple[ir.Value, ir.Value]:
        """seqlens_k int32 [B] and total_sequence_length int32 [1]. Rows have T positions: the mask hides padding."""
        total, batch = self._total(match), self._size(match.query, "B")
        number = total.const_value
        tokens = None if number is None else int(number.numpy()[0])

        def lengths() -> ir.Value:
            if tokens is not None:
                return self._tape.op("Expand", [self._integers([tokens - 1], ir.DataType.INT32), batch])
            last = self._tape.op("Sub", [total, self._integers([1])])
            every = self._tape.op("Expand", [last, batch])
            return self._tape.op("Cast", [every], {"to": ir.DataType.INT32.value})

        def total32() -> ir.Value:
            if tokens is not None:
                return self._integers([tokens], ir.DataType.INT32)
            return self._tape.op("Cast", [total], {"to": ir.DataType.INT32.value})

        return self._once(("seqlens_k", total, batch), lengths), self._once(("total", total), total32)

    def _total(self, match: Match) -> ir.Value:
        """T, the total number of tokens, int64 [1]."""
        new, past = self._size(match.query, "S"), match.key.past
        if past is None:
            return new
        sizes = dimensions(past)
        before = self._once(
            ("size", sizes[2] if sizes and sizes[2] is not None else past),
            lambda: self._tape.op("Shape", [past], {"start": 2, "end": 3}),
        )
        return self._once(("T", before, new), lambda: self._tape.op("Add", [before, new]))

    def _size(self, side: Operand, axis: str) -> ir.Value:
        """The size of an axis, int64 [1]."""
        sizes, axes = dimensions(side.value), side.axes or ("B", "S", "")
        assert sizes is not None
        position = axes.index(axis)
        size = sizes[position]
        if isinstance(size, int):
            return self._integers([size])
        key = ("size", size) if size is not None else ("size", side.value, position)
        before = side.value if side.axes else _before_projection(side.value)
        of, place = input_of_size(self._graph, size) or (before, position)
        return self._once(key, lambda: self._tape.op("Shape", [of], {"start": place, "end": place + 1}))

    def _bias(self, match: Match) -> ir.Value | None:
        """The sum of all addends of the scores, float32 [B or 1, H or 1, S, T]; None if there are none."""
        addends = match.scores.addends
        if not addends:
            return None
        total, new = self._total(match), self._size(match.query, "S")

        def summed() -> ir.Value:
            bias = self._addend(addends[0], total)
            for addend in addends[1:]:
                bias = self._tape.op("Add", [bias, self._addend(addend, total)])
            ones = self._integers([1, 1])
            shape = self._tape.op("Concat", [ones, new, total], {"axis": 0})
            return self._type(self._tape.op("Expand", [bias, shape]), ir.DataType.FLOAT, None)

        return self._once(("bias", *(_key(addend) for addend in addends), total, new), summed)

    def _addend(self, addend: Addend, total: ir.Value) -> ir.Value:
        """One addend, for exactly T keys; infinite constants in it become finite."""
        where = made_by(addend.value, "Where")
        if addend.condition is None and where is not None:
            numbers = [scalar(value) for value in where.inputs[1:]]
            if all(number is not None for number in numbers):
                return self._choice(where.inputs[0], [number for number in numbers if number is not None], total)
        if addend.condition is not None:
            numbers_of_mask = [float("-inf"), 0.0] if addend.inverted else [0.0, float("-inf")]
            return self._choice(addend.condition, numbers_of_mask, total)
        assert addend.value is not None
        return self._sliced(addend.value, total)

    def _choice(self, condition: ir.Value | None, numbers: list[float], total: ir.Value) -> ir.Value:
        assert condition is not None
        sides = [self._number(finite(number)) for number in numbers]
        value = self._tape.op("Where", [self._sliced(condition, total), *sides])
        return self._type(value, ir.DataType.FLOAT, None)

    def _sliced(self, value: ir.Value, total: ir.Value) -> ir.Value:
        """The mask, sliced to T keys again: the bound of its own Slice may be computed from the operator's output."""
        source = whole_slice(value)
        if source is None:
            return value
        bounds = [self._integers([0]), total, self._integers([3])]
        return self._once(("slice", source, total), lambda: self._tape.op("Slice", [source, *bounds]))

    def _integers(self, values: list[int], dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
        return self._constant("integers", ir.tensor(values, dtype=dtype), (dtype, *values))

    def _number(self, value: float) -> ir.Value:
        return self._constant("number", ir.tensor(value, dtype=ir.DataType.FLOAT), value)

    def _constant(self, kind: str, tensor: ir.TensorProtocol, key: object) -> ir.Value:
        if (kind, key) not in self._made:
            name = unique_name(self._graph, f"attention.{kind}")
            tensor.name = name
            value = ir.Value(
                name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor
            )
            self._graph.register_initializer(value)
            self._made[kind, key] = value
        return self._made[kind, key]

    def _once(self, key: object, make: object) -> ir.Value:
        if key not in self._made:
            assert callable(make)
            self._made[key] = make()
        return self._made[key]

    def _write(self, before: ir.Node) -> None:
        insert_before(before, self._tape.nodes)
        self._tape = tape.Tape()

    @staticmethod
    def _type(value: ir.Value, dtype: ir.DataType, shape: list[int | str | None] | None) -> ir.Value:
        value.type = ir.TensorType(dtype)
        if shape is not None:
            value.shape = ir.Shape(shape)
        return value


def _before_projection(value: ir.Value) -> ir.Value:
    """The input of a projection, which has the same batch and tokens: rules may replace the projection itself."""
    while (node := made_by(value, "MatMul", "Add")) is not None:
        constants = [position for position in (0, 1) if constant(node.inputs[position]) is not None]
        source = node.inputs[1 - constants[0]] if len(constants) == 1 else None
        if source is None or (node.op_type == "MatMul" and constants != [1]):
            break
        value = source
    return value


def _key(addend: Addend) -> tuple[object, ...]:
    """A key that is equal for equal addends: layers may have separate Slice and Where nodes for one mask."""
    where = made_by(addend.value, "Where")
    if addend.condition is None and where is not None:
        numbers = tuple(scalar(value) for value in where.inputs[1:])
        if None not in numbers:
            return whole_slice(where.inputs[0]) or where.inputs[0], *numbers
    value = addend.value if addend.condition is None else addend.condition
    return whole_slice(value) or value, addend.inverted, addend.condition is None
