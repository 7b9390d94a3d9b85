# SPDX-License-Identifier: Apache-2.0
"""A program as `flownpu explain` shows it: its calls, and how long each call and the whole are predicted to take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flownpu.aie.programs.cost import Prices
    from flownpu.aie.programs.program import Program


@dataclass(frozen=True)
class CallPrice:
    """The cost of one call, or of one step of the host.

    Attributes:
        operator: the stem of the design, or of the operator that the host computes.
        array: the name of the call's array, or "host".
        name: the call's name.
        steps: how many steps of the program make this call.
        instruction_words: words of 32 bits.
        read_bytes: bytes read from main memory.
        written_bytes: bytes written to main memory.
        seconds: the predicted time, with the call's dispatch and without changes of array.
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
    """The cost of one run of a program at a position.

    Attributes:
        kind: decode, prefill, or block (the tokens of an image).
        tokens: how many tokens it computes.
        position: the position of the first of them.
        steps: how many steps it has.
        changes: how often the array changes within it.
        dispatches: how many dispatches to the device it takes.
        instruction_words: words of 32 bits, of all calls.
        read_bytes: bytes that the array reads from main memory.
        written_bytes: bytes that the array writes to main memory.
        host_bytes: bytes that steps of the host read and write.
        seconds: predicted times, by what takes them.
        calls: its calls, each once.
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
    """The cost of a program whose first token is at `position`."""
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
