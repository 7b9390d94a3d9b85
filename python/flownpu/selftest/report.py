# SPDX-License-Identifier: Apache-2.0
"""The report of the self-test, which users can send, and which `flownpu predict --measured` reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from flownpu import __version__
from flownpu.aie.cost.parameters import TABLE
from flownpu.doctor.checks import Host
from flownpu.doctor.npu import diagnose_npu
from flownpu.doctor.xrt import load_plugin
from flownpu.machine import describe_machine
from flownpu.selftest.measures import measure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.selftest.measures import Measurement
    from flownpu.selftest.runner import StageResult

_FORMAT = 1


@dataclass(frozen=True)
class SelftestReport:
    """The results of the stages.

    Attributes:
        device: emulate or npu.
        target: npu1 or npu2.
        toolchain: versions of the compilers; empty for the emulator.
        results: the stages' results.
    """

    device: str
    target: str
    toolchain: dict[str, str]
    results: Sequence[StageResult]

    @property
    def passed(self) -> bool:
        """Whether every stage passed."""
        return all(result.passed for result in self.results)

    @property
    def measurements(self) -> list[Measurement]:
        """The parameters derived from the stages' times; none on the emulator, whose times mean nothing."""
        return [] if self.device == "emulate" else measure(self.results, self.target)

    def document(self) -> dict[str, Any]:
        """The report as a JSON document. `measured` has the cost model's parameters: name to number."""
        measurements = self.measurements
        runtimes = [result.run.runtime for result in self.results if result.run is not None]
        return {
            "format": _FORMAT,
            "flownpu": __version__,
            "device": self.device,
            "target": self.target,
            "passed": self.passed,
            "runtime": runtimes[0] if runtimes else None,
            "toolchain": self.toolchain,
            "machine": asdict(describe_machine()),
            "npu": [asdict(check) for check in diagnose_npu(Host(load_plugin=load_plugin))],
            "stages": [result.record("stage") | {"seconds": result.seconds} for result in self.results],
            "measured": {found.name: found.value for found in measurements if found.value and found.name in TABLE},
            "measurements": [asdict(found) for found in measurements],
        }
