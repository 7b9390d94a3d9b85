# SPDX-License-Identifier: Apache-2.0
"""Describes this machine, for the header of every measurement and for `flownpu doctor`."""

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions, packages_distributions, version
from pathlib import Path

import psutil

from flownpu.system import processor

# The instruction sets that the CPU kernels are compiled for, best first, with the flags of /proc/cpuinfo that each
# needs. VNNI, BF16 and AMX are optional extensions of the AVX-512 one (`cpu_isa`).
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_OTHERS = {"avx2": {"avx2", "fma", "f16c"}, "i8mm": {"asimddp", "i8mm"}, "dotprod": {"asimddp"}}


@dataclass(frozen=True)
class Machine:
    """The hardware and software that a measurement depends on."""

    cpu: str
    isa: str
    cores: int
    """Threads that can compute at once: the cores that this process may run on, within its CPU quota."""
    memory: int
    """Bytes of physical memory."""
    system: str
    python: str
    versions: dict[str, str]
    """Version by distribution name; a package that is not installed is absent."""


def describe_machine(root: Path = Path("/")) -> Machine:
    """Reads the machine's description; `root` is the folder below which /proc and /sys are looked for."""
    from flownpu import _native  # noqa: PLC0415 if it does not load, `flownpu doctor` must still run and say so

    model, flags = processor(root, _native.instruction_sets())
    return Machine(
        cpu=model,
        isa=cpu_isa(flags),
        cores=usable_cores(root),
        memory=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        versions=module_versions("flownpu", "onnxruntime", "onnxruntime_genai"),
    )


def usable_cores(root: Path = Path("/")) -> int:
    """The number of threads that can compute at once, as the CPU kernels count them; `root` holds /proc and /sys."""
    from flownpu import _native  # noqa: PLC0415 as in describe_machine

    return _native.usable_processors(root)


def describe_threads(root: Path = Path("/"), numbers: list[int] | None = None) -> str:
    """Describes in a sentence which threads compute unless a session's option says otherwise, and why.

    Args:
        root: the folder below which /proc and /sys are looked for.
        numbers: the numbers of the processors that may be used; None: those that this process may run on.
    """
    from flownpu import _native  # noqa: PLC0415 as in describe_machine

    processors = _native.processors(root, numbers)
    cores = {processor.core for processor in processors}
    used = _native.computing_processors(processors)
    threads = _native.usable_processors(root, numbers)
    words = [f"{threads}, each on a core of its own"]
    if len(processors) > len(cores):
        words.append(f"not on the second threads of {len(processors) - len(cores)} cores, which compute no more")
    if len(cores) > len(used):
        words.append(f"not on {len(cores) - len(used)} cores that are less than half as fast as the fastest")
    if threads < len(used):
        words.append(f"not on {len(used) - threads} cores more, for the quota of CPU time")
    slower = [processor.capacity for processor in used if processor.capacity < used[0].capacity]
    if slower:
        speeds = ", ".join(f"{speed / used[0].capacity:.2f}" for speed in sorted(set(slower), reverse=True))
        words.append(f"cores differ in speed ({len(slower)} have {speeds} of the fastest's): by what each did before")
    nodes = _native.memory_nodes(root)
    if len(nodes) > 1:
        words.append(f"weights lie on {len(nodes)} nodes of memory in turn")
    return "; ".join(words)


def cpu_isa(flags: set[str]) -> str:
    """The best instruction set among these CPU flags: "avx512 with vnni, bf16 and amx", "avx2", "i8mm", "generic"."""
    if flags >= _AVX512:
        extensions = {"vnni": "avx512_vnni", "bf16": "avx512_bf16", "amx": "amx_int8"}
        parts = [name for name, flag in extensions.items() if flag in flags]
        listed = " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))
        return "avx512" + (f" with {listed}" if listed else "")
    return next((isa for isa, needed in _OTHERS.items() if flags >= needed), "generic")


def module_versions(*modules: str) -> dict[str, str]:
    """The version of each distribution that provides one of the modules, by the distribution's name.

    A module that two distributions provide, such as onnxruntime and onnxruntime-gpu, has two entries.
    """
    providers = packages_distributions()
    versions = {}
    for module in modules:
        # An editable install provides its modules through a finder, so it has no entry under the module's name.
        for distribution in providers.get(module, [module]):
            try:
                versions[distribution] = version(distribution)
            except PackageNotFoundError:
                continue
    return versions


def module_folders(name: str) -> dict[str, str]:
    """The folders on Python's path that a distribution is installed in, in the path's order, each with its version."""
    found: dict[str, str] = {}
    for distribution in distributions(name=name):
        found.setdefault(str(Path(str(distribution.locate_file(""))).resolve()), distribution.version)
    return found
