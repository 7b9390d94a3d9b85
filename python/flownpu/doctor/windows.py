# SPDX-License-Identifier: Apache-2.0
"""What `flownpu doctor` says of Windows alone."""

from collections.abc import Iterator

from flownpu.doctor.checks import Check, Status

__all__ = ["RUN_TIME", "diagnose_devices"]

# What ONNX Runtime's libraries, built with Microsoft's compiler, are linked to.
RUN_TIME = "winget install Microsoft.VCRedist.2015+.x64"


def diagnose_devices() -> Iterator[Check]:
    """The devices that FlowNPU drives on Linux alone: whether the machine has them is not looked at."""
    for device, what in (("npu", "an NPU"), ("opencl", "a GPU")):
        yield Check(device, Status.NOTE, f"FlowNPU drives {what} on Linux alone, so far; the cpu device is used")
