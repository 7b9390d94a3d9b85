# SPDX-License-Identifier: Apache-2.0
"""Every kernel in every variant on Vulkan, by lavapipe: against float64, and its module against the format's rules."""

import struct
import subprocess
from pathlib import Path

import pytest

from flownpu.selftest.gpu.trials import Devices, run_variant, variants
from flownpu.selftest.outcome import Outcome
from tests import lavapipe as packages

pytestmark = pytest.mark.opencl

VARIANTS = {variant.name: variant for variant in variants(large=False, images=False)}
VULKAN = {"gpu_api": "vulkan"}
# The first words of a module: magic, version 1.6, no generator.
HEAD = struct.pack("<III", 0x07230203, 0x00010600, 0)


def modules_in(cache):
    """The modules of kernels that the cache on disk has: behind the text of the device, before the binary."""
    for file in cache.glob("*.bin"):
        content = file.read_bytes()
        begin = max(content.find(HEAD), 0)
        length = content[content.rfind(b"\n", 0, begin) + 1 : max(begin - 1, 0)]
        if length.isdigit():  # else it is what was found out about a kernel
            yield content[begin : begin + int(length)]


@pytest.fixture(scope="module")
def devices(lavapipe):
    del lavapipe
    return Devices(VULKAN)


def test_device_is_lavapipe(devices):
    facts = devices.first.facts
    assert facts.kind == "cpu"
    assert facts.platform == "Vulkan, llvmpipe"
    assert facts.local_memory >= 2**15
    assert facts.work_group >= 256


@pytest.mark.parametrize("name", VARIANTS)
def test_kernel_variant_passes(name, devices):
    result = run_variant(VARIANTS[name], devices)
    assert result.outcome is Outcome.PASSED, result.text
    assert result.kernels


def test_emitted_modules_are_valid(devices, lavapipe, tmp_path):
    """Those of the kernels above."""
    for variant in VARIANTS.values():
        run_variant(variant, devices)
    found = 0
    for content in modules_in(Path(lavapipe["FLOWNPU_GPU_CACHE"])):
        module = tmp_path / "module.spv"
        module.write_bytes(content)
        said = subprocess.run(
            [packages.spirv_val(), "--target-env", "vulkan1.3", module], capture_output=True, text=True, check=False
        )
        assert said.returncode == 0, said.stderr
        found += 1
    assert found > len(VARIANTS) / 2  # some variants share kernels, others have several
