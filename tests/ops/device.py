# SPDX-License-Identifier: Apache-2.0
"""Prepares and runs one node on the CPU device, on numpy arrays, through `flownpu._native`.

`testing` is the C++ module `flownpu_testing`, with parts that users do not see.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from flownpu import _native
from flownpu.ops.eager_call import DTYPES
from flownpu.ops.eager_call import TYPE_NAMES as NAMES
from tests import built

testing = built.load("flownpu_testing")
# Instruction sets of this machine whose kernels give different bits. "amx" gives those of "avx512", but in
# attention of prompts (ATTENTION_ISAS): tests that name no instruction set run it where there is one, and
# tests/ops/cpu/test_matrix_units.py compares the two.
ISAS: list[str] = [name for name in testing.available_isas() if name != "amx"]


def _argument(array: np.ndarray | None) -> tuple[str, np.ndarray] | None:
    if array is None:
        return None
    name = NAMES[array.dtype]
    # numpy's exchange protocol does not know bfloat16: the bytes go as integers of that size.
    return name, array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


class Node:
    """One node, prepared.

    Args:
        op_type: operator, in domain `ai.flownpu` unless `domain` is given.
        inputs: arrays in the schema's order, None for an absent one.
        outputs: the outputs' element types by their ONNX names, "" for an unused one.
        constants: positions of the inputs that are initializers.
        options: cpu_isa, threads, activations.
        domain: the operator's domain.
        version: of the operator's schema; 0 for the last that the device takes.
        attributes: the node's attributes.
    """

    def __init__(
        self,
        op_type: str,
        inputs: list[np.ndarray | None],
        outputs: tuple[str, ...] = ("float",),
        *,
        constants: tuple[int, ...] = (),
        options: dict[str, str] | None = None,
        domain: str = "ai.flownpu",
        version: int = 0,
        **attributes: Any,
    ) -> None:
        self._outputs = outputs
        self._node = _native.PreparedNode(
            _native.make_device("cpu", options or {}),
            "node",
            domain,
            op_type,
            attributes,
            [_argument(array) for array in inputs],
            [],
            list(constants),
            list(outputs),
            version,
        )

    def infer(self, *inputs: np.ndarray | None) -> list[list[int]]:
        """The shapes of the outputs, which are not computed."""
        shapes: list[list[int]] = self._node.infer([_argument(array) for array in inputs])
        return shapes

    def __call__(
        self, *inputs: np.ndarray | None, into: dict[int, np.ndarray] | None = None
    ) -> list[np.ndarray | None]:
        """Runs the node; `into` gives the memory of outputs that are not to be allocated, by position."""
        given = [_argument(array) for array in inputs]
        outputs: list[np.ndarray | None] = []
        for i, shape in enumerate(self._node.infer(given)):
            name = self._outputs[i]
            # NaN shows elements that a kernel forgets to write.
            fresh = None if not name else np.full(shape, 0xFF, np.uint8).astype(DTYPES[name])
            if fresh is not None and fresh.dtype.kind == "f":
                fresh.fill(np.nan)
            outputs.append((into or {}).get(i, fresh))
        self._node.run(given, [_argument(array) for array in outputs])
        return outputs

    def bound(self, inputs: list[np.ndarray | None], outputs: list[np.ndarray | None]) -> Callable[[], None]:
        """A function that runs the node on this memory, without any work before the kernel; for benchmarks."""
        given, into = ([_argument(array) for array in arrays] for arrays in (inputs, outputs))
        return lambda: self._node.run(given, into)


def run(op_type: str, inputs: list[np.ndarray | None], **keywords: Any) -> list[np.ndarray | None]:
    """Prepares a node for these inputs and runs it once."""
    return Node(op_type, inputs, **keywords)(*inputs)


def one(op_type: str, inputs: list[np.ndarray | None], **keywords: Any) -> np.ndarray:
    """Like `run`, for a node with one output."""
    (output,) = run(op_type, inputs, **keywords)
    assert output is not None
    return output
