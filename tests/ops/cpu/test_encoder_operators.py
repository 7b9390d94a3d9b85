# SPDX-License-Identifier: Apache-2.0
"""Operators of encoders on the CPU, for every instruction set of this machine, against numpy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ops.cpu.test_q4nx_matmul import EPSILON
from tests.ops.device import ISAS, one, run

RNG = np.random.default_rng(0)
IMAGES = RNG.standard_normal((2, 3, 13, 12), dtype=np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("width", [1, 37, 144])
@pytest.mark.parametrize("mean", [0, 100])
def test_layer_norm_equals_reference(isa: str, biased: bool, width: int, mean: float) -> None:
    x = RNG.standard_normal((2, 3, width), dtype=np.float32) + np.float32(mean)
    weight, bias = RNG.standard_normal((2, width), dtype=np.float32)
    inputs: list[np.ndarray | None] = [x, weight, bias] if biased else [x, weight]
    y = one("LayerNormalization", inputs, domain="", options={"cpu_isa": isa}, epsilon=1e-6, axis=-1)
    exact = x.astype(np.float64)
    centred = exact - exact.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    expected = centred / deviation * weight + (bias if biased else 0)
    # The mean is off by up to `width` roundings of |x|, and x - mean by one more. That moves the dividend, and the
    # deviation by at most as much; `width` + 6 roundings of the result follow.
    mean_error = (width + 1) * EPSILON * np.abs(exact).max(-1, keepdims=True) / deviation
    bound = (
        2 * mean_error * (1 + np.abs(expected))
        + mean_error * np.abs(weight)
        + (width + 6) * EPSILON * (np.abs(expected) + np.abs(bias))
    )
    assert np.all(np.abs(y - expected) <= bound)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [1, 5, 64, 131])
def test_softmax_equals_reference(isa: str, width: int) -> None:
    x = RNG.standard_normal((3, width), dtype=np.float32) * 10
    x[0, width // 2 :] = -np.inf if width > 1 else 1
    y = one("Softmax", [x], domain="", options={"cpu_isa": isa}, axis=-1)
    exponentials = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    expected = exponentials / exponentials.sum(-1, keepdims=True)
    # The difference is rounded once, relative to up to 80 of it; exp, the sum and the division follow.
    assert np.all(np.abs(y - expected) <= (80 + width + 8) * EPSILON * expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("height", "width"), [(4, 4), (3, 5)])
def test_patch_embedding_equals_reference(isa: str, biased: bool, height: int, width: int) -> None:
    """Pixels on the right and below that fill no patch are left out."""
    weight = RNG.standard_normal((40, 3, height, width), dtype=np.float32)
    bias = RNG.standard_normal(40, dtype=np.float32)
    rows, columns = 13 // height, 12 // width
    patches = IMAGES[:, :, : rows * height, : columns * width].reshape(2, 3, rows, height, columns, width)
    expected = np.einsum("ncrhqw,mchw->nmrq", patches.astype(np.float64), weight.astype(np.float64))
    magnitudes = np.einsum("ncrhqw,mchw->nmrq", np.abs(patches), np.abs(weight))
    if biased:
        expected, magnitudes = expected + bias[:, None, None], magnitudes + np.abs(bias)[:, None, None]
    y = one(
        "Conv",
        [IMAGES, weight, bias] if biased else [IMAGES, weight],
        constants=(1, 2) if biased else (1,),
        domain="",
        options={"cpu_isa": isa},
        strides=[height, width],
    )
    assert y.shape == expected.shape
    assert np.all(np.abs(y - expected) <= (3 * height * width + 2) * EPSILON * magnitudes)


@pytest.mark.parametrize(("height", "width"), [(4, 4), (3, 5)])
def test_average_pool_equals_reference(height: int, width: int) -> None:
    rows, columns = 13 // height, 12 // width
    windows = IMAGES[:, :, : rows * height, : columns * width].reshape(2, 3, rows, height, columns, width)
    y = one("AveragePool", [IMAGES], domain="", kernel_shape=[height, width], strides=[height, width])
    expected = windows.mean((3, 5), dtype=np.float64)
    bound = (height * width + 1) * EPSILON * np.abs(windows).mean((3, 5))
    assert y.shape == expected.shape
    assert np.all(np.abs(y - expected) <= bound)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("axis", [0, 1, -1, None])
@pytest.mark.parametrize("zero", [False, True])
def test_dequantize_linear_equals_reference(dtype: Any, axis: int | None, zero: bool) -> None:
    x = RNG.integers(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, (3, 4, 5)).astype(dtype)
    count = 1 if axis is None else x.shape[axis]
    scale = RNG.uniform(0.5, 2, count).astype(np.float32)
    point = RNG.integers(0, 100, count).astype(dtype)
    shape = [1, 1, 1]
    if axis is not None:
        shape[axis] = count
    expected = (x.astype(np.float32) - (point.reshape(shape) if zero else 0)) * scale.reshape(shape)
    inputs: list[np.ndarray | None] = [x, scale, point] if zero else [x, scale]
    attributes = {} if axis is None else {"axis": axis}
    y = one("DequantizeLinear", inputs, domain="", **attributes)
    np.testing.assert_array_equal(y, expected, strict=True)


KERNEL = np.zeros((8, 3, 4, 4), np.float32)
WINDOWS = "expected windows of two axes side by side"


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes", "message"),
    [
        ("Conv", [IMAGES, KERNEL], {"strides": [2, 2]}, WINDOWS),
        ("Conv", [IMAGES, KERNEL], {}, WINDOWS),
        ("Conv", [IMAGES, KERNEL], {"strides": [4, 4], "pads": [0, 0, 0, 1]}, "attribute 'pads': expected 0, got 1"),
        (
            "Conv",
            [IMAGES, KERNEL],
            {"strides": [4, 4], "dilations": [1, 2]},
            "attribute 'dilations': expected 1, got 2",
        ),
        (
            "Conv",
            [IMAGES, KERNEL],
            {"strides": [4, 4], "auto_pad": "SAME_UPPER"},
            "expected one of NOTSET.VALID, got 'SAME_UPPER'",
        ),
        ("Conv", [IMAGES, KERNEL], {"strides": [4, 4], "group": 3}, "attribute 'group': expected 1, got 3"),
        (
            "Conv",
            [IMAGES, KERNEL[..., 0].copy()],
            {"strides": [4]},
            r"input 1 \(W\): expected shape \[M,3,\?,\?\], got \[8,3,4\]",
        ),
        (
            "Conv",
            [IMAGES[:, :2].copy(), KERNEL],
            {"strides": [4, 4]},
            r"input 1 \(W\): expected shape \[8,2,\?,\?\], got \[8,3,4,4\]",
        ),
        ("AveragePool", [IMAGES], {"kernel_shape": [4, 4], "strides": [2, 2]}, WINDOWS),
        (
            "AveragePool",
            [IMAGES],
            {"kernel_shape": [4, 4], "strides": [4, 4], "ceil_mode": 1},
            "attribute 'ceil_mode': expected 0, got 1",
        ),
        ("LayerNormalization", [IMAGES, KERNEL[0, 0, 0]], {"axis": 2}, "expected a norm over the last axis"),
        ("LayerNormalization", [IMAGES, KERNEL[0, 0, 0]], {}, r"expected a weight of shape \[12\], got \[4\]"),
        ("Gelu", [IMAGES], {"approximate": "quick"}, "expected one of none.tanh, got 'quick'"),
    ],
)
def test_unfit_inputs_are_refused(op_type: str, inputs: list[Any], attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(op_type, inputs, domain="", constants=(1,) if len(inputs) > 1 else (), **attributes)
