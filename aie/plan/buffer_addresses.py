# SPDX-License-Identifier: Apache-2.0
"""The compiler's places for stack and buffers in a tile's memory, and the room that it leaves for kernels' constants.

These are the rules of mlir-aie's `aie-assign-buffer-addresses` (lib/Dialect/AIE/Transforms/AIEAssignBuffers.cpp) until
the summer of 2026. Since then buffers are aligned and a core has a region for its data, which aiecc measures: there the
rules are an estimate, and aiecc reports what does not fit. A core's stack comes first, then all buffers, the largest
first, by one of two schemes:

    bank-aware         each into the next bank, in turn, that has room for it; if none has, the compiler warns and uses
                       the other scheme for the whole tile
    basic-sequential   one behind the other

Its linker script (lib/Targets/AIETargetLdScript.cpp) gives `.data` and `.rodata` what lies behind the highest buffer.
Where banks are nearly full, bank-aware may leave nothing there, however much is free between buffers: such a tile asks
for basic-sequential. Others keep bank-aware, the compiler's choice, as different banks can be read at the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flownpu.aie.plan.resources import counter_bytes, resources_of

if TYPE_CHECKING:
    from flownpu.aie.plan.data import Array, Tile
    from flownpu.aie.plan.limits import Limits
    from flownpu.aie.plan.resources import Resources

BASIC_SEQUENTIAL = "basic-sequential"


class Placed(NamedTuple):
    """The layout of a tile's memory.

    Attributes:
        scheme: the scheme that the tile asks for; "": the compiler's choice, which is bank-aware.
        end: the address of the first byte behind the highest buffer and the stack.
    """

    scheme: str
    end: int


def placed_buffers(array: Array, limits: Limits, resources: Resources | None = None) -> dict[Tile, Placed]:
    """Every tile with a core, objects or buffers, and its layout; the links must be right (`check.structure`)."""
    resources = resources_of(array, limits) if resources is None else resources
    stacks = {core.tile: core.stack_bytes for core in array.cores}
    sizes: dict[Tile, list[int]] = {tile: [] for tile in stacks}
    for pool in resources.pools:
        if pool.bytes:
            sizes.setdefault(pool.tile, []).extend([pool.object_bytes] * pool.count)
    for buffer in array.buffers:
        sizes.setdefault(buffer.tile, []).append(buffer.type.bytes)
    for core in array.cores:
        if counter_bytes(core):
            sizes[core.tile].append(counter_bytes(core))
    placed = {}
    for tile, buffers in sizes.items():
        have = limits.tile(tile.column, tile.row)
        need = limits.constant_bytes if tile in stacks else 0
        stack = stacks.get(tile, 0)
        end = _bank_aware(buffers, stack, have.memory_bytes, have.memory_banks)
        if end is None or have.memory_bytes - end < need:
            placed[tile] = Placed(BASIC_SEQUENTIAL, stack + sum(buffers))
        else:
            placed[tile] = Placed("", end)
    return placed


def _bank_aware(sizes: list[int], stack: int, memory: int, banks: int) -> int | None:
    """The first byte behind the stack and all buffers, or None if a buffer has no room in any bank."""
    bank = memory // banks
    ends = [number * bank for number in range(banks)]
    ends[0] += stack
    turn = 0
    for size in sorted(sizes, reverse=True):
        order = [(turn + step) % banks for step in range(banks)]
        chosen = next((number for number in order if ends[number] + size <= (number + 1) * bank), None)
        if chosen is None:
            return None
        ends[chosen] += size
        turn = (chosen + 1) % banks
    return max((end for number, end in enumerate(ends) if end > number * bank), default=0)
