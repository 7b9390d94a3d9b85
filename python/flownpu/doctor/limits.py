# SPDX-License-Identifier: Apache-2.0
"""The checks of `flownpu doctor` for the processor, the memory, and this process's limits on both."""

import platform
import re
from collections.abc import Iterator

import psutil

from flownpu import _native
from flownpu.doctor.checks import Check, Host, Status
from flownpu.machine import describe_machine, describe_threads

GIB = 2**30
MORE_TIME = "docker run --cpus=N, or CPUQuota=N00% of the systemd service, with N processors"
MORE_MEMORY = "docker run --memory=SIZE, or MemoryMax=SIZE of the systemd service"
HOST_PROCESSOR = "let the virtual machine have the host's processor (QEMU: -cpu host)"
# The features that the fast kernels need, by platform.machine(), and which processors have it.
NEEDED = {
    "x86_64": ("AVX2", "a processor with AVX2 (Intel since 2013, AMD since 2015)"),
    "aarch64": (
        "dot products",
        "a processor with Armv8.2's dot products (Cortex-A76 and Neoverse N1 of 2018, and later)",
    ),
}
# Bytes of address space that Python, its modules, the provider and its threads' stacks take, without any weight.
BARE = 2 * GIB


def diagnose_machine(host: Host) -> Iterator[Check]:
    """Processor and memory, and the limits that this process has."""
    machine = describe_machine(host.root)
    has_kernels = machine.isa != "generic"
    slow = remedy = ""
    if not has_kernels:
        lacking, remedy = NEEDED.get(platform.machine(), NEEDED["x86_64"])
        slow = f"; the CPU kernels are slow without {lacking}"
        flags = re.search(r"^flags\s*:(.*)$", host.read("proc/cpuinfo"), re.MULTILINE)
        if flags and "hypervisor" in flags[1].split():
            remedy = HOST_PROCESSOR
    status = Status.GOOD if has_kernels else Status.NOTE
    yield Check("processor", status, f"{machine.cpu}, {machine.isa}, {machine.cores} cores{slow}", remedy)
    yield Check("threads", Status.GOOD, describe_threads(host.root))
    quota = _native.processor_quota(host.root)
    if quota is not None and quota[0] < psutil.cpu_count():
        found = f"{quota[0]:.4g} of {psutil.cpu_count()} processors ({quota[1]}): {_threads(machine.cores)}"
        if quota[0] < 1:
            found += ", which stands still for a part of each period"
        yield Check("cpu quota", Status.NOTE, found, MORE_TIME)
    memory = psutil.virtual_memory()
    yield Check("memory", Status.GOOD, f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available")
    limit = _native.memory_limit(host.root)
    if limit is not None and limit[0] < memory.total:
        found = f"{limit[0] / GIB:.1f} of {memory.total / GIB:.1f} GiB ({limit[1]}), for model and cache together"
        yield Check("memory limit", Status.NOTE, found, MORE_MEMORY)
    space = re.search(r"^Max address space\s+(\d+)", host.read("proc/self/limits"), re.MULTILINE)
    if space:
        found = f"{int(space[1]) / GIB:.1f} GiB, in which the model's file has to fit when it is mapped"
        yield Check("address space", Status.BAD if int(space[1]) < BARE else Status.NOTE, found, "ulimit -v unlimited")


def _threads(count: int) -> str:
    return "1 thread computes" if count == 1 else f"{count} threads compute"
