# SPDX-License-Identifier: Apache-2.0
"""Commands that are recorded once: replays with other arguments, barriers, and what the context keeps of them."""

import numpy as np
import pytest

from tests.ops.device import testing

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("lavapipe")]

gpu = testing.gpu
TENSORS = [gpu.Tensor("x", "float", [1]), gpu.Tensor("y", "float", [1], written=True)]
# y = x + number
ADDED = gpu.Kernel("args.y.Write(args.x.Read(0) + (float)args.number, 0);", TENSORS, parameters=["number"])


@pytest.fixture
def context():
    return gpu.open(vulkan=True)


@pytest.mark.parametrize(
    ("launches", "barriers"),
    [
        ([(0, 1, 1), (2, 3, 1)], 1),  # nothing flows; the first waits for earlier batches
        ([(0, 1, 1), (0, 2, 1), (0, 3, 1)], 1),  # all read the same
        ([(0, 1, 1), (1, 2, 1)], 2),  # read after write
        ([(0, 1, 1), (2, 0, 1)], 2),  # write after read
        ([(0, 1, 1), (2, 1, 1)], 2),  # write after write
        ([(0, 1, 1), (2, 3, 1), (1, 2, 1), (3, 0, 1)], 2),  # one barrier for two flows
    ],
)
def test_barriers_are_only_where_data_flows(launches, barriers, context):
    content = [10.0, 20.0, 30.0, 40.0]
    found, spent = gpu.run_rounds(context, ADDED, launches, content, 2)
    for x, y, number in launches:
        content[y] = content[x] + number + 1  # of the second round
    assert found == content
    assert spent == [[1, 1, barriers, 0], [1, 0, barriers, 0]]


@pytest.mark.parametrize(("count", "rounds"), [(5, 1000), (300, 2)])
def test_replays_keep_nothing(count, rounds, context):
    """A thousand of them; and a list that is longer than a batch, and so is two submissions."""
    launches = [(i % 3, (i + 1) % 3, i) for i in range(count)]
    found, spent = gpu.run_rounds(context, ADDED, launches, [0.0, 0.0, 0.0], rounds)
    content = [0.0, 0.0, 0.0]
    for x, y, number in launches:
        content[y] = content[x] + number + rounds - 1
    assert found == content  # integers below 2^24
    batches = -(-count // 256)
    assert spent == [[batches, batches, count, 0]] + [[batches, 0, count, 0]] * (rounds - 1)


def test_other_lists_take_place_of_oldest(context):
    """More lists than are kept, in turn: each is recorded anew, and all are right."""
    for _ in range(2):
        for count in range(1, 21):
            found, spent = gpu.run_rounds(context, ADDED, [(0, 1, 1)] * count, [1.0, 0.0], 1)
            assert found == [1.0, 2.0]
            assert spent == [[1, 1, count, 0]]


def test_list_is_recorded_anew_when_buffers_were_destroyed(context):
    """Another buffer may have got the handle of one that a recorded copy names."""
    for _ in range(3):
        found, spent = gpu.run_rounds(context, ADDED, [(0, 1, 1)], [1.0, 0.0], 2)
        assert (found, spent) == ([1.0, 3.0], [[1, 1, 1, 0], [1, 0, 1, 0]])


@pytest.mark.parametrize("frees", [False, True])
@pytest.mark.parametrize("count", [64, 1 << 15])
def test_kernel_reads_what_was_there_when_it_was_launched(count, frees, context):
    """Before it has run, its input is written anew, or freed. Beyond 32 KiB bytes are not kept beside arguments."""
    body = f"for (int i = lane(); i < {count}; i += args.lanes) args.y.Write(args.x.Read(i), i);"
    tensors = [gpu.Tensor("x", "float", [count]), gpu.Tensor("y", "float", [count], written=True)]
    x, y = np.arange(count, dtype=np.float32), np.full(count, np.nan, np.float32)
    gpu.run_before_zeros(context, gpu.Kernel(body, tensors, lanes=64), x, y, frees)
    np.testing.assert_array_equal(y, x)


def test_arguments_are_aligned(context, vulkan_double):
    """Addresses of 8 bytes follow a parameter of 4."""
    gpu.run_rounds(context, ADDED, [(0, 1, 1), (1, 0, 1), (0, 1, 2)], [1.0, 0.0], 1)
    assert vulkan_double.calls("vkCmdPushConstants") == 3
    assert vulkan_double.calls("misaligned") == 0
