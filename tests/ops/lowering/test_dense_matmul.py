# SPDX-License-Identifier: Apache-2.0
"""ops/lowering/dense_matmul: the steps that remain in a session, and their results."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from flownpu.ops.definitions.dense_matmul import reference

RNG = np.random.default_rng(0)
K, M = 48, 40
X = RNG.standard_normal((2, 5, K), dtype=np.float32)
ALL = tuple(X.shape)
FIRST, SECOND = RNG.standard_normal((K, M), dtype=np.float32), RNG.standard_normal((M, K), dtype=np.float32)
BIAS, CODES = RNG.standard_normal(M, dtype=np.float32), RNG.integers(-127, 128, (K, M)).astype(np.int8)
SCALE = RNG.uniform(0.5, 2, M).astype(np.float32) / 128

Lines = list[tuple[str, list[str], str, dict[str, Any]]]


def steps(
    ep_devices: list[Any],
    folder: Path,
    lines: Lines,
    constants: dict[str, np.ndarray],
    shape: tuple[int | str, ...] = ALL,
    x: np.ndarray = X,
) -> tuple[dict[str, int], np.ndarray]:
    """The operators of the session's steps with their counts, and `y` for `x`, computed in float32."""
    nodes = [helper.make_node(op, inputs, [output], output, **attributes) for op, inputs, output, attributes in lines]
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    configuration = onnxruntime.SessionOptions()
    configuration.enable_profiling = True
    configuration.profile_file_prefix = str(folder / "profile")
    # The generic kernels round nothing, and the steps do not depend on the kernels.
    options = {"device": "cpu", "on_unsupported": "error", "cpu_isa": "generic"}
    configuration.add_provider_for_devices(ep_devices, options)
    session = onnxruntime.InferenceSession(model.SerializeToString(), configuration)
    (y,) = session.run(None, {"x": x})
    events = json.loads(Path(session.end_profiling()).read_text())
    return Counter(event["args"]["op_name"] for event in events if event["cat"] == "Kernel"), y


def close(y: np.ndarray, expected: np.ndarray) -> None:
    """At most two products of 48 terms of up to 4 * 4, each with as many float32 roundings as it has terms."""
    np.testing.assert_allclose(y, expected, rtol=0, atol=2 * 48 * 2.0**-24 * 48 * 16 * 16)


def test_feed_forward_becomes_two_products(ep_devices: list[Any], tmp_path: Path) -> None:
    lines: Lines = [
        ("MatMul", ["x", "first"], "a", {}),
        ("Add", ["bias", "a"], "b", {}),
        ("Gelu", ["b"], "c", {"approximate": "tanh"}),
        ("MatMul", ["c", "second"], "d", {}),
        ("Add", ["x", "d"], "y", {}),
    ]
    found, y = steps(ep_devices, tmp_path, lines, {"first": FIRST, "bias": BIAS, "second": SECOND})
    inner = reference(X, FIRST, None, BIAS, activation="gelu_tanh")
    close(y, reference(inner, SECOND, None, None, X))
    assert found == {"DenseMatMul": 2}


@pytest.mark.parametrize(("op_type", "activation"), [("BiasGelu", "gelu"), ("FastGelu", "gelu_tanh")])
def test_activation_with_bias_becomes_part_of_product(
    ep_devices: list[Any], tmp_path: Path, op_type: str, activation: str
) -> None:
    lines: Lines = [("MatMul", ["x", "first"], "a", {}), (op_type, ["a", "bias"], "y", {"domain": "com.microsoft"})]
    found, y = steps(ep_devices, tmp_path, lines, {"first": FIRST, "bias": BIAS})
    close(y, reference(X, FIRST, None, BIAS, activation=activation))
    assert found == {"DenseMatMul": 1}


@pytest.mark.parametrize("transposed", [0, 1])
def test_quantised_weights_stay_as_they_are(ep_devices: list[Any], tmp_path: Path, transposed: int) -> None:
    """ONNX Runtime makes a Gemm between two Reshapes of a product and its bias."""
    lines: Lines = [
        ("DequantizeLinear", ["codes", "scale"], "w", {"axis": 1 - transposed}),
        *([("Transpose", ["w"], "wt", {"perm": [1, 0]})] if transposed else []),
        ("MatMul", ["x", "wt" if transposed else "w"], "a", {}),
        ("Add", ["a", "bias"], "y", {}),
    ]
    codes = np.ascontiguousarray(CODES.T) if transposed else CODES
    found, y = steps(ep_devices, tmp_path, lines, {"codes": codes, "scale": SCALE, "bias": BIAS})
    close(y, reference(X, CODES, SCALE, BIAS))
    assert found == {"DenseMatMul": 1}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([("MatMul", ["x", "first"], "a", {}), ("Add", ["a", "z"], "y", {})], {"DenseMatMul": 1}),
        ([("Gemm", ["x", "second", "z"], "y", {"transB": 1})], {"DenseMatMul": 1}),
        ([("Gemm", ["x", "first", "column"], "y", {})], {"Gemm": 1}),
        ([("Gemm", ["x", "first", "z"], "y", {"alpha": 0.5, "beta": 2.0})], {"Gemm": 1}),
    ],
    ids=["ORT's fusion", "a Gemm", "a column", "factors"],
)
def test_gemm_of_two_axes_takes_residual(
    ep_devices: list[Any], tmp_path: Path, lines: Lines, expected: dict[str, int]
) -> None:
    """ONNX Runtime makes a Gemm of a product of two axes and its addend; only factors and broadcasts stay."""
    x, z, column = X[0], RNG.standard_normal((5, M), dtype=np.float32), RNG.standard_normal((5, 1), dtype=np.float32)
    constants = {"first": FIRST, "second": np.ascontiguousarray(FIRST.T), "z": z, "column": column}
    found, y = steps(ep_devices, tmp_path, lines, constants, x.shape, x)
    alpha, beta = (0.5, 2.0) if lines[0][3].get("alpha") else (1, 1)
    added = column if "column" in lines[0][1] else z
    close(y, alpha * reference(x, FIRST) + beta * added)
    assert found == expected


def test_unknown_sizes_stay_apart(ep_devices: list[Any], tmp_path: Path) -> None:
    """Two unknown sizes, and a residual that turns out to be broadcast."""
    lines: Lines = [
        ("MatMul", ["x", "first"], "a", {}),
        ("Slice", ["x", "zero", "one", "axes"], "m", {}),
        ("Add", ["a", "m"], "y", {}),
    ]
    constants = {"first": FIRST, "zero": np.array([0]), "one": np.array([1]), "axes": np.array([-1])}
    found, y = steps(ep_devices, tmp_path, lines, constants, ("batch", "tokens", K))
    close(y, reference(X, FIRST, None, None, X[..., :1]))
    assert found == {"DenseMatMul": 1, "Slice": 1}


def test_product_read_twice_stays_apart(ep_devices: list[Any], tmp_path: Path) -> None:
    """A product with other readers, and an activation before a bias, are separate steps."""
    lines: Lines = [("MatMul", ["x", "first"], "a", {}), ("Gelu", ["a"], "b", {}), ("Add", ["a", "b"], "y", {})]
    found, y = steps(ep_devices, tmp_path, lines, {"first": FIRST})
    product = reference(X, FIRST)
    close(y, product + reference(X, FIRST, activation="gelu"))
    assert found == {"DenseMatMul": 1, "Gelu": 1, "Add": 1}
