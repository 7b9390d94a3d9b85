# SPDX-License-Identifier: Apache-2.0
"""The two dialects of the kernel language, OpenCL C on PoCL and SPIR-V on lavapipe, compute the same numbers.

PoCL does not fuse a product with a sum here, as lavapipe never does, so that both have the same arithmetic and equal
results bit for bit. Only functions such as exp are each driver's own.
"""

import re

import numpy as np
import pytest

from flownpu.selftest.gpu.case import PreparedCase
from flownpu.selftest.gpu.trials import Devices, variants
from tests.pocl import NOT_OPTIMISED

pytestmark = pytest.mark.opencl

VARIANTS = {variant.name: variant for variant in variants(large=False, images=False)}
# Variants that compute exp, tanh and the like.
WITH_FUNCTIONS = re.compile(
    "geglu|swiglu|gelu$|experts|tanh|attention|and silu|softmax|gated_|short_convolution, (one|as)"
    "|elementwise, (Cos|Erf|Exp|Gelu|Log|QuickGelu|Sigmoid|Sin|Swish|Tanh)$"
)


@pytest.fixture(scope="module")
def devices(pocl, lavapipe, tmp_path_factory):
    """One of each API; no other test's compiled kernels are used."""
    del pocl, lavapipe
    with pytest.MonkeyPatch.context() as patch:
        for name, value in NOT_OPTIMISED.items():
            patch.setenv(name, value)
        patch.setenv("OPENCL_DOUBLE_BEFORE", "#pragma OPENCL FP_CONTRACT OFF")
        patch.setenv("FLOWNPU_GPU_CACHE", str(tmp_path_factory.mktemp("dialects")))
        yield Devices({"gpu_api": "opencl"}), Devices({"gpu_api": "vulkan"})


@pytest.mark.parametrize("name", VARIANTS)
def test_kernel_variant_computes_same_numbers(name, devices):
    case = VARIANTS[name].case()
    ours, theirs = (PreparedCase(case, each.of(case.options)).run() for each in devices)
    for number, expected in case.expected.items():
        if not WITH_FUNCTIONS.search(name):
            assert ours[number].tobytes() == theirs[number].tobytes()
        # Each is off by the tolerance at most, which has the errors of the functions.
        apart = np.abs(ours[number].astype(np.float64) - theirs[number])
        assert (apart <= 2 * np.asarray(expected.tolerance)).all()
