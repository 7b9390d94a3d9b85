# SPDX-License-Identifier: Apache-2.0
"""A node of one operator with what must come out, and how it is run on a device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu import _native
from flownpu.ops.eager_call import DTYPES, as_pair

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["F32", "Case", "Expected", "PreparedCase"]

# Half the distance of neighbouring float32 numbers is at most this share of them: what a rounding is off.
F32 = 2.0**-24


@dataclass(frozen=True)
class Expected:
    """What an output must be.

    Attributes:
        values: float64.
        tolerance: of each element.
    """

    values: np.ndarray
    tolerance: np.ndarray | float


@dataclass(frozen=True)
class Case:
    """A node with its inputs and what must come out.

    Attributes:
        name: the kernel's, a comma, and the variant.
        op_type: the operator.
        inputs: in its order, None for an absent one.
        expected: by the number of the output.
        outputs: types by their ONNX names, "" for an unused one.
        domain: of the operator.
        attributes: of the node.
        constants: numbers of the inputs that are weights.
        options: of the device.
        read: bytes that the kernels have to read at least, for a rate; 0: none is told.
        operations: multiplications and additions of a product, likewise.
    """

    name: str
    op_type: str
    inputs: Sequence[np.ndarray | None]
    expected: Mapping[int, Expected]
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
        self._given = [as_pair(array) for array in case.inputs]
        self._node = _native.PreparedNode(
            device, case.name, case.domain, case.op_type, dict(case.attributes), self._given,
            [], list(case.constants), list(case.outputs), 0,
        )  # fmt: skip

    def run(self) -> list[np.ndarray | None]:
        """The outputs; NaN, or zeros of integers, where nothing was written."""
        outputs = []
        for shape, name in zip(self._node.infer(self._given), self.case.outputs, strict=True):
            dtype = DTYPES.get(name)
            fill = 0 if dtype is None or dtype.kind in "iu" else np.nan
            outputs.append(None if dtype is None else np.full(shape, fill, dtype))
        self._node.run(self._given, [as_pair(output) for output in outputs])
        return outputs
