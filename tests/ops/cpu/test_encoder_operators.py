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


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("window", [(4, 4), (3, 5)])
def test_patch_embedding_equals_reference(isa: str, biased: bool, window: tuple[int, int]) -> None:
    """Pixels on the right and below that fill no patch are left out."""
    weights = [RNG.standard_normal((40, 3, *window), dtype=np.float32)]
    weights += [RNG.standard_normal(40, dtype=np.float32)] * biased
    constants = (1, 2)[: len(weights)]
    check("Conv", [IMAGES, *weights], constants=constants, options={"cpu_isa": isa}, strides=list(window))


@pytest.mark.parametrize("window", [[4, 4], [3, 5]])
def test_average_pool_equals_reference(window: list[int]) -> None:
    check("AveragePool", [IMAGES], kernel_shape=window, strides=window)


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
