# SPDX-License-Identifier: Apache-2.0
"""A plan followed event by event, with main memory: the timed dataflow, its streams sharing memory's rate.

To `flownpu.aie.cost.timed_dataflow` (cores, streams and the sequence, which wait for one another) this adds

- streams from main memory at their published rate, slower in short runs of contiguous bytes;
- the rate that all streams share: memory serves their objects one after the other;
- the time that the controller takes for each step's instructions;
- the time until the sequence learns that a transfer is over, once for consecutive awaits;
- published cycles of kernels (`kernels.py`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from flownpu.aie.cost.kernels import published_cycles
from flownpu.aie.cost.memory import contiguous_bytes, relative_efficiency
from flownpu.aie.cost.parameters import VALUES
from flownpu.aie.cost.timed_dataflow import Span, TimedDataflow
from flownpu.aie.plan.instructions import words_of_step

if TYPE_CHECKING:
    from flownpu.aie.cost.device import Device
    from flownpu.aie.cost.parameters import Values
    from flownpu.aie.plan.data import Fifo, Plan, Step, Transfer

__all__ = ["Simulated", "simulate"]


@dataclass(frozen=True)
class Simulated:
    """What a call is predicted to take.

    Attributes:
        seconds: the call on the array, without its dispatch.
        read_bytes: from main memory.
        written_bytes: to main memory.
        spans: all that happens, in cycles.
    """

    seconds: float
    read_bytes: int
    written_bytes: int
    spans: list[Span]


def simulate(plan: Plan, device: Device, values: Values = VALUES) -> Simulated:
    """Follow a valid plan (`check.require_valid`)."""
    flow = _Memory(plan, device, values)
    spans = flow.run()
    end = max((span.start + span.cycles for span in spans), default=0.0)
    return Simulated(end / device.clock, flow.read_bytes, flow.written_bytes, spans)


class _Memory(TimedDataflow):
    """The dataflow with main memory."""

    def __init__(self, plan: Plan, device: Device, values: Values) -> None:
        super().__init__(plan, device.limits, partial(published_cycles, device, values))
        self._clock, self._values = device.clock, values
        self._free_at = 0.0  # the cycle in which memory has served all requests so far
        self._asked: dict[str, deque[list[float]]] = {}  # [bytes left, efficiency] of each fifo's started transfers
        self._knows = False  # whether a wait was counted since the last transfer was started
        self.read_bytes = self.written_bytes = 0

    def _transfer_started(self, transfer: Transfer, size: int) -> None:
        run = contiguous_bytes(transfer.tap, self.fifos[transfer.fifo].type.item_bytes)
        asked = self._asked.setdefault(transfer.fifo, deque())
        asked.append([size, relative_efficiency(run, self._values)])
        self._knows = False

    def _awaited(self) -> float:
        told, self._knows = self._knows, True
        return 0.0 if told else self._values["wait"] * self._clock

    def _read(self, step: Step) -> float:
        return words_of_step(step) * self._values["instruction_word"] * self._clock

    def _stream_cycles(self, fifo: Fifo, size: int) -> float:
        on_the_array = super()._stream_cycles(fifo, size)
        if fifo.name not in self._asked:
            return on_the_array
        reads = self.limits.kind(fifo.producer.tile.column, fifo.producer.tile.row) == "shim"
        if reads:
            self.read_bytes += size
        else:
            self.written_bytes += size
        cost = size / self._efficiency(fifo.name, size)  # bytes, with what short runs cost more
        served = cost / self._values["memory_read"] * self._clock
        self._free_at = max(self._free_at, self.now) + served
        own = cost / self._values["channel_read"] * self._clock if reads else on_the_array
        return max(own, self._free_at - self.now)

    def _efficiency(self, fifo: str, size: float) -> float:
        """Memory's efficiency for a fifo's next `size` bytes: that of the transfer in which they begin."""
        asked = self._asked[fifo]
        efficiency = asked[0][1]
        while size > 0 and asked:
            taken = min(size, asked[0][0])
            asked[0][0] -= taken
            size -= taken
            if asked[0][0] == 0:
                asked.popleft()
        return efficiency
