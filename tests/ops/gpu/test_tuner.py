# SPDX-License-Identifier: Apache-2.0
"""The fastest of several kernels is measured once, and kept beside compiled kernels."""

from dataclasses import replace

import numpy as np
import pytest

from flownpu.selftest.gpu.case import PreparedCase
from flownpu.selftest.gpu.graphs import graphs
from flownpu.selftest.gpu.trials import Devices
from flownpu.selftest.reference.case import compare
from tests.npu.decoders import Session, read_nodes
from tests.ops.device import testing
from tests.ops.gpu.test_session import hidden_of

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("pocl")]

gpu = testing.gpu
# Additions that a compiler cannot leave out: some microseconds of them, or thousands of microseconds.
BODY = "float sum = 0.0f; for (int i = 0; i < {}; ++i) sum += sin(sum + (float)i); args.y.Write(sum, 0);"
RUNS = 6  # one that warms up, and five whose median counts


def kernel(additions):
    return gpu.Kernel(BODY.format(additions), [gpu.Tensor("y", "float", [1], written=True)])


QUICK, SLOW = kernel(10), kernel(1_000_000)


@pytest.mark.parametrize(("kernels", "best"), [([QUICK, SLOW], 0), ([SLOW, QUICK, SLOW], 1)])
def test_fastest_kernel_is_kept(kernels, best, tmp_path, monkeypatch):
    monkeypatch.setenv("FLOWNPU_GPU_TUNE", "1")
    first = gpu.open(cache=str(tmp_path))
    assert gpu.fastest(first, "sums", kernels) == best
    assert first.dispatches == RUNS * len(kernels)
    second = gpu.open(cache=str(tmp_path))
    assert gpu.fastest(second, "sums", kernels) == best
    assert second.dispatches == 0
    # Nothing is known of other work.
    assert gpu.fastest(second, "others", kernels[::-1]) == len(kernels) - 1 - best
    assert second.dispatches == RUNS * len(kernels)


def test_cpu_device_is_not_measured(monkeypatch, tmp_path):
    monkeypatch.delenv("FLOWNPU_GPU_TUNE", raising=False)
    context = gpu.open(cache=str(tmp_path))
    assert gpu.fastest(context, "sums", [SLOW, QUICK]) == 0
    assert context.dispatches == 0


def test_tune_variable_other_than_0_or_1_is_refused(monkeypatch):
    monkeypatch.setenv("FLOWNPU_GPU_TUNE", "yes")
    with pytest.raises(RuntimeError, match="expected FLOWNPU_GPU_TUNE to be 0 or 1, got 'yes'"):
        gpu.fastest(gpu.open(), "sums", [SLOW, QUICK])


def test_convolution_is_measured_once_for_its_sizes(monkeypatch, tmp_path):
    """Windows' products and Winograd's, after a test of the latter beside the former; what was found is kept."""
    case = next(make for name, make in graphs() if name == "winograd")(np.random.default_rng(0))
    monkeypatch.setenv("FLOWNPU_GPU_CACHE", str(tmp_path))
    spent = []
    for tune in ("1", "1", "0"):
        monkeypatch.setenv("FLOWNPU_GPU_TUNE", tune)
        device = Devices({"gpu_api": "opencl"}).first
        prepared = PreparedCase(replace(case, name="winograd", options={}), device)
        for _ in range(2):
            spent.append(device.counts()["dispatches"])
            found = prepared.run()[0]
            assert compare(found, case.expected[0].values, case.expected[0].tolerance).beyond == 0
        spent.append(device.counts()["dispatches"])
    assert spent == [2, 2 + 2 * RUNS + 1, 2 + 2 * RUNS + 2, 0, 1, 2, 0, 1, 2]


def test_session_measures_once_and_keeps_numbers(models, monkeypatch, tmp_path):
    """The tuner's choice only changes the order of a product's sums; a second session measures nothing."""
    hidden = hidden_of(models, "llama", np.arange(3, 9))
    folder = models.converted("llama", kv_dtype="fp32")
    found, spent = [], []
    for tune in ("0", "1", "1"):
        monkeypatch.setenv("FLOWNPU_GPU_TUNE", tune)
        monkeypatch.setenv("FLOWNPU_GPU_CACHE", str(tmp_path))
        session = Session(gpu.SessionDevice(), *read_nodes(folder))
        spent.append(session.device.counts()["dispatches"])
        past = session.past(8, np.float32)
        found.append(np.array([session.run(hidden[i : i + 1], i + 1, past)[0] for i in range(6)]))
    assert spent[0] == spent[2] == 0 < spent[1]
    np.testing.assert_array_equal(found[1], found[2])
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=2e-5 * np.abs(found[0]).max())
