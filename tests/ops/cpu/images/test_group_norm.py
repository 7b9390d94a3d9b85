# SPDX-License-Identifier: Apache-2.0
"""Norms of images on the CPU, for every instruction set of this machine, against their equation in float64."""

import numpy as np
import pytest

from tests.ops.device import ISAS, one

RNG = np.random.default_rng(0)


def normed(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, groups: int, epsilon: float) -> np.ndarray:
    wide = x.astype(np.float64)
    rows = wide.reshape(x.shape[0], groups, int(np.prod(x.shape[1:])) // groups)
    rows = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + epsilon)
    by_channel = (-1, *[1] * (x.ndim - 2))
    return rows.reshape(x.shape) * weight.reshape(by_channel) + bias.reshape(by_channel)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [(2, 12, 5, 7), (1, 4, 33), (3, 6, 2, 3, 4), (2, 8), (0, 4, 5)])
@pytest.mark.parametrize("mean", [0, 100])
def test_group_norms_equal_their_equation(isa: str, shape: tuple[int, ...], mean: float) -> None:
    x = RNG.standard_normal(shape, dtype=np.float32) + np.float32(mean)
    weight, bias = RNG.standard_normal((2, shape[1]), dtype=np.float32)
    # With n elements a mean is off by n 2^-24 of the magnitudes, and so is each difference from it; a result is some
    # 4 standard deviations at most, of which some roundings make a few 2^-24.
    n = int(np.prod(shape[1:]))
    least = 0.05 if n > shape[1] else 1e-3  # of the standard deviation of a group
    tolerance = 4 * (n + 8) * 2.0**-24 * (1 + mean) / least
    for op_type, domain, groups, attributes in (
        ("GroupNormalization", "", 2, {"num_groups": 2, "epsilon": 1e-3}),
        ("GroupNorm", "com.microsoft", 2, {"groups": 2, "epsilon": 1e-3, "channels_last": 0, "activation": 0}),
        ("GroupNorm", "com.microsoft", 2, {"groups": 2, "epsilon": 1e-3, "channels_last": 0, "activation": 1}),
        ("InstanceNormalization", "", shape[1], {"epsilon": 1e-3}),
    ):
        expected = normed(x, weight, bias, groups, 1e-3)
        if attributes.get("activation"):
            expected = expected / (1 + np.exp(-expected))
        found = one(op_type, [x, weight, bias], domain=domain, options={"cpu_isa": isa}, **attributes)
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance, err_msg=op_type)


@pytest.mark.parametrize(
    ("channels", "weights", "message"),
    [(6, 6, "expected images .* whose channels make 4 groups"), (8, 4, "a number for each of 8 channels")],
)
def test_unfit_group_norm_is_refused(channels: int, weights: int, message: str) -> None:
    x, weight = np.zeros((1, channels, 3), np.float32), np.ones(weights, np.float32)
    with pytest.raises(ValueError, match=message):
        one("GroupNorm", [x, weight, weight], domain="com.microsoft", groups=4, channels_last=0, activation=0)
