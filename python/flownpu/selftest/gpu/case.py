# SPDX-License-Identifier: Apache-2.0
"""A case: a node of one operator with its inputs and expected outputs, and its run on a device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flownpu import _native
from flownpu.ops.eager_call import DTYPES, as_pair

# The largest relative error of a rounding to float32: half the distance between neighbouring numbers.
F32 = 2.0**-24
# The relative error of a number that becomes one of its two neighbours of float16 (Vulkan does not say which), and the
# smallest normal float16: a smaller number may become 0.
HALF, LEAST_HALF = 2.0**-10, 2.0**-14


@dataclass(frozen=True)
class Expected:
    """An expected output.

    Attributes:
        values: the exact values in float64.
        tolerance: the largest absolute error of each element, or of all.
    """

    values: np.ndarray
    tolerance: np.ndarray | float


@dataclass(frozen=True)
class Case:
    """A node with its inputs and expected outputs.

    Attributes:
        op_type: the operator.
        inputs: the node's inputs in order, None for an absent one.
        expected: the outputs that are compared, by their indices.
        name: the kernel's name, a comma, and the variant, whose `case` sets it.
        outputs: ONNX names of the outputs' types, "" for an unused output.
        domain: the operator's domain.
        attributes: the node's attributes.
        constants: indices of the inputs that are weights.
        options: options of the device.
        read: bytes that the kernels must read, from which a rate is computed; 0: no rate is reported.
        operations: multiplications and additions of a product, likewise.
    """

    op_type: str
    inputs: Sequence[np.ndarray | None]
    expected: Mapping[int, Expected]
    name: str = ""
    outputs: Sequence[str] = ("float",)
    domain: str = "ai.flownpu"
    attributes: Mapping[str, Any] = field(default_factory=dict)
    constants: Sequence[int] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    read: int = 0
    operations: int = 0


class PreparedCase:
    """A case on a device, ready to run."""

    def __init__(self, case: Case, device: _native.Device) -> None:
        self.case = case
        self._inputs = [as_pair(array) for array in case.inputs]
        self._node = _native.PreparedNode(
            device, case.name, case.domain, case.op_type, dict(case.attributes), self._inputs,
            [], list(case.constants), list(case.outputs), 0,
        )  # fmt: skip

    def run(self) -> list[np.ndarray | None]:
        """The outputs; an element that was not written is NaN, or 0 in an integer output."""
        outputs = []
        for shape, name in zip(self._node.infer(self._inputs), self.case.outputs, strict=True):
            dtype = DTYPES.get(name)
            fill = 0 if dtype is None or dtype.kind in "iu" else np.nan
            outputs.append(None if dtype is None else np.full(shape, fill, dtype))
        self._node.run(self._inputs, [as_pair(output) for output in outputs])
        return outputs
