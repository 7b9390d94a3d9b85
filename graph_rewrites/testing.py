# SPDX-License-Identifier: Apache-2.0
"""Helpers of the rules' tests: models from text, runs in ONNX Runtime, ONNX's checker, error bounds."""

from __future__ import annotations

import copy
import ctypes
from collections import Counter
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes.common import RemoveUnusedNodesPass, ShapeInferencePass

from flownpu.graph_rewrites.native_graph import apply_rules
from flownpu.graph_rewrites.report import Report
from flownpu.ops.definitions import add_functions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from flownpu.graph_rewrites.report import Miss

__all__ = [
    "BFLOAT16_ROUNDING",
    "FLOAT32_ROUNDING",
    "Array",
    "add_functions",
    "apply",
    "attention_bound",
    "bfloat16_values",
    "check",
    "folded",
    "largest",
    "operator_names",
    "pack_nibbles",
    "parse",
    "product_bound",
    "rewritten",
    "run",
    "run_session",
]

Array = np.ndarray[Any, np.dtype[Any]]

HEADER = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1, "ai.flownpu": 1]>'
# The largest relative error of one rounding, half the distance from 1 to the next number: 24 and 8 significant bits.
FLOAT32_ROUNDING = 2.0**-24
BFLOAT16_ROUNDING = 2.0**-8


def parse(graph: str, **initializers: Array) -> ir.Model:
    """A model from a graph in ONNX's textual syntax and from its initializers by name."""
    model = onnx.parser.parse_model(HEADER + graph)
    model.graph.initializer.extend(ir.to_proto(ir.tensor(array, name=name)) for name, array in initializers.items())
    return ir.from_proto(model)


def apply(rule: str, model: ir.Model, misses: list[Miss]) -> int:
    """Applies a rule of the graph library, and appends its near misses; returns how often it was applied."""
    report = Report(before=Counter())
    apply_rules(model, report, [rule])
    misses += report.misses
    return report.applied[rule]


def rewritten(model: ir.Model, *rules: str) -> tuple[ir.Model, list[Miss]]:
    """A copy of `model` after `rules` were applied, with the operators' definitions; and the near misses."""
    model = ir.from_proto(copy.deepcopy(ir.to_proto(model)))
    report = Report(before=Counter())
    apply_rules(model, report, rules)
    RemoveUnusedNodesPass()(model)
    add_functions(model)
    return model, report.misses


def folded(model: ir.Model, rule: Callable[[ir.Model], tuple[int, list[Miss]]]) -> tuple[ir.Model, list[Miss]]:
    """A copy of `model` with inferred shapes, after a rule for plain graphs was applied; and the near misses."""
    model = ir.from_proto(copy.deepcopy(ir.to_proto(model)))
    for value in model.graph.outputs:
        if value.shape is not None and value.shape.rank() == 0:  # the parser's shape if the text has none
            value.shape = None
    ShapeInferencePass(data_prop=True)(model)
    _, misses = rule(model)
    RemoveUnusedNodesPass()(model)
    add_functions(model)
    return model, misses


def operator_names(model: ir.Model) -> list[str]:
    """The graph's operators in order, without constants."""
    return [node.op_type for node in model.graph if node.op_type != "Constant"]


def run(model: ir.Model, feeds: Mapping[str, Array]) -> list[Array]:
    """The model's outputs on ONNX Runtime's CPU provider; bfloat16 arrays are those of ml_dtypes.

    ONNX Runtime's optimisations are off, so that the nodes that run are those of the model.
    """
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])
    return run_session(session, feeds)


def run_session(session: ort.InferenceSession, feeds: Mapping[str, Array]) -> list[Array]:
    """Runs a session on arrays, also bfloat16 ones of ml_dtypes, which ONNX Runtime's `run` does not take."""
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_ortvalue_input(name, _to_ort(np.ascontiguousarray(array)))
    for output in session.get_outputs():
        binding.bind_output(output.name)
    session.run_with_iobinding(binding)
    return [_from_ort(value) for value in binding.get_outputs()]


def check(model: ir.Model) -> None:
    """Passes the model through ONNX's checker."""
    declare_simplified_layer_normalization()
    onnx.checker.check_model(ir.to_proto(model))


