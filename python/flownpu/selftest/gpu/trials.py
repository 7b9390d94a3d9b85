# SPDX-License-Identifier: Apache-2.0
"""Runs the cases on an OpenCL device, compares their outputs, and times the kernels with the device's own clock."""

import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, cast

import numpy as np

from flownpu import __version__, _native
from flownpu.machine import describe_machine
from flownpu.selftest.gpu.attention import attention, attention_of_matrices
from flownpu.selftest.gpu.case import Case, PreparedCase
from flownpu.selftest.gpu.dense import dense_products
from flownpu.selftest.gpu.graphs import graphs
from flownpu.selftest.gpu.products import large_products, products, products_of_images, products_of_matrices
from flownpu.selftest.gpu.rows import rows
from flownpu.selftest.gpu.states import states
from flownpu.selftest.outcome import Outcome, Result
from flownpu.selftest.reference.case import compare
from flownpu.system.opencl_loader import use_installed_packages

_FORMAT = 1


@dataclass(frozen=True)
class Variant:
    """A variant of a kernel.

    Attributes:
        name: the kernel's name, a comma, and what is special about the variant.
        make: makes the variant's case from random numbers.
    """

    name: str
    make: Callable[[np.random.Generator], Case]

    def case(self) -> Case:
        """The variant's case. It depends only on the name, not on the selection of variants."""
        return replace(self.make(np.random.default_rng([0, zlib.crc32(self.name.encode())])), name=self.name)


@dataclass(frozen=True)
class KernelResult(Result):
    """The result of a variant.

    Attributes:
        seconds: the sum of `kernels`; None: it did not run.
        kernels: seconds of each kernel by the device's clock, the median of the runs.
        read: bytes that a run must read.
        operations: operations of a run.
    """

    seconds: float | None = None
    kernels: dict[str, float] = field(default_factory=dict)
    read: int = 0
    operations: int = 0


class Devices:
    """The GPU, opened once for each set of options.

    Raises ValueError if there is none.

    Args:
        options: options of all its openings: `gpu_api`.
    """

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        self._options = dict(options or {})
        if self._options.get("gpu_api") != "vulkan":
            use_installed_packages()
        self._devices: dict[tuple[tuple[str, str], ...], _native.GpuDevice] = {}
        self.first = self.of({})

    def of(self, options: Mapping[str, str]) -> _native.GpuDevice:
        """The device with these options."""
        key = tuple(sorted(options.items()))
        if key not in self._devices:
            self._devices[key] = cast("_native.GpuDevice", _native.make_device("gpu", self._options | dict(options)))
        return self._devices[key]


def variants(*, large: bool = True, images: bool = True, matrices: bool = False) -> list[Variant]:
    """All variants of all kernels.

    Args:
        large: include cases that are large enough to measure rates.
        images: include cases with weights in OpenCL images, which not all devices have.
        matrices: include cases for matrix units, likewise.
    """
    parts = [
        products(),
        *([products_of_images()] if images else []),
        *([products_of_matrices(), attention_of_matrices()] if matrices else []),
        dense_products(),
        *([large_products(images=images)] if large else []),
        attention(),
        rows(),
        graphs(),
        states(),
    ]
    return [Variant(name, make) for part in parts for name, make in part]


def run_variant(variant: Variant, devices: Devices, runs: int = 1) -> KernelResult:
    """Runs and compares a variant. Errors go into its result, so that other variants are still tried."""
    try:
        case = variant.case()
        device = devices.of(case.options)
        prepared = PreparedCase(case, device)
        device.take_times()
        found = prepared.run()
        times = [device.take_times()]
        for _ in range(runs - 1):
            prepared.run()
            times.append(device.take_times())
    except (RuntimeError, ValueError) as error:
        return KernelResult(variant.name, Outcome.FAILED, str(error))
    return _compared(case, found, times)


def _compared(case: Case, found: Sequence[np.ndarray | None], times: Sequence[list[tuple[str, float]]]) -> KernelResult:
    by_kernel = defaultdict(list)
    for run in times:
        for kernel, seconds in run:
            by_kernel[kernel].append(seconds)
    kernels = {kernel: median(seconds) for kernel, seconds in by_kernel.items()}
    result = KernelResult(
        case.name, Outcome.PASSED, seconds=sum(kernels.values()), kernels=kernels, read=case.read,
        operations=case.operations,
    )  # fmt: skip
    return result.compared(
        {
            f"output {number}": compare(np.asarray(found[number]), expected.values, expected.tolerance)
            for number, expected in case.expected.items()
        }
    )


def facts_of(facts: _native.GpuFacts) -> dict[str, Any]:
    """A device's properties, by their names in ops/gpu/context/facts.h."""
    return {name: getattr(facts, name) for name in dir(facts) if not name.startswith("_")}


def document(device: _native.GpuDevice, results: Sequence[KernelResult]) -> dict[str, Any]:
    """The report as a JSON document, which users can send."""
    return {
        "format": _FORMAT,
        "flownpu": __version__,
        "device": "gpu",
        "passed": all(result.passed for result in results),
        "facts": facts_of(device.facts),
        "is_software": device.facts.kind == "cpu",
        "stored_type": device.stored_type(),
        "counts": device.counts(),
        "cache_problem": device.cache_problem,
        "machine": asdict(describe_machine()),
        "variants": [result.record("variant") for result in results],
    }
