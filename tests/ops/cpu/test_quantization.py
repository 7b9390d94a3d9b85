# SPDX-License-Identifier: Apache-2.0
"""QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear and MatMulInteger on the CPU, against float64 and ORT."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from tests.ops.cpu.within_bounds import check
from tests.ops.device import ISAS, NAMES, one, run

RNG = np.random.default_rng(3)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("axis", [0, 1, -1, None])
@pytest.mark.parametrize("zero", [False, True])
def test_dequantize_linear_equals_reference(dtype: Any, axis: int | None, zero: bool) -> None:
    x = RNG.integers(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, (3, 4, 5)).astype(dtype)
    count = 1 if axis is None else x.shape[axis]
    inputs = [x, RNG.uniform(0.5, 2, count).astype(np.float32), RNG.integers(0, 100, count).astype(dtype)]
    check("DequantizeLinear", inputs[: 2 + zero], **({} if axis is None else {"axis": axis}))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("axis", [0, 1, None])
def test_quantize_linear_rounds_halves_to_even_and_saturates(isa: str, dtype: Any, axis: int | None) -> None:
    """Steps are powers of two, so that quotients are exact."""
    x = (RNG.integers(-700, 700, (3, 5, 7)) / 2).astype(np.float32)
    count = 1 if axis is None else x.shape[axis]
    scale = 2.0 ** RNG.integers(-2, 2, count).astype(np.float32)
    zero = RNG.integers(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, count).astype(dtype)
    shape = [1, 1, 1]
    if axis is not None:
        shape[axis] = count
    attributes = {} if axis is None else {"axis": axis}
    y = one(
        "QuantizeLinear",
        [x, scale, zero],
        options={"cpu_isa": isa},
        outputs=(NAMES[np.dtype(dtype)],),
        domain="",
        **attributes,
    )
    codes = np.rint(x.astype(np.float64) / scale.reshape(shape)) + zero.astype(np.int64).reshape(shape)
    expected = np.clip(codes, np.iinfo(dtype).min, np.iinfo(dtype).max)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("values", ["both signs", "positive", "negative", "zero"])
def test_dynamic_quantize_linear_equals_onnxruntime(values: str) -> None:
    x = RNG.standard_normal((7, 33)).astype(np.float32)
    x = {"both signs": x, "positive": abs(x), "negative": -abs(x), "zero": x * 0}[values]
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])
    results = [("y", TensorProto.UINT8), ("s", TensorProto.FLOAT), ("z", TensorProto.UINT8)]
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in results],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    y, scale, zero = run("DynamicQuantizeLinear", [x], outputs=("uint8", "float", "uint8"), domain="")
    for found, expected in zip((y, scale, zero), session.run(None, {"x": x}), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("types", [(np.uint8, np.int8), (np.int8, np.uint8)])
@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_matmul_integer_is_exact(types: tuple[Any, Any], zeros: int) -> None:
    """K of 300 at the ends of both types: its sums are not exact in float32."""
    a, b = (np.where(RNG.random(s) < 0.5, np.iinfo(t).min, np.iinfo(t).max).astype(t)
            for t, s in zip(types, ((2, 5, 300), (300, 41)), strict=True))  # fmt: skip
    points = [np.array(types[0](3)), RNG.integers(0, 100, 41).astype(types[1])][:zeros]
    y = one("MatMulInteger", [a, b, *points], outputs=("int32",), domain="")
    shifted = [v.astype(np.int64) - (points[i].astype(np.int64) if i < zeros else 0) for i, v in enumerate((a, b))]
    np.testing.assert_array_equal(y, shifted[0] @ shifted[1])
