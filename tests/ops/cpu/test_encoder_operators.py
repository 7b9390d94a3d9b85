# SPDX-License-Identifier: Apache-2.0
"""Operators of encoders on the CPU, for every instruction set of this machine, against the reference in float64."""

from typing import Any

import numpy as np
import pytest

from tests.ops.cpu.within_bounds import check
from tests.ops.device import ISAS, run

RNG = np.random.default_rng(0)
IMAGES = RNG.standard_normal((2, 3, 13, 12), dtype=np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("width", [1, 37, 144])
@pytest.mark.parametrize("mean", [0, 100])
def test_layer_norm_equals_reference(isa: str, biased: bool, width: int, mean: float) -> None:
    x = RNG.standard_normal((2, 3, width), dtype=np.float32) + np.float32(mean)
    weights = list(RNG.standard_normal((1 + biased, width), dtype=np.float32))
    check("LayerNormalization", [x, *weights], options={"cpu_isa": isa}, epsilon=1e-6, axis=-1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [1, 5, 64, 131])
def test_softmax_equals_reference(isa: str, width: int) -> None:
    x = RNG.standard_normal((3, width), dtype=np.float32) * 10
    x[0, width // 2 :] = -np.inf if width > 1 else 1
    check("Softmax", [x], options={"cpu_isa": isa}, axis=-1)


@pytest.mark.parametrize("axis", [0, 1, -2])
@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax"])
def test_softmax_over_other_axes_equals_reference(op_type: str, axis: int) -> None:
    check(op_type, [RNG.standard_normal((5, 17, 37), dtype=np.float32) * 5], axis=axis)


@pytest.mark.parametrize("op_type", ["LayerNormalization", "SimplifiedLayerNormalization"])
def test_norm_over_two_axes_equals_reference(op_type: str) -> None:
    weights = [RNG.standard_normal((13, 12), dtype=np.float32)] * (2 if op_type == "LayerNormalization" else 1)
    check(op_type, [IMAGES, *weights], axis=2)


POOLS: list[dict[str, Any]] = [
    {"kernel_shape": [4, 4], "strides": [4, 4]},
    {"kernel_shape": [3, 5]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
    {"kernel_shape": [3, 2], "strides": [2, 3], "pads": [0, 1, 2, 0], "ceil_mode": 1},
    {"kernel_shape": [2, 3], "dilations": [3, 2], "pads": [1, 2, 0, 1]},
    {"kernel_shape": [4, 3], "strides": [3, 2], "auto_pad": "SAME_UPPER"},
    {"kernel_shape": [4, 2], "strides": [3, 1], "auto_pad": "SAME_LOWER"},
]


@pytest.mark.parametrize("attributes", POOLS, ids=range(len(POOLS)))
@pytest.mark.parametrize("counts_pads", [None, 0, 1])
def test_pool_equals_reference(attributes: dict[str, Any], counts_pads: int | None) -> None:
    if counts_pads is None:
        check("MaxPool", [IMAGES], **attributes)
    else:
        check("AveragePool", [IMAGES], **attributes, count_include_pad=counts_pads)


@pytest.mark.parametrize("axes", [1, 3])
def test_pool_of_other_axes_equals_reference(axes: int) -> None:
    x = RNG.standard_normal((2, 3, *(9, 8)[: axes - 1], 300), dtype=np.float32)
    check("MaxPool", [x], kernel_shape=[3] * axes, strides=[1] * axes, pads=[1] * 2 * axes)
    check("AveragePool", [x], kernel_shape=[2] * axes, strides=[2] * axes)


@pytest.mark.parametrize("op_type", ["GlobalAveragePool", "GlobalMaxPool"])
def test_global_pool_equals_reference(op_type: str) -> None:
    check(op_type, [IMAGES])


PADS = np.array([1, 0, 2, 3, 0, 1, 4, 0])


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
def test_pad_equals_reference(mode: str) -> None:
    x = IMAGES if mode != "reflect" else IMAGES[:, :, :, :6].copy()
    check("Pad", [x, PADS if mode != "reflect" else np.minimum(PADS, 1)], mode=mode)
    check("Pad", [IMAGES, np.array([2, 1, 0, 3]), None, np.array([-1, 2])], mode=mode)


def test_pad_of_negative_sizes_cuts() -> None:
    check("Pad", [IMAGES, np.array([0, 0, -2, 1, 0, 0, 3, -4]), np.array(7, np.float32)])


KERNEL = np.zeros((8, 3, 4, 4), np.float32)


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes", "message"),
    [
        (
            "AveragePool",
            [IMAGES],
            {"kernel_shape": [4, 4], "pads": [4, 0, 0, 0]},
            "expected pads smaller than the window",
        ),
        ("MaxPool", [IMAGES], {"kernel_shape": [4]}, r"expected images of 1 axes after two others, got \[2,3,13,12\]"),
        ("MaxPool", [IMAGES], {"kernel_shape": [14, 2]}, "expected images of at least one window of 14, got 13"),
        ("Pad", [IMAGES, PADS * 2], {"mode": "reflect"}, "expected pads of 0 to 1 in mode reflect, got 2 and 0"),
        ("Pad", [IMAGES, PADS[:6].copy()], {}, "expected 8 pads, got 6"),
        ("Pad", [IMAGES, PADS - 14], {}, "expected pads that leave 2 elements or take some, got -13 and -14"),
        (
            "LayerNormalization",
            [IMAGES, KERNEL[0, 0, 0]],
            {"axis": 2},
            r"expected a weight of shape \[13,12\], got \[4\]",
        ),
        ("LayerNormalization", [IMAGES, KERNEL[0, 0, 0]], {}, r"expected a weight of shape \[12\], got \[4\]"),
        ("Gelu", [IMAGES], {"approximate": "quick"}, "expected one of none.tanh, got 'quick'"),
    ],
)
def test_unfit_inputs_are_refused(op_type: str, inputs: list[Any], attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(op_type, inputs, domain="", constants=(1,) if len(inputs) > 1 else (), **attributes)
