# SPDX-License-Identifier: Apache-2.0
"""The checks of `flownpu doctor` on Windows only."""

from collections.abc import Iterator

from flownpu.doctor.checks import Check, Status

# Installs the run-time library that ONNX Runtime, built with Microsoft's compiler, is linked to.
RUN_TIME = "winget install Microsoft.VCRedist.2015+.x64"


def diagnose_devices() -> Iterator[Check]:
    """A note on each device that FlowNPU drives, or has been tried with, on Linux only; the machine may lack it."""
    yield Check("npu", Status.NOTE, "FlowNPU drives an NPU on Linux alone, so far; the cpu device is used")
    tries = "`flownpu selftest --device gpu --gpu-api vulkan` tries this machine's"
    yield Check("opencl", Status.NOTE, f"FlowNPU was tried with GPUs on Linux alone, so far; {tries}")
