# SPDX-License-Identifier: Apache-2.0
"""Models of a few nodes, with their functions, run in ONNX Runtime's CPU provider without FlowNPU."""

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from flownpu.graph_rewrites.testing import run_session
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


def with_functions(model: ir.Model) -> ir.Model:
    definitions.add_functions(model)
    return model
