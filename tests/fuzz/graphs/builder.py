# SPDX-License-Identifier: Apache-2.0
"""Builds a random graph node by node, with values of known types and shapes, so that most graphs are valid.

How much of this the model declares is another choice: shapes may be given, symbolic, partly symbolic, or absent.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.fuzz import arrays
from tests.fuzz.arrays import Source
from tests.fuzz.choices import Choices
from tests.fuzz.graphs import schemas

Shape = tuple[int, ...]

SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 17, 31, 32, 33, 64, 65, 100)
# Most elements of an array, usually and in a few graphs: many enough for kernels to use several threads (kElementsEach
# of ops/cpu/broadcast.h), and for sums longer than a vector.
ELEMENTS, MANY_ELEMENTS = 2048, 40_000
_INTEGERS = onnx.AttributeProto.INTS
MOST_RANK = 9  # one more than ops/nodes/tensor.h supports
TYPE_WEIGHTS: dict[int, int] = {
    TensorProto.FLOAT: 60,
    TensorProto.INT64: 10,
    TensorProto.INT32: 7,
    TensorProto.BOOL: 4,
    TensorProto.FLOAT16: 2,
    TensorProto.BFLOAT16: 2,
    TensorProto.INT8: 2,
    TensorProto.UINT8: 2,
}


@dataclass(frozen=True)
class Value:
    """A value of the graph, or (without a name) an absent optional input."""

    name: str = ""
    type: int = 0
    shape: Shape = ()
    constant: bool = False

    @property
    def rank(self) -> int:
        return len(self.shape)


ABSENT = Value()


class Builder:
    """A graph that grows node by node. `choices` is replaced for each node."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        # The first option, which shrunk cases have, is the opset of most exports.
        self.opset = choices.pick((*[21] * 10, 24, 25, 23, 23, 22, 18, 17, 13, *range(7, schemas.NEWEST_OPSET + 1)))
        self.kinds = arrays.WILD if choices.chance(22) else arrays.ORDINARY
        self.mistakes = choices.chance(12)
        self.large = choices.chance(3)
        self.all_outputs = choices.chance(25)
        # In percent: how often an operand is an existing value, and how often a new value is a constant.
        self._reuse = choices.pick((80, 95, 60))
        self._constants = choices.pick((40, 20, 80))
        self._how_shapes_are_known = choices.pick(("given", "named", "mixed", "absent", "mixed"))
        self.values: list[Value] = []
        self.sources: dict[str, Source] = {}
        self.constants: dict[str, Source] = {}
        self.functions: dict[tuple[str, str], onnx.FunctionProto] = {}
        self.nodes: list[onnx.NodeProto] = []
        self._read: set[str] = set()

    # --- Choices, which may be mistakes --------------------------------------------------------------------------

    def mistake(self, percent: float = 10) -> bool:
        """Whether to make a choice that the schema may forbid; never in most graphs."""
        return self.mistakes and self.choices.chance(percent)

    def type_for(self, op_type: str, parameter: str = "T", domain: str = "") -> int:
        """A type that a type parameter may be, mostly one for which ONNX Runtime has kernels."""
        kernels, others = schemas.allowed(op_type, parameter, self.opset, domain)
        if others and self.choices.chance(1.5):
            return self.choices.pick(others)
        return self.choices.weighted([(TYPE_WEIGHTS.get(kind, 1), kind) for kind in sorted(kernels, key=_simplest)])

    def shape(self, least: int = 0, most: int = 4) -> Shape:
        """A random shape."""
        rank = self.choices.pick([r for r in (2, 1, 3, 2, 4, 3, 0, 5) if least <= r <= most] or [least])
        if most == 4 and self.choices.chance(4):
            rank = self.choices.between(5, MOST_RANK)
        return self.fitted([self.size() for _ in range(rank)])

    def size(self) -> int:
        """The size of an axis; sometimes 0."""
        return 0 if self.choices.chance(1.5) else self.choices.pick(SIZES)

    def fitted(self, shape: Sequence[int]) -> Shape:
        """The shape, with axes made smaller, from the first one on, until it is small enough."""
        sizes = list(shape)
        limit = MANY_ELEMENTS if self.large else ELEMENTS
        for axis in range(len(sizes)):
            if math.prod(sizes) > limit:
                sizes[axis] = min(sizes[axis], 1 + sizes[axis] % 3)
        return tuple(sizes)

    # --- Values --------------------------------------------------------------------------------------------------

    def operand(
        self,
        op_type: str,
        parameter: str = "T",
        *,
        domain: str = "",
        least: int = 0,
        most: int = 4,
        fits: Callable[[Value], bool] | None = None,
    ) -> Value:
        """An existing or new value of a type that the operator's parameter may be, with `least` to `most` axes."""
        types = schemas.allowed(op_type, parameter, self.opset, domain)[0]
        found = [v for v in self.values if v.type in types and least <= v.rank and (fits is None or fits(v))]
        if found and self.choices.below(100) < self._reuse:
            return found[-1 - self.choices.below(len(found))]
        return self.source(self.type_for(op_type, parameter, domain), self.shape(least, most))

    def like(self, kind: int, shape: Shape, *, constant: bool | None = None) -> Value:
        """An existing or new value of exactly this type and shape."""
        found = [v for v in self.values if v.type == kind and v.shape == shape and constant in (None, v.constant)]
        if found and self.choices.below(100) < self._reuse:
            return found[-1 - self.choices.below(len(found))]
        return self.source(kind, shape, constant=constant)

    def partner(self, of: Value, kind: int | None = None) -> Value:
        """An existing or new value that broadcasts with another one."""
        kind = of.type if kind is None else kind
        if self.mistake():
            return self.like(kind if self.choices.chance(50) else TensorProto.FLOAT, self.shape())
        found = [v for v in self.values if v.type == kind and broadcast(v.shape, of.shape) is not None]
        if found and self.choices.below(100) < self._reuse - 20:
            return found[-1 - self.choices.below(len(found))]
        shape = list(of.shape)
        match self.choices.below(6):
            case 1 | 2:  # only some of the last axes
                shape = shape[self.choices.below(len(shape) + 1) :]
            case 3:
                shape = [1 if self.choices.chance(50) else size for size in shape]
            case 4:
                shape = []
            case 5:  # larger than the other value
                shape = [self.choices.pick((1, 2, 3)), *(self.size() if size == 1 else size for size in shape)]
                shape = shape[-8:]
        if math.prod(shape) > MANY_ELEMENTS:
            shape = []
        return self.source(kind, tuple(shape))

    def source(self, kind: int, shape: Shape, *, constant: bool | None = None, given: Any = None) -> Value:
        """A new input or constant. `constant`: which of them (None: random). `given`: its numbers (None: random)."""
        if constant is None:
            constant = self.choices.below(100) < self._constants
        if kind not in arrays.FED:
            constant = True
        name = f"{'c' if constant else 'x'}{len(self.constants) + len(self.sources)}"
        numbers = self.choices.pick(self.kinds) if given is None else ""
        seed = self.choices.seed() if given is None else 0
        source = Source(kind, shape, numbers, seed, given)
        (self.constants if constant else self.sources)[name] = source
        value = Value(name, kind, shape, constant)
        self.values.append(value)
        return value

    def integers(
        self, numbers: Sequence[int], kind: int = TensorProto.INT64, *, shape: Shape | None = None, **how: bool
    ) -> Value:
        """A value of these integers: mostly a constant, else an input or the output of an Identity."""
        if kind not in arrays.INTEGERS:
            kind = TensorProto.INT64
        if self.mistake():
            wrong = (-1, 0, 2**31, -(2**63), 2**63 - 1, 1 << 40, 99)
            numbers = [self.choices.pick(wrong) if self.choices.chance(50) else number for number in numbers]
        if self.mistake(3):
            numbers, shape = [*numbers, 1], None
        lowest, highest = (
            int(arrays.limits(arrays.numpy_type(kind)).min),
            int(arrays.limits(arrays.numpy_type(kind)).max),
        )
        numbers = [min(max(number, lowest), highest) for number in numbers]
        shape = (len(numbers),) if shape is None else shape
        constant = how.get("constant", not self.choices.chance(30))
        made = self.source(kind, shape, constant=constant, given=numbers)
        if not constant and kind in (TensorProto.INT64, TensorProto.INT32) and self.choices.chance(30):
            return self.node("Identity", [made], [(kind, shape)])[0]
        return made

    def node(
        self,
        op_type: str,
        inputs: Sequence[Value],
        outputs: Sequence[tuple[int, Shape] | None],
        domain: str = "",
        **attributes: Any,
    ) -> list[Value]:
        """Appends a node; returns the values of its outputs. None in `outputs`: an absent output."""
        names = [value.name for value in inputs]
        while names and not names[-1]:
            names.pop()
        place = len(self.nodes)
        made = [
            ABSENT if given is None else Value(f"v{place}_{i}" if i else f"v{place}", *given)
            for i, given in enumerate(outputs)
        ]
        node = helper.make_node(op_type, names, [v.name for v in made], f"n{place}", domain=domain)
        for name, given in attributes.items():
            if given is not None:
                # An empty list's type has to be named.
                node.attribute.append(helper.make_attribute(name, given, attr_type=_INTEGERS if given == [] else None))
        self.nodes.append(node)
        self._read.update(names)
        self.values += [value for value in made if value.name]
        return made

    def is_read(self, value: Value) -> bool:
        """Whether a node reads the value."""
        return value.name in self._read

    # --- The model -----------------------------------------------------------------------------------------------

    def outputs(self) -> list[Value]:
        """The graph's outputs: values that no node reads, and some others."""
        made = {name for node in self.nodes for name in node.output}
        return [
            value
            for value in self.values
            if value.name in made and (not self.is_read(value) or self.all_outputs or self.choices.chance(12))
        ]

    def model(self) -> bytes:
        """The model, serialised."""
        outputs = [
            helper.make_tensor_value_info(value.name, value.type, None)
            for value in self.outputs()
            if value.type in arrays.FED or value.type == TensorProto.STRING
        ]
        inputs = [self._input(name, source) for name, source in self.sources.items() if name in self._read]
        initializers = [
            arrays.tensor(source.array(), source.type, name)
            for name, source in self.constants.items()
            if name in self._read
        ]
        # An initializer that is also an input is a default value, and no constant.
        if initializers and self.choices.chance(2):
            default = self.choices.pick(initializers)
            inputs.append(helper.make_tensor_value_info(default.name, default.data_type, tuple(default.dims)))
        graph = helper.make_graph(self.nodes, "fuzz", inputs, outputs, initializers)
        domains = [("", self.opset), ("com.microsoft", 1), ("ai.flownpu", 1)]
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid(*domain) for domain in domains],
            ir_version=10,
            functions=list(self.functions.values()),
        )
        return bytes(model.SerializeToString())

    def _input(self, name: str, source: Source) -> onnx.ValueInfoProto:
        how = self._how_shapes_are_known
        if how == "mixed":
            how = self.choices.pick(("given", "named", "partly", "absent"))
        shape: list[int | str | None] | None = list(source.shape)
        match how:
            case "named":  # equal sizes have equal names, as in exports
                shape = [f"size_{size}" for size in source.shape]
            case "partly":
                shape = [size if self.choices.chance(50) else f"{name}_{i}" for i, size in enumerate(source.shape)]
            case "absent":
                shape = None
        return helper.make_tensor_value_info(name, source.type, shape)

    def feeds(self) -> list[dict[str, Source]]:
        """The inputs of one or several runs: first with the sizes of the graph, sometimes then with others."""
        first = {name: source for name, source in self.sources.items() if name in self._read}
        feeds = [first]
        if self.choices.chance(25):
            feeds.append(self._other_feed(first))
            if self.choices.chance(30):
                feeds.append(first)  # once more: a failed run must have no later effect
        return feeds

    def _other_feed(self, first: dict[str, Source]) -> dict[str, Source]:
        """Inputs with one size changed wherever it occurs, or with one wrong input."""
        sizes = sorted({size for source in first.values() for size in source.shape if source.given is None})
        other = dict(first)
        if not sizes or self.choices.chance(30):
            if first:
                name = self.choices.pick(sorted(first))
                other[name] = self._wrong(first[name])
            return other
        old, new = self.choices.pick(sizes), self.choices.pick((*SIZES[:10], 0))
        for name, source in first.items():
            shape = tuple(new if size == old else size for size in source.shape)
            if source.given is None and math.prod(shape) <= MANY_ELEMENTS:
                other[name] = replace(source, shape=shape)
        return other

    def _wrong(self, source: Source) -> Source:
        if source.given is not None:
            wrong = (0, -1, 99, 2**31 - 1) if source.type in (TensorProto.INT64, TensorProto.INT32) else (0, 1, 99)
            given = tuple(self.choices.pick(wrong) if self.choices.chance(50) else number for number in source.given)
            return replace(source, given=given)
        shape = list(source.shape)
        if shape and not self.choices.chance(30):
            axis = self.choices.below(len(shape))
            shape[axis] = self.choices.pick((shape[axis] + 1, max(shape[axis] - 1, 0), 1, 0))
        else:
            shape = shape[1:] if shape and self.choices.chance(50) else [1, *shape]
        return replace(source, shape=tuple(shape))


def broadcast(*shapes: Shape) -> Shape | None:
    """The shape to which shapes broadcast; None if they do not, or if it is too large."""
    try:
        shape = np.broadcast_shapes(*shapes)
    except ValueError:
        return None
    return shape if math.prod(shape) <= MANY_ELEMENTS else None


def wrapped(choices: Choices, axis: int, rank: int) -> int:
    """The axis, sometimes counted from the end."""
    return axis - rank if choices.chance(40) else axis


def _simplest(kind: int) -> tuple[bool, int]:
    return kind not in TYPE_WEIGHTS, kind


def names_of(values: Collection[Value]) -> list[str]:
    """The values' names."""
    return [value.name for value in values]
