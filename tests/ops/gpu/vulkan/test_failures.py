# SPDX-License-Identifier: Apache-2.0
"""Calls of Vulkan that fail, devices that are lost, hang or lack something: injected in the double of the loader."""

import gc

import numpy as np
import pytest

from tests.decoding import float32_tolerance
from tests.loader_double import Way
from tests.npu.decoders import Session, partition, read_nodes
from tests.ops.device import testing
from tests.ops.gpu.test_session import hidden_of

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("lavapipe")]

gpu, DeviceFailed = testing.gpu, testing.npu.DeviceFailed
Kernel, Tensor = gpu.Kernel, gpu.Tensor
LOST, OF_DEVICE, OF_HOST, FEATURE = -4, -2, -1, -8
SUBMIT, ALLOCATE = "vkQueueSubmit", "vkAllocateMemory"
ONES = Kernel("args.y.Write(1.0f, lane());", [Tensor("y", "float", [64], written=True)], lanes=64)


def run_ones(context):
    y = np.zeros(64, np.float32)
    context.run(ONES, [1, 1, 1], [y])
    return y


@pytest.mark.parametrize(
    ("call", "way", "code", "message"),
    [
        (
            SUBMIT,
            Way.LOST,
            LOST,
            r"kernel tried.*: vkQueueSubmit ended with VK_ERROR_DEVICE_LOST \(-4\); see `sudo dmesg`",
        ),
        ("vkWaitForFences", Way.LOST, LOST, r"kernel tried.*: vkWaitForFences ended with VK_ERROR_DEVICE_LOST"),
        (SUBMIT, Way.ONCE, OF_HOST, r"vkQueueSubmit ended with VK_ERROR_OUT_OF_HOST_MEMORY \(-1\); use smaller inputs"),
        (
            ALLOCATE,
            Way.ONCE,
            OF_DEVICE,
            r"a buffer of 256 bytes \(.* are in use\): vkAllocateMemory .*OUT_OF_DEVICE_MEMORY",
        ),
        ("vkMapMemory", Way.ONCE, -5, r"vkMapMemory ended with VK_ERROR_MEMORY_MAP_FAILED"),
        ("vkCreateComputePipelines", Way.ONCE, -13, r"kernel tried on .*: vkCreateComputePipelines .*VK_ERROR_UNKNOWN"),
        ("vkEndCommandBuffer", Way.ONCE, OF_DEVICE, r"kernel tried.*: vkEndCommandBuffer .*; use smaller inputs"),
    ],
)
def test_failed_call_is_named_with_what_to_do(call, way, code, message, vulkan_double, monkeypatch):
    """And unless the device is lost, the same run may be tried again."""
    monkeypatch.setenv("FLOWNPU_GPU_CACHE", "")
    context = gpu.open(vulkan=True)
    vulkan_double.inject(call, 1, way, code)
    with pytest.raises(DeviceFailed, match=rf"(?s)device 'gpu': .*{message}"):
        run_ones(context)
    if way is Way.LOST:
        with pytest.raises(DeviceFailed, match="VK_ERROR_DEVICE_LOST"):
            run_ones(context)
        vulkan_double.reset()
        context = gpu.open(vulkan=True)
    assert (run_ones(context) == 1).all()


def test_kernels_of_another_driver_are_compiled_anew(vulkan_double, tmp_path):
    """A kept pipeline is found by the same driver alone; and what making one takes is given back."""
    gc.collect()  # contexts of other tests
    vulkan_double.reset()
    found = []
    for driver in ("", "another driver", "", "another driver"):
        vulkan_double.pretend(driver)
        context = gpu.open(cache=str(tmp_path), vulkan=True)
        run_ones(context)
        found.append((context.compiled, context.from_cache))
        del context
    assert found == [(1, 0), (1, 0), (0, 1), (0, 1)]
    for made in ("ShaderModule", "PipelineCache", "PipelineLayout", "Fence", "QueryPool", "Buffer"):
        assert vulkan_double.calls(f"vkCreate{made}") == vulkan_double.calls(f"vkDestroy{made}") > 0, made


