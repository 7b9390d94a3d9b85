# SPDX-License-Identifier: Apache-2.0
"""Models of a few nodes, with their functions, run in ONNX Runtime's CPU provider without FlowNPU."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from flownpu.ops import definitions
from flownpu.ops.definitions.onnx_function import DOMAIN

BFLOAT16 = ml_dtypes.bfloat16


def node(
    op_type: str, inputs: list[ir.Value | None], outputs: int = 1, domain: str = DOMAIN, **attributes: Any
) -> ir.Node:
    return ir.node(op_type, inputs, attributes, domain=domain, num_outputs=outputs)


def value(name: str, array: np.ndarray) -> ir.Value:
    return ir.Value(
        name=name, type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape([None] * array.ndim)
    )


def model_of(
    nodes: list[ir.Node], feeds: list[ir.Value], constants: dict[ir.Value, np.ndarray] | None = None, opset: int = 21
) -> ir.Model:
    """A model that has every output of the nodes."""
    for known, array in (constants or {}).items():
        known.const_value = ir.tensor(array, name=known.name)
    outputs = [output for n in nodes for output in n.outputs]
    for i, output in enumerate(outputs):
        output.name = f"output_{i}"
    graph = ir.Graph(
        feeds, outputs, nodes=nodes, initializers=list(constants or {}), opset_imports={"": opset}, name="test"
    )
    return ir.Model(graph, ir_version=10)


def run(model: ir.Model, feeds: dict[str, np.ndarray], *, optimised: bool = True) -> list[np.ndarray]:
    """Runs a model in stock ONNX Runtime."""
    options = ort.SessionOptions()
    if not optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    proto = ir.to_proto(model).SerializeToString()
    return run_session(ort.InferenceSession(proto, options, providers=["CPUExecutionProvider"]), feeds)


def run_session(session: ort.InferenceSession, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Runs a session by OrtValues, since ONNX Runtime's Python interface takes bfloat16 in no other form."""
    binding = session.io_binding()
    for name, array in feeds.items():
        if array.dtype == BFLOAT16:
            bits = np.ascontiguousarray(array).view(np.uint16)
            kept = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, ir.DataType.BFLOAT16)
        else:
            kept = ort.OrtValue.ortvalue_from_numpy(array)
        binding.bind_ortvalue_input(name, kept)
    for output in session.get_outputs():
        binding.bind_output(output.name)
    session.run_with_iobinding(binding)
    return [to_numpy(output) for output in binding.get_outputs()]


def to_numpy(output: ort.OrtValue) -> np.ndarray:
    if output.element_type() != ir.DataType.BFLOAT16:
        return output.numpy()
    bits = ctypes.cast(output.data_ptr(), ctypes.POINTER(ctypes.c_uint16))
    return np.ctypeslib.as_array(bits, output.shape()).copy().view(BFLOAT16)


def with_functions(model: ir.Model) -> ir.Model:
    definitions.add_functions(model)
    return model
