# SPDX-License-Identifier: Apache-2.0
"""The host's memory in place (VK_EXT_external_memory_host), where weights' files are mapped."""

import mmap

import numpy as np
import pytest

from tests.loader_double import Way
from tests.ops.device import testing

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("lavapipe")]

gpu = testing.gpu
COUNT = 1000
# y[i] = x[i], of bytes
COPIED = gpu.Kernel(
    "for (int i = lane(); i < 1000; i += args.lanes) args.y.Write((float)args.x.Read(i), i);",
    [gpu.Tensor("x", "int8", [COUNT]), gpu.Tensor("y", "float", [COUNT], written=True)],
    lanes=64,
)


def mapped(tmp_path):
    """A file of 3 pages as it is mapped, of bytes 0 to 99."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(np.arange(3 * mmap.PAGESIZE) % 100))
    with file.open("r+b") as opened:
        return np.frombuffer(mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE), np.uint8)


@pytest.mark.parametrize("offset", [0, 64, mmap.PAGESIZE - 64, 2 * mmap.PAGESIZE + 128])
def test_kernels_read_mapped_file_where_it_is(offset, tmp_path):
    """From any multiple of 64 on; and what changes behind the import, they see."""
    memory, y = mapped(tmp_path), np.zeros(COUNT, np.float32)
    expected = np.concatenate([np.ones(7), memory[offset + 7 : offset + COUNT]])
    assert gpu.run_in_place(gpu.open(vulkan=True), COPIED, memory, offset, 7, y)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(
    ("call", "nth"), [("vkGetMemoryHostPointerPropertiesEXT", 1), ("vkAllocateMemory", 1), ("vkBindBufferMemory", 1)]
)
def test_memory_that_driver_refuses_is_left(call, nth, vulkan_double, tmp_path):
    """As AMD's does with mapped files on Linux; the device goes on."""
    context, memory, y = gpu.open(vulkan=True), mapped(tmp_path), np.zeros(COUNT, np.float32)
    vulkan_double.inject(call, nth, Way.ONCE, -1000072003)
    assert not gpu.run_in_place(context, COPIED, memory, 0, 0, y)
    assert gpu.run_in_place(context, COPIED, memory, 0, 0, y)


def test_discrete_gpu_does_not_read_host_memory(vulkan_double):
    """It would read each weight over its bus."""
    assert gpu.open(vulkan=True).reads_host_memory
    vulkan_double.pretend("discrete")
    assert not gpu.open(vulkan=True).reads_host_memory
