# SPDX-License-Identifier: Apache-2.0
"""Tests of the XRT runtime over XRT itself. tests/npu/test_over_xrt.py runs them in processes on a machine with an NPU
(tests/npu/machine.py); elsewhere they are not collected."""

import faulthandler
import gc
import os
import sys

import pytest

from tests.npu import xrt
from tests.npu.arrays import npu, whole
from tests.npu.driver import test_emulated_runtime as emulated

collect_ignore_glob = [] if xrt.ROOT in os.environ else ["test_*.py"]

# A test that hangs ends the process; the longest takes a few seconds.
HANG_SECONDS = 60

case = emulated.case


@pytest.fixture
def driver():
    """The driver, which must be left as it was found."""
    driver = xrt.Driver()
    driver.end_hung_calls()  # those of an earlier test that failed
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=sys.__stderr__)  # sys.stderr may be captured
    yield driver
    faulthandler.cancel_dump_traceback_later()
    if driver.alive():
        gc.collect()  # tracebacks of expected errors keep what was there when they were raised
        driver.settle()
        npu.open_xrt_runtime()  # opening the device frees calls that were given up and have ended
    assert driver.violations() == []
    assert driver.alive() == 0


@pytest.fixture
def bench(driver, case, tmp_path):
    driver.use_kernels("npu2")
    bench = xrt.XrtBench(case.plan, tmp_path)
    yield bench
    vars(bench).clear()  # pytest keeps fixtures until all are torn down


@pytest.fixture
def arguments(bench, case):
    """All of the call's buffers."""
    arguments = whole(*bench.buffers(case.plan, **case.inputs).values())
    yield arguments
    arguments.clear()
