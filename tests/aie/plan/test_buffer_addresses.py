# SPDX-License-Identifier: Apache-2.0
"""The places of buffers in a tile, with room for the kernels' constants behind them in each core."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from flownpu.aie.check import check
from flownpu.aie.designs.gemm import Gemm
from flownpu.aie.designs.vector_operators import ResidualRMSNorm
from flownpu.aie.mlir.module import to_mlir
from flownpu.aie.plan.buffer_addresses import BASIC_SEQUENTIAL, Placed, placed_buffers
from flownpu.aie.plan.data import Tile, TileBuffer, Type
from flownpu.aie.plan.limits import LIMITS, NPU2, with_limits
from tests.aie.designs.test_plans import ALL, plan_of
from tests.aie.mlir.aie_opt import lowered, needs_aie_opt
from tests.aie.small_programs import chain

CORE = Tile(0, 2)
BANK = NPU2.compute.memory_bytes // NPU2.compute.memory_banks
# Arrays where bank-aware addresses leave fewer bytes behind the highest buffer than constants need, or none.
FULL = {
    "gemm, bf16": lambda: Gemm("npu2", "bf16", "none", m=64, n=64).program(512, 512, 1024),
    "gemm, bfp16": lambda: Gemm("npu2", "bfp16", "none").program(512, 512, 1024),
    "add_rms_norm": lambda: ResidualRMSNorm("npu2", 4096, False, 4).program(4, 1e-6),
}


def with_buffers(*sizes):
    """`chain` with more buffers of its core, of these sizes in bytes."""
    array = chain().array
    more = tuple(TileBuffer(f"more{number}", CORE, Type((size // 4,), "i32")) for number, size in enumerate(sizes))
    return replace(chain(), array=replace(array, buffers=array.buffers + more))


def alone(*sizes):
    """The layout of a core that has only these buffers, sizes in bytes."""
    array = chain().array
    buffers = tuple(TileBuffer(f"b{number}", CORE, Type((size // 4,), "i32")) for number, size in enumerate(sizes))
    array = replace(array, fifos=(), links=(), kernels=(), buffers=buffers)
    core = replace(array.cores[0], tile=CORE, body=())
    return placed_buffers(replace(array, cores=(core,)), NPU2)[CORE]


def test_buffers_take_next_bank_that_has_room():
    """Worked out by hand: the largest buffer first, the banks in turn; the stack is in the first bank."""
    assert alone() == Placed("", 1024)
    assert alone(4096) == Placed("", 1024 + 4096)
    assert alone(4096, 8192) == Placed("", BANK + 4096)
    # 16384 has no room beside the stack and goes to bank 1; 12288 goes to bank 2, and 8192 to bank 3.
    assert alone(16384, 12288, 8192) == Placed("", 3 * BANK + 8192)
    # The fifth is in bank 0 again, the sixth in bank 1.
    assert alone(8192, 8192, 4096, 4096, 4096, 64) == Placed("", 3 * BANK + 4096)


def test_buffers_beyond_banks_are_placed_sequentially():
    assert alone(20000) == Placed(BASIC_SEQUENTIAL, 1024 + 20000)
    # In banks the last one would end where the memory ends, though 15 KB are free in the first bank.
    assert alone(16384, 16384, 16384) == Placed(BASIC_SEQUENTIAL, 1024 + 3 * 16384)
    # Just as many bytes as constants need are left: no other scheme is needed.
    assert alone(15360, 15360, 15360, 15360) == Placed("", 4 * BANK - 1024)
    assert alone(15364, 15364, 15364, 15360) == Placed(BASIC_SEQUENTIAL, 1024 + 3 * 15364 + 15360)


def test_core_without_room_for_constants_is_refused():
    # Stack, two objects of each of two fifos, parameters, and two counters of objects.
    used = 1024 + 2 * 2 * 256 + 64 + 2 * 4
    assert check(with_buffers(65536 - used - 1024)) == []
    (found,) = check(with_buffers(65536 - used - 1020))
    assert str(found) == (
        "[compute tile (0, 2)] memory behind the highest buffer: need 1024 bytes, have 1020 bytes "
        "(constants of its kernels go there)"
    )


@pytest.mark.parametrize("name", FULL)
def test_full_tiles_print_sequential_placement(name):
    """Bank-aware addresses leave fewer bytes behind the highest buffer than the constants need, or none."""
    plan = plan_of(FULL[name]())
    text = to_mlir(plan)
    assert '= aie.tile(0, 2) {allocation_scheme = "basic-sequential"}' in text
    placed = placed_buffers(plan.array, NPU2)
    assert all(NPU2.compute.memory_bytes - placed[core.tile].end >= NPU2.constant_bytes for core in plan.array.cores)
    in_banks = placed_buffers(plan.array, with_limits(NPU2, constant_bytes=0))
    assert {placed.scheme for tile, placed in in_banks.items() if tile.row > 1} == {""}
    assert all(NPU2.compute.memory_bytes - in_banks[core.tile].end < NPU2.constant_bytes for core in plan.array.cores)


def test_tiles_with_room_leave_placement_to_compiler():
    assert "allocation_scheme" not in to_mlir(chain())


@needs_aie_opt
@pytest.mark.parametrize("plan", [chain, *(lambda make=make: plan_of(make()) for make in FULL.values())])
def test_buffer_addresses_equal_compiler_output(plan):
    """A real aie-opt puts the buffers at these addresses, without a warning."""
    array = plan().array
    text, said = lowered(to_mlir(plan()))
    assert "warning" not in said
    ends = dict.fromkeys((core.tile for core in array.cores), 0)
    widths = {"bf16": 2, "f32": 4, "i32": 4, "i8": 1}
    pattern = r"aie\.buffer\(%\w*tile_(\d+)_(\d+)\) \{address = (\d+) : i32.*memref<(\d+)x(\w+)>"
    for column, row, address, count, kind in re.findall(pattern, text):
        tile, end = Tile(int(column), int(row)), int(address) + int(count) * widths[kind]
        ends[tile] = max(ends.get(tile, 0), end)
    placed = placed_buffers(array, LIMITS[array.target])
    assert {tile: end for tile, end in ends.items() if tile.row} == {
        tile: placed[tile].end for tile in ends if tile.row
    }


@needs_aie_opt
@pytest.mark.parametrize("design", sorted(ALL))
def test_designs_pass_real_compiler_without_warning(design):
    """Every design goes through all of aiecc's passes without a warning."""
    assert "warning" not in lowered(to_mlir(plan_of(ALL[design]())))[1]


# Objects built without a sanitizer, which would add data of its own.
KERNELS = Path(__file__).parents[3] / "build" / "testing" / "CMakeFiles" / "flownpu_aie_xdna2.dir" / "aie" / "kernels"
OBJECTS = sorted(KERNELS.glob("*.o"))


@pytest.mark.skipif(not OBJECTS, reason="there are no kernels' objects in build/testing: they were built elsewhere")
def test_constants_are_no_larger_than_limit_allows():
    """The constants of the kernels as g++ compiles them for this machine, in vectors of 128 bits, a fourth of the
    array's.
    """
    most = 0
    for file in OBJECTS:
        sections = subprocess.run(["size", "-A", file], capture_output=True, text=True, check=True).stdout
        # Other sections hold the messages and types of aie/host/.
        sizes = re.findall(r"^\.(?:rodata\.cst\d+|rodata|data|bss) +(\d+)", sections, re.MULTILINE)
        most = max(most, sum(map(int, sizes)))
    # On the array scalar constants (cst4, cst8) are as large as here; vectors are four times as large.
    assert 0 < most <= 1.25 * NPU2.constant_bytes / 4
