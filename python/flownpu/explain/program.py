# SPDX-License-Identifier: Apache-2.0
"""A program as `flownpu explain` shows it: its calls, and what each and all of it is predicted to take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flownpu.aie.programs.cost import Prices
    from flownpu.aie.programs.program import Program

__all__ = ["CallPrice", "ProgramPrice", "price_of"]


@dataclass(frozen=True)
class CallPrice:
    """A call, and what one of it takes; for a step of the host the bytes that it reads and writes.

    Attributes:
        operator: stem of the design, or of what the host computes.
        array: its array, or "host".
        name: of the call.
        steps: how many steps make it.
        instruction_words: of 32 bits.
        read_bytes: of main memory.
        written_bytes: to it.
        seconds: predicted, its dispatch with it, changes of array without.
    """

    operator: str
    array: str
    name: str
    steps: int
    instruction_words: int
    read_bytes: int
    written_bytes: int
    seconds: float


@dataclass(frozen=True)
class ProgramPrice:
    """A program at a position.

    Attributes:
        kind: decode or prefill.
        tokens: that it computes.
        position: of the first of them.
        steps: all of them.
        changes: of array, within it.
        dispatches: to the device.
        instruction_words: of all calls.
        read_bytes: of main memory, by the array.
        written_bytes: to it.
        host_bytes: read and written by steps of the host.
        seconds: predicted, by what takes them.
        calls: each once.
    """

    kind: str
    tokens: int
    position: int
    steps: int
    changes: int
    dispatches: int
    instruction_words: int
    read_bytes: int
    written_bytes: int
    host_bytes: int
    seconds: dict[str, float]
    calls: tuple[CallPrice, ...]

    @property
    def total_seconds(self) -> float:
        """The sum of all `seconds`."""
        return sum(self.seconds.values())


def price_of(program: Program, position: int, prices: Prices) -> ProgramPrice:
    """A program from a position on."""
    cost = prices.of(program, position)
    calls = tuple(
        CallPrice(
            step.call.operator, step.call.array, step.call.name, times, round(of_call.words),
            round(of_call.read_bytes), round(of_call.written_bytes), of_call.total,
        )
        for step, times, of_call in prices.of_calls(program, position)
    )  # fmt: skip
    return ProgramPrice(
        program.kind, program.tokens, position, len(program.steps), round(cost.changes), round(cost.dispatches),
        round(cost.words), round(cost.read_bytes), round(cost.written_bytes), round(cost.host_bytes),
        {name: value for name, value in sorted(cost.seconds.items(), key=lambda part: -part[1]) if value}, calls,
    )  # fmt: skip
