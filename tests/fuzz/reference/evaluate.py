# SPDX-License-Identifier: Apache-2.0
"""Evaluates a model with samples in place of values, and says in which bounds each value must be."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from tests.fuzz.reference.samples import Bounds, Samples, Unknown, of, restart


class ReferenceFailed(Exception):  # noqa: N818
    """The reference fails at an operator that ONNX Runtime ran: a bug of the reference."""

    def __init__(self, op_type: str, error: Exception) -> None:
        super().__init__(f"the reference of {op_type} failed: {type(error).__name__}: {error}")
        self.op_type = op_type


Table = dict[tuple[str, str], Callable[["Node"], "Samples | Sequence[Samples | None]"]]


@dataclass
class Node:
    """A node and the samples of its inputs; None: unknown or absent.

    `provider`: the provider's options. `constants`: names of constant values. `makers`, `known`: the node that makes
    each value before this node, and its samples.
    """

    op_type: str
    attributes: dict[str, Any]
    names: list[str]
    values: list[Samples | None]
    outputs: int
    opset: int
    provider: dict[str, str] = field(default_factory=dict)
    constants: frozenset[str] = frozenset()
    makers: dict[str, onnx.NodeProto] = field(default_factory=dict)
    known: dict[str, Samples | None] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.names)

    def has(self, index: int) -> bool:
        """Whether an input is present."""
        return index < len(self.names) and bool(self.names[index])

    def input(self, index: int) -> Samples:
        """The samples of an input. Raises Unknown."""
        value = self.values[index] if self.has(index) else None
        if value is None:
            raise Unknown
        return value

    def optional(self, index: int) -> Samples | None:
        """The samples of an input; None if it is absent. Raises Unknown."""
        return self.input(index) if self.has(index) else None

    def float(self, index: int) -> Samples:
        """The samples of an input of floats. Raises Unknown."""
        value = self.input(index)
        if not value.is_float:
            raise Unknown
        return value

    def integers(self, index: int) -> list[int]:
        """The numbers of an input of known integers. Raises Unknown."""
        return [int(number) for number in self.input(index).exact().reshape(-1)]

    def axes(self, since: int = 13) -> list[int] | None:
        """The axes: an attribute before opset `since`, input 1 from then on; None: there are none."""
        if self.opset < since:
            given = self.attributes.get("axes")
            return None if given is None else list(given)
        return self.integers(1) if self.has(1) else None

    def is_constant(self, index: int) -> bool:
        """Whether an input is an initializer that no run can replace, or computed from constants only."""
        return self.has(index) and self.names[index] in self.constants

    def dequantized(self, index: int) -> list[Samples | None]:
        """The inputs of the DequantizeLinear that made an input, perhaps transposed or reshaped since; else none."""
        maker = self.makers.get(self.names[index])
        while maker is not None and maker.op_type in {"Transpose", "Reshape", "Identity"}:
            maker = self.makers.get(maker.input[0])
        if maker is None or maker.op_type != "DequantizeLinear":
            return []
        return [self.known.get(name) for name in maker.input]

    def scale_behind(self, index: int) -> Samples | None:
        """The scale of an input that a DequantizeLinear made, as above; else None."""
        return (self.dequantized(index) or [None, None])[1]


@cache
def references() -> Table:
    """The reference of each operator, by domain and name."""
    from tests.fuzz.reference import attention, pools, products, standard, states

    return {
        key: function
        for family in (standard, pools, products, attention, states)
        for key, function in family.TABLE.items()
    }


def evaluate(
    model: onnx.ModelProto, feed: dict[str, NDArray[Any]], provider: dict[str, str] | None = None
) -> dict[str, Bounds | None]:
    """The bounds of all values of a model that ONNX Runtime runs, by name; None for unknown ones.

    Raises:
        ReferenceFailed: an operator's reference fails.
    """
    restart()
    values: dict[str, Samples | None] = {}
    for tensor in model.graph.initializer:
        values[tensor.name] = _initializer(tensor)
    makers: dict[str, onnx.NodeProto] = {}
    constants = {tensor.name for tensor in model.graph.initializer} - {value.name for value in model.graph.input}
    values |= {name: None if array.dtype == object else of(array) for name, array in feed.items()}
    opset = next(entry.version for entry in model.opset_import if entry.domain == "")
    with np.errstate(all="ignore"):
        for proto in model.graph.node:
            attributes = {a.name: helper.get_attribute_value(a) for a in proto.attribute}
            names = list(proto.input)
            node = Node(
                proto.op_type,
                attributes,
                names,
                [values.get(name) for name in names],
                len(proto.output),
                opset,
                provider or {},
                frozenset(constants),
                makers,
                values,
            )
            made = _made(node, proto.domain)
            makers.update(dict.fromkeys(proto.output, proto))
            values |= {name: value for name, value in zip(proto.output, made, strict=False) if name}
            if all(name in constants for name in names if name):
                constants.update(proto.output)
        return {name: None if value is None else value.bounds() for name, value in values.items()}


def bounds_of_node(
    op_type: str,
    inputs: Sequence[NDArray[Any] | None],
    outputs: int = 1,
    *,
    domain: str = "",
    constants: Sequence[int] = (),
    options: dict[str, str] | None = None,
    opset: int = 21,
    **attributes: Any,
) -> list[Bounds | None]:
    """The bounds of the outputs of one node; None for unknown ones.

    Args:
        op_type: the operator.
        inputs: in the schema's order, None for an absent one.
        outputs: how many there are.
        domain: the operator's domain.
        constants: positions of the inputs that are initializers.
        options: the provider's.
        opset: the version of ONNX's operators.
        attributes: the node's.

    Raises:
        ReferenceFailed: the operator's reference fails.
    """
    restart()
    names = ["" if array is None else f"x{i}" for i, array in enumerate(inputs)]
    values = [None if array is None else of(array) for array in inputs]
    encoded = {name: value.encode() if isinstance(value, str) else value for name, value in attributes.items()}
    node = Node(op_type, encoded, names, values, outputs, opset, options or {}, frozenset(names[i] for i in constants))
    with np.errstate(all="ignore"):
        return [None if made is None else made.bounds() for made in _made(node, domain)[:outputs]]


def _made(node: Node, domain: str) -> list[Samples | None]:
    function = references().get((domain, node.op_type))
    nothing: list[Samples | None] = [None] * node.outputs
    if function is None:
        return nothing
    try:
        made = function(node)
    except (Unknown, MemoryError):
        return nothing
    except Exception as error:
        raise ReferenceFailed(node.op_type, error) from error
    several = [made] if isinstance(made, Samples) else list(made)
    return several + nothing[len(several) :]


def _initializer(tensor: onnx.TensorProto) -> Samples | None:
    if tensor.data_type == TensorProto.STRING:
        return None
    array = onnx.numpy_helper.to_array(tensor)
    return of(array)
