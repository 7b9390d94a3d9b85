# SPDX-License-Identifier: Apache-2.0
"""The operators as functions on an OpenCL device, against float64 and the CPU's."""

import numpy as np
import pytest

from flownpu import ops
from flownpu.ops import q4nx

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("pocl")]

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((77, 345), dtype=np.float32)
BLOCKS = q4nx.pack(*q4nx.quantize(WEIGHT), q4nx.NARROW)
X = RNG.standard_normal((1, 345), dtype=np.float32)


def exact(x):
    return x.astype(np.float64) @ q4nx.dequantize(BLOCKS, 77, 345).T.astype(np.float64)


def test_fused_dqp_equals_cpu():
    """Nothing is rounded but the sum: 345 terms, less than 60 additions of any one (selftest/gpu/products.py)."""
    y = ops.fused_dqp(X, BLOCKS, rows=77, device="gpu")
    bound = 60 * 2.0**-24 * (np.abs(X) @ (2 * np.abs(WEIGHT).max(axis=1, keepdims=True) + np.abs(WEIGHT)).T)
    assert y.shape == (1, 77)
    assert (np.abs(y - exact(X)) <= bound).all()


def test_q4nx_matmul_rounds_as_cpu_does():
    """int8 with a scale for each 32: both devices are off the exact product by half a step for each element."""
    x = RNG.standard_normal((2, 3, 345), dtype=np.float32)
    steps = np.abs(np.pad(x, ((0, 0), (0, 0), (0, 7))).reshape(2, 3, -1, 32)).max(axis=-1) / 127
    bound = 0.5 * steps.repeat(32, axis=-1)[..., :345] @ np.abs(q4nx.dequantize(BLOCKS, 77, 345)).T
    for device in ("gpu", "cpu"):
        y = ops.q4nx_matmul(x, BLOCKS, rows=77, device=device)
        # 1.01: what float32 adds to that.
        assert (np.abs(y - exact(x)) <= 1.01 * bound).all(), device
    y = ops.q4nx_matmul(x, BLOCKS, rows=77, device="gpu", options={"activations": "bf16"})
    assert np.abs(y - exact(x)).max() < 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"threads": 2},
            r"\[fused_dqp\] expected the options activations, .*, gpu_matrices and gpu_winograd, got 'threads'",
        ),
        ({"activations": "int4"}, "activations = 'int4' is not known; expected one of: bf16, int8"),
        ({"gpu_weights": "texture"}, "gpu_weights = 'texture' is not known; expected one of: auto, buffer, image"),
        ({"opencl_device": "Radeon 999"}, "expected opencl_device to be a part of one of '.*', got 'Radeon 999'"),
    ],
)
def test_unknown_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ops.fused_dqp(X, BLOCKS, rows=77, device="gpu", options=options)


def test_simultaneous_threads_get_same_results():
    """They share a queue, which runs their calls one after the other."""
    from concurrent.futures import ThreadPoolExecutor

    given = [RNG.standard_normal((1, 345), dtype=np.float32) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: ops.fused_dqp(x, BLOCKS, rows=77, device="gpu"), given))
    alone = [ops.fused_dqp(x, BLOCKS, rows=77, device="gpu") for x in given]
    np.testing.assert_array_equal(found, alone)