def test_kernel_that_never_ends_is_reported(vulkan_double, monkeypatch):
    """The limit ends the wait; after it nothing waits again."""
    monkeypatch.setenv("FLOWNPU_GPU_TIMEOUT", "0.5")
    context = gpu.open(vulkan=True)
    vulkan_double.inject(SUBMIT, 1, Way.HUNG)
    with pytest.raises(DeviceFailed, match=r"kernel tried.* did not end within 0.50* s on .*; see `sudo dmesg`"):
        run_ones(context)
    waits = vulkan_double.calls("vkWaitForFences")
    with pytest.raises(DeviceFailed, match="was given up, since a kernel did not end"):
        run_ones(context)
    assert vulkan_double.calls("vkWaitForFences") == waits


@pytest.mark.parametrize(
    ("pretended", "message"),
    [
        ("no device", "got none: install a driver .Debian: mesa-vulkan-drivers., or use gpu_api = opencl"),
        ("Vulkan 1.2", r"expected a device of Vulkan 1.3 .* \(without Vulkan 1.3\): install a driver"),
        ("no shaderInt16", r"\(without shaderInt16\): install a driver"),
    ],
)
def test_device_that_is_missing_or_lacks_a_feature_is_named(pretended, message, vulkan_double):
    vulkan_double.pretend(pretended)
    with pytest.raises(DeviceFailed, match=message):
        gpu.open(vulkan=True)


def test_driver_that_cannot_make_device_is_named(vulkan_double):
    vulkan_double.inject("vkCreateDevice", 1, Way.ONCE, FEATURE)
    with pytest.raises(DeviceFailed, match=r"opening .*: vkCreateDevice ended with VK_ERROR_FEATURE_NOT_PRESENT"):
        gpu.open(vulkan=True)


def test_lost_device_loses_session(models, vulkan_double):
    """A token's submission after a prompt's; the error names the position."""
    hidden = hidden_of(models, "llama", np.arange(3, 33))
    session = Session(gpu.SessionDevice(vulkan=True), *read_nodes(models.converted("llama", kv_dtype="fp32")))
    _, past = session.run(hidden[:20], 20, session.past(32, np.float32))
    vulkan_double.inject(SUBMIT, 1, Way.LOST, LOST)
    with pytest.raises(DeviceFailed, match=r"VK_ERROR_DEVICE_LOST .* \(position 20\)"):
        session.run(hidden[20:21], 21, past)


def test_memory_that_host_does_not_see_needs_one_submission_a_token(models, vulkan_double, monkeypatch):
    """On a discrete GPU a hidden state passes beside the arguments, and logits are copied by the last command."""
    monkeypatch.setenv("FLOWNPU_GPU_TUNE", "0")
    nodes = read_nodes(models.converted("llama", kv_dtype="fp32"))
    hidden = hidden_of(models, "llama", np.arange(3, 33))

    def logits(device):
        session = Session(device, *nodes)
        _, past = session.run(hidden[:20], 20, session.past(32, np.float32))
        _, past = session.run(hidden[20:21], 21, past)
        before = device.counts()
        found, _ = session.run(hidden[21:22], 22, past)
        return found, {name: count - before[name] for name, count in device.counts().items()}, session

    expected, _, _ = logits(gpu.SessionDevice(vulkan=True, half=False))
    vulkan_double.pretend("discrete")
    found, spent, session = logits(gpu.SessionDevice(vulkan=True, half=False))
    # A GPU's sums are divided among other numbers of lanes.
    sizes = session.attributes
    tolerance = float32_tolerance(expected, sizes["layers"], sizes["feed_forward.size"])
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
    assert (spent["submissions"], spent["recordings"], spent["allocations"]) == (1, 0, 0)
    # The copies of hidden state and logits are commands, too.
    assert spent["barriers"] == 5 * sizes["layers"] + 2 + 2


def test_unusable_vulkan_leaves_nodes_with_reason(models, vulkan_double):
    vulkan_double.pretend("no shaderInt16")
    nodes, outputs = read_nodes(models.converted("llama"))
    lowered = gpu.SessionDevice(vulkan=True).lower(partition(nodes), outputs=outputs)
    assert "without shaderInt16" in lowered.on_host[0][2]
