# SPDX-License-Identifier: Apache-2.0
"""Every kernel in every variant, in both dialects of the kernel language: OpenCL C on PoCL, SPIR-V on lavapipe.

Both are compared with float64, as `flownpu selftest --device gpu` does. PoCL does not fuse a product with a sum here,
as lavapipe never does, so that both have the same arithmetic and equal results bit for bit. Only functions such as exp
are each driver's own.
"""

import re
import subprocess
from functools import cache

import pytest

from flownpu.selftest.gpu.case import PreparedCase
from flownpu.selftest.gpu.trials import Devices, variants
from flownpu.selftest.reference.case import compare
from tests import lavapipe as packages

pytestmark = pytest.mark.opencl

VARIANTS = {variant.name: variant for variant in variants(large=False, images=False)}
# Variants that compute exp, tanh and the like.
WITH_FUNCTIONS = re.compile(
    "geglu|swiglu|gelu$|experts|tanh|attention|and silu|softmax|gated_|short_convolution, (one|as)"
    "|elementwise, (Cos|Erf|Exp|Gelu|Log|QuickGelu|Sigmoid|Sin|Swish|Tanh)$"
)


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("dialects")


@pytest.fixture(scope="module")
def devices(pocl, lavapipe, cache_folder):
    """One of each API; no other test's compiled kernels are used."""
    del pocl, lavapipe
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENCL_DOUBLE_BEFORE", "#pragma OPENCL FP_CONTRACT OFF")
        patch.setenv("FLOWNPU_GPU_CACHE", str(cache_folder))
        yield Devices({"gpu_api": "opencl"}), Devices({"gpu_api": "vulkan"})


@pytest.fixture(scope="module")
def outputs_of(devices):
    """A variant's case, and its outputs on both devices: by its name, computed once."""

    @cache
    def compute(name):
        case = VARIANTS[name].case()
        return case, *(PreparedCase(case, each.of(case.options)).run() for each in devices)

    return compute


@pytest.mark.parametrize("name", VARIANTS)
def test_kernel_variant_computes_same_numbers(name, outputs_of):
    case, ours, theirs = outputs_of(name)
    for number, expected in case.expected.items():
        for found in (ours, theirs):
            deviation = compare(found[number], expected.values, expected.tolerance)
            assert deviation.beyond == 0, deviation.text
        if not WITH_FUNCTIONS.search(name):
            assert ours[number].tobytes() == theirs[number].tobytes()


def test_emitted_modules_are_valid(outputs_of, cache_folder, tmp_path):
    """Those of the kernels above."""
    for name in VARIANTS:
        outputs_of(name)
    found = 0
    for content in packages.modules_in(cache_folder):
        module = tmp_path / "module.spv"
        module.write_bytes(content)
        command = [packages.spirv_val(), "--target-env", "vulkan1.3", module]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stderr
        found += 1
    assert found > len(VARIANTS) / 2  # some variants share kernels, others have several


def test_facts_are_those_of_lavapipe(devices):
    facts = devices[1].first.facts
    assert (facts.kind, facts.platform) == ("cpu", "Vulkan, llvmpipe")
    assert facts.local_memory >= 2**15
    assert facts.work_group >= 256
