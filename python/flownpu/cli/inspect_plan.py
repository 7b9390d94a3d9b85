# SPDX-License-Identifier: Apache-2.0
"""`flownpu inspect` of a plan: its tiles, fifos and sequence, and whether the plan is valid."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flownpu.aie.artifacts.folder import write_text
from flownpu.aie.check import check
from flownpu.aie.check.structure import check_structure
from flownpu.aie.plan.as_json import from_json
from flownpu.aie.plan.data import Fifo, Plan, Transfer
from flownpu.aie.plan.drawing import draw, family
from flownpu.aie.plan.limits import LIMITS
from flownpu.aie.plan.resources import shared_memory
from flownpu.aie.plan.usage import TileUse, tile_uses
from flownpu.cli.output import bytes_text, console, print_json, print_table, status
from flownpu.errors import FlowNPUError

_STEPS = {
    "Transfer": "transfers",
    "Await": "awaits",
    "Free": "frees",
    "WriteParameter": "run-time parameters",
    "SetBarrier": "starts",
}


def read_plan(path: Path) -> Plan:
    """Reads the file of a plan.

    Raises:
        FlowNPUError: it is not there, or is no plan.
    """
    if not path.is_file():
        raise FlowNPUError(f"no such file: {path}")
    try:
        plan = from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FlowNPUError(
            f"{path} is no plan ({error}): `flownpu build MODEL` writes plans, `flownpu convert` models"
        ) from error
    if plan.array.target not in LIMITS:
        raise FlowNPUError(f"{path} is a plan for {plan.array.target}: expected {' or '.join(LIMITS)}")
    return plan


def inspect_plan(path: Path, *, as_json: bool, svg: Path | None) -> bool:
    """Shows a plan, and draws its array if asked to.

    Returns:
        Whether the checker finds nothing wrong.

    Raises:
        FlowNPUError: the file is no plan, or is too wrong to be drawn.
    """
    plan = read_plan(path)
    limits = LIMITS[plan.array.target]
    violations = [str(violation) for violation in check(plan, limits)]
    # A plan with a wrong structure has nothing to count.
    tiles = [] if check_structure(plan, limits) else tile_uses(plan, limits)
    if as_json:
        print_json(_document(path, plan, tiles, violations))
    else:
        _print(plan, tiles, violations)
    if svg is not None:
        if not tiles:
            raise FlowNPUError(f"{path} cannot be drawn: {violations[0]}")
        write_text(svg, draw(plan, limits))
        status(f"{svg}: the array")
    return not violations


def _document(path: Path, plan: Plan, tiles: list[TileUse], violations: list[str]) -> dict[str, Any]:
    """The document that `--json` prints."""
    limits = LIMITS[plan.array.target]
    linked = _linked(plan)
    return {
        "path": str(path),
        "name": plan.name,
        "target": plan.array.target,
        "valid": not violations,
        "violations": violations,
        "tiles": [asdict(use) for use in tiles],
        "fifos": [
            {
                "name": fifo.name,
                "type": str(fifo.type),
                "bytes": fifo.type.bytes,
                "producer": asdict(fifo.producer.tile),
                "consumers": [asdict(end.tile) for end in fifo.consumers],
                "depths": [end.depth for end in (fifo.producer, *fifo.consumers)],
                "shared_memory": bool(tiles) and shared_memory(fifo, fifo.name in linked, limits) is not None,
            }
            for fifo in plan.array.fifos
        ],
        "sequence": _sequence(plan),
    }


def _linked(plan: Plan) -> set[str]:
    return {name for link in plan.array.links for name in (*link.inputs, *link.outputs)}


def _sequence(plan: Plan) -> dict[str, Any]:
    sequence, fifos = plan.sequence, {fifo.name: fifo for fifo in plan.array.fifos}
    steps = Counter(type(step).__name__ for step in sequence.steps)
    moved: Counter[str] = Counter()
    for step in sequence.steps:
        if isinstance(step, Transfer) and step.fifo in fifos:
            fifo = fifos[step.fifo]
            moved["read" if fifo.producer.tile.row == 0 else "written"] += step.tap.elements * fifo.type.item_bytes
    return {
        "name": sequence.name,
        "buffers": [{"name": b.name, "type": str(b.type), "bytes": b.type.bytes} for b in sequence.buffers],
        "steps": dict(steps),
        "bytes": dict(moved),
    }


# --- Text -------------------------------------------------------------------------------------------------------------


def _print(plan: Plan, tiles: list[TileUse], violations: list[str]) -> None:
    console.print(f"Plan {plan.name} for {plan.array.target}")
    if tiles:
        _print_tiles(tiles)
    _print_fifos(plan, counted=bool(tiles))
    _print_sequence(plan)
    if not violations:
        console.print("The checker finds nothing wrong.")
        return
    console.print(f"The checker finds {len(violations)} mistakes:")
    for violation in violations:
        console.print(f"  {violation}")


def _print_tiles(tiles: list[TileUse]) -> None:
    def row(use: TileUse) -> tuple[str, ...]:
        memory = ""
        if use.memory.available:
            share = 100 * use.memory.used / use.memory.available
            memory = f"{use.memory.used:,} of {use.memory.available:,} B ({share:.0f} %)"
        counts = (use.input_channels, use.output_channels, use.descriptors, use.locks)
        return f"{use.kind} {use.tile}", ", ".join(use.kernels), memory, *map(str, counts)

    resources = ("memory", "DMA in", "DMA out", "descriptors", "locks")
    print_table("tiles: used of available", ("tile", "kernels"), resources, map(row, tiles))


def _print_fifos(plan: Plan, *, counted: bool) -> None:
    """A row a family: fifos with equal objects, depths and ways, whose names differ in numbers only."""
    limits, linked = LIMITS[plan.array.target], _linked(plan)

    def row(fifo: Fifo) -> tuple[str, ...]:
        source, *targets = (limits.kind(e.tile.column, e.tile.row) for e in (fifo.producer, *fifo.consumers))
        target = f"{len(targets)} x {targets[0]}" if len(targets) > 1 else "".join(targets)
        by_memory = counted and shared_memory(fifo, fifo.name in linked, limits) is not None
        depths = "/".join(map(str, dict.fromkeys(end.depth for end in (fifo.producer, *fifo.consumers))))
        way = "shared memory" if by_memory else "DMA"
        return family(fifo.name), source, target, way, str(fifo.type), f"{fifo.type.bytes:,}", depths

    counts = Counter(map(row, plan.array.fifos)).items()
    rows = [(f"{name} ({count})" if count > 1 else name, *cells) for (name, *cells), count in counts]
    print_table("fifos", ("fifo", "from", "to", "by", "object"), ("bytes", "depth"), rows)


def _print_sequence(plan: Plan) -> None:
    about = _sequence(plan)
    rows = [(buffer["name"], buffer["type"], f"{buffer['bytes']:,}") for buffer in about["buffers"]]
    print_table("host buffers", ("buffer", "type"), ("bytes",), rows)
    steps = ", ".join(f"{about['steps'].get(kind, 0)} {words}" for kind, words in _STEPS.items())
    moved = ", ".join(f"{bytes_text(count)} {way}" for way, count in about["bytes"].items())
    console.print(f"Sequence {about['name']}: {steps}; {moved}")
