# SPDX-License-Identifier: Apache-2.0
"""When what happens in a plan is predicted to happen, as a trace for Perfetto or chrome://tracing.

**An estimate**; nothing of it was measured. It shows the plan as `flownpu.aie.cost.simulation` follows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flownpu.aie.cost.device import Device
from flownpu.aie.cost.simulation import simulate

if TYPE_CHECKING:
    from flownpu.aie.plan.data import Plan, Tile
    from flownpu.aie.plan.limits import Limits

__all__ = ["trace"]


def trace(plan: Plan, limits: Limits) -> dict[str, Any]:
    """A valid plan (`check.require_valid`) in Chrome's trace format: a process a tile, a thread a lane; times in us."""
    spans = simulate(plan, Device(limits.name, limits, "")).spans
    tiles = sorted({span.tile for span in spans if span.tile is not None})
    processes: dict[Tile | None, int] = {None: 0} | {tile: number + 1 for number, tile in enumerate(tiles)}
    lanes = {lane: number for number, lane in enumerate(sorted({(span.tile is not None, span.lane) for span in spans}))}
    events: list[dict[str, Any]] = []
    for tile, process in processes.items():
        name = f"{limits.kind(tile.column, tile.row)} tile {tile}" if tile else "host"
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": f"{name} (estimate)"}})
    for tile, lane in dict.fromkeys((span.tile, span.lane) for span in spans):
        thread = {"pid": processes[tile], "tid": lanes[tile is not None, lane]}
        events.append({"ph": "M", **thread, "name": "thread_name", "args": {"name": f"{lane} (estimate)"}})
    events += [
        {
            "ph": "X",
            "pid": processes[span.tile],
            "tid": lanes[span.tile is not None, span.lane],
            "name": span.name,
            "cat": "estimate",
            "ts": span.start / limits.clock_megahertz,
            "dur": span.cycles / limits.clock_megahertz,
            "args": {"cycles": round(span.cycles, 1)},
        }
        for span in spans
    ]
    about = {
        "plan": plan.name,
        "target": limits.name,
        "estimate": "estimated from rates, not measured (docs/model.md says from what)",
        "clock_megahertz": limits.clock_megahertz,
        "cycles": round(max((span.start + span.cycles for span in spans), default=0.0)),
    }
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}