def product_bound(x: Array, weight: Array) -> NDArray[np.float64]:
    """How far two float32 evaluations of X . W^T can be apart.

    A sum of K products, in any order and with or without FMA, differs from the exact one by at most
    K u / (1 - K u) times the sum of the products' magnitudes, u = 2^-24 (Higham, "Accuracy and Stability", 3.1).
    """
    terms = x.shape[-1]
    relative = terms * FLOAT32_ROUNDING / (1 - terms * FLOAT32_ROUNDING)
    bound: NDArray[np.float64] = 2 * relative * (np.abs(x).astype(np.float64) @ np.abs(weight).astype(np.float64).T)
    return bound


def pack_nibbles(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Packs 4-bit values [rows, n] into bytes [rows, ceil(n/2)], the low four bits first, as in MatMulNBits."""
    padded: NDArray[np.uint8] = np.pad(values, ((0, 0), (0, values.shape[1] % 2)))
    return padded[:, ::2] | padded[:, 1::2] << np.uint8(4)


def bfloat16_values(generator: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """Random positive float32 values that bf16 holds exactly, for scales that must not be rounded in a comparison."""
    values: NDArray[np.float32] = generator.uniform(0.01, 0.1, shape).astype(ml_dtypes.bfloat16).astype(np.float32)
    return values


def _to_ort(array: Array) -> ort.OrtValue:
    if array.dtype == ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)


def _from_ort(value: ort.OrtValue) -> Array:
    if value.data_type() != "tensor(bfloat16)":
        array: Array = value.numpy()
        return array
    # ONNX Runtime makes no numpy array of a bfloat16 value.
    bits = ctypes.cast(value.data_ptr(), ctypes.POINTER(ctypes.c_uint16))
    return np.ctypeslib.as_array(bits, value.shape()).copy().view(ml_dtypes.bfloat16)


def declare_simplified_layer_normalization() -> None:
    """Declares ONNX Runtime's operator to ONNX's checker, which does not know it although it is in ONNX's domain."""
    name = "SimplifiedLayerNormalization"
    if onnx.defs.has(name):
        return
    schema, parameter = onnx.defs.OpSchema, onnx.defs.OpSchema.FormalParameter
    onnx.defs.register_schema(
        schema(
            name,
            "",
            1,
            inputs=[parameter("X", "T"), parameter("scale", "T")],
            outputs=[
                parameter("Y", "T"),
                parameter("inv_std_var", "T", param_option=schema.FormalParameterOption.Optional),
            ],
            type_constraints=[("T", ["tensor(float)"], "")],
            attributes=[
                schema.Attribute("axis", schema.AttrType.INT, "", required=False),
                schema.Attribute("epsilon", schema.AttrType.FLOAT, "", required=False),
                schema.Attribute("stash_type", schema.AttrType.INT, "", required=False),
            ],
        )
    )


def attention_bound(vectors: float, values: float, *, head_size: int, scale: float, total: int) -> float:
    """How far two float32 evaluations of attention can be apart.

    Let every |q| and |k| be at most a (so that a vector's norm is at most a sqrt(d), which a rotation keeps) and every
    |v| at most b. A score s = scale q . k is a sum of d products of rotated numbers; it is wrong by at most
    scale d a^2 (d + 6) u, for its d roundings and three for each rotation. Softmax turns an error e of all scores into
    a factor within exp(+-2 e) of every weight; the exponentials, their sum and the weighted sum of T values add T + 8
    roundings. The weights sum to 1, so the output is wrong by at most b times that; two evaluations differ by at most
    twice as much.

    Args:
        vectors: a, the largest magnitude in queries and keys.
        values: b, the largest magnitude in values.
        head_size: d.
        scale: the factor of the scores.
        total: T, the number of keys.
    """
    score = scale * head_size * vectors**2 * (head_size + 6) * FLOAT32_ROUNDING
    return float(2 * values * (np.expm1(2 * score) + (total + 8) * FLOAT32_ROUNDING))


def largest(*arrays: Array) -> float:
    """The largest magnitude in all of `arrays`; 0 for empty ones."""
    return max(float(np.abs(array).max(initial=0)) for array in arrays)
