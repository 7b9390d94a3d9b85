# SPDX-License-Identifier: Apache-2.0
"""The chips that predictions are made for."""

from __future__ import annotations

from dataclasses import dataclass

from flownpu.aie.plan.limits import NPU2, Limits


@dataclass(frozen=True)
class Chip:
    """A chip: its array's limits, with the clock, and its description."""

    name: str
    limits: Limits
    description: str

    @property
    def clock(self) -> float:
        """Cycles a second."""
        return self.limits.clock_megahertz * 1e6


# Both chips have the same array and the same memory in the published measurements.
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("kraken-350", NPU2, "Ryzen AI 7 350 (Krackan Point), XDNA2, two channels of DDR5-5600"),
        Chip("kraken-340", NPU2, "Ryzen AI 5 340 (Krackan Point), XDNA2, two channels of DDR5-5600"),
    )
}
