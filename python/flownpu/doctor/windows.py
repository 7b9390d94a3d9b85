# SPDX-License-Identifier: Apache-2.0
"""The checks of `flownpu doctor` on Windows only."""

from collections.abc import Iterator

from flownpu.doctor.checks import Check, Status

# Installs the run-time library that ONNX Runtime, built with Microsoft's compiler, is linked to.
RUN_TIME = "winget install Microsoft.VCRedist.2015+.x64"


def diagnose_devices() -> Iterator[Check]:
    """A note on each device that FlowNPU drives on Linux only, whether or not the machine has it."""
    for device, what in (("npu", "an NPU"), ("opencl", "a GPU")):
        yield Check(device, Status.NOTE, f"FlowNPU drives {what} on Linux alone, so far; the cpu device is used")
