# SPDX-License-Identifier: Apache-2.0
"""Reads float32 weights of plain graphs and writes them as Q4NX initializers, in narrow blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from flownpu import _native
from flownpu.graph_rewrites.node import unique_name
from flownpu.graph_rewrites.plain.graph import made_by
from flownpu.graph_rewrites.q4nx_tensor import Q4NXTensor
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

# The key of a Q4NX initializer's metadata with its source, a FloatWeight.
_SOURCE = "flownpu.float_source"
# How many weights are compared at a time: 2^20 take 4 MB, and a few copies of that.
_WEIGHTS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class FloatWeight:
    """A constant weight W[M, K] of a graph.

    Attributes:
        value: the constant in the graph; `obstacle` says if its type or size cannot become Q4NX.
        transposed: whether it is stored as [K, M].
    """

    value: ir.Value
    transposed: bool

    @property
    def rows(self) -> int:
        """M, the output features."""
        return self._sizes[int(self.transposed)]

    @property
    def columns(self) -> int:
        """K, the input features."""
        return self._sizes[int(not self.transposed)]

    def obstacle(self) -> str | None:
        """Why this weight cannot become Q4NX, or None if it can."""
        if self.value.dtype != ir.DataType.FLOAT:
            return f"the weight {self.value.name} is {self.value.dtype}, expected FLOAT; export with float32"
        for name, size, block in (("rows", self.rows, q4nx.BLOCK_ROWS), ("columns", self.columns, q4nx.GROUP)):
            if size < block:
                return f"{self.value.name} has {size} {name}, less than {block}, which a block of Q4NX has at least"
        return None

    def initializer(self, graph: ir.Graph, *, tied: bool = False) -> ir.Value:
        """The weight's Q4NX initializer, which is packed when it is read; all users of the weight share it.

        Args:
            graph: the graph that the initializer is added to.
            tied: share that of another weight too if all numbers are equal (exporters write a tied weight twice).
        """
        for existing in graph.initializers.values():
            source = existing.meta.get(_SOURCE)
            if source == self or (tied and isinstance(source, FloatWeight) and self._equals(source)):
                return existing
        value = _initializer(self._constant(), f"{self.value.name}_Q4NX", graph)
        value.meta[_SOURCE] = self
        return value

    def _constant(self) -> _native.Q4NXConstant:
        # C++ gets only the tensor. If C++ kept the graph alive, Python's garbage collector could not free it.
        stored = self._stored()
        return _native.Q4NXConstant.of_floats(
            partial(_numbers, stored), partial(_release, stored), self.rows, self.columns, self.transposed
        )

    def _equals(self, other: FloatWeight) -> bool:
        if (self.rows, self.columns) != (other.rows, other.columns):
            return False
        ours, theirs = _numbers(self._stored()), _numbers(other._stored())
        return all(np.array_equal(self._rows(ours, part), other._rows(theirs, part)) for part in self._parts())

    def _parts(self) -> list[slice]:
        at_once = max(1, _WEIGHTS_AT_ONCE // (self.columns * q4nx.BLOCK_ROWS)) * q4nx.BLOCK_ROWS
        return [slice(first, min(first + at_once, self.rows)) for first in range(0, self.rows, at_once)]

    def _stored(self) -> ir.TensorProtocol:
        tensor = ir.convenience.get_const_tensor(self.value)
        assert tensor is not None
        return tensor

    def _rows(self, stored: NDArray[np.float32], part: slice) -> NDArray[np.float32]:
        return np.ascontiguousarray(stored[:, part].T if self.transposed else stored[part])

    @property
    def _sizes(self) -> tuple[int, int]:
        assert self.value.shape is not None
        first, second = self.value.shape.numpy()
        return first, second


def float_weight(value: ir.Value | None, *, transposed: bool) -> FloatWeight | None:
    """The constant matrix that a value equals or transposes; None if there is none.

    Args:
        value: a node's input.
        transposed: whether the node takes the weight as [K, M].
    """
    node = made_by(value, "Transpose")
    if node is not None and ("perm" not in node.attributes or tuple(node.attributes["perm"].as_ints()) == (1, 0)):
        value, transposed = node.inputs[0], not transposed
    if value is None or value.is_graph_input() or ir.convenience.get_const_tensor(value) is None:
        return None
    if value.shape is None or value.shape.rank() != 2:
        return None
    return FloatWeight(value, transposed)


def stacked_initializer(weights: Sequence[FloatWeight], graph: ir.Graph) -> ir.Value:
    """A Q4NX initializer of several weights with equal columns, one after the other, each in blocks of its own."""
    constants = [weight._constant() for weight in weights]
    return _initializer(_native.Q4NXConstant.of_parts(constants), f"{weights[0].value.name}_and_others_Q4NX", graph)


def _initializer(weight: _native.Q4NXConstant, name: str, graph: ir.Graph) -> ir.Value:
    name = unique_name(graph, name)
    tensor = Q4NXTensor(weight, name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
    graph.register_initializer(value)
    return value


def _numbers(stored: ir.TensorProtocol) -> NDArray[np.float32]:
    """The elements of a constant as it is stored, [M, K] or [K, M]."""
    return np.ascontiguousarray(stored.numpy())


def _release(stored: ir.TensorProtocol) -> None:
    """Releases the mapping of a weight in an external file, because pages that were read count as used memory."""
    if isinstance(stored, ir.ExternalTensor):
        stored.release()
