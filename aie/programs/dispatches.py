# SPDX-License-Identifier: Apache-2.0
"""How much goes to the device together: a dispatch ends long before the driver's watchdog would end it.

The driver takes a run list for one job, and ends a job that is not done after its watchdog's time, however far it has
come. A model of many layers, or attention of a long chunk to a long context, would exceed that time in one dispatch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flownpu.aie.programs.call import HOST

if TYPE_CHECKING:
    from flownpu.aie.programs.cost import Prices
    from flownpu.aie.programs.program import Program

# Linux 7 has the shortest watchdog, 2 s (`tdr_timeout_ms` of amdxdna). Machines with the same chip were published at a
# third of each other's speed (FastFlowLM's issue 625): a quarter of the watchdog leaves room for a fourth.
MOST_SECONDS = 0.5


def with_short_dispatches(program: Program, prices: Prices) -> Program:
    """The program, its dispatches split where they are predicted to take more than `MOST_SECONDS`.

    Predicted at the context's end, where the calls have most to do. A call that takes longer by itself stays alone.
    """
    steps = list(program.steps)
    number = 0
    for dispatch in program.dispatches:
        taken = 0.0
        for step in dispatch:
            if step.call.array != HOST:
                seconds = prices.of_step(step, program.context - program.tokens + step.offset).total
                if taken and taken + seconds > MOST_SECONDS:
                    steps[number], taken = replace(step, apart=True), 0.0
                taken += seconds
            number += 1
    return replace(program, steps=tuple(steps))
