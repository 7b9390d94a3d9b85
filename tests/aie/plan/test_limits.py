# SPDX-License-Identifier: Apache-2.0
"""The table of limits, and each generation's column of it as an object."""

import dataclasses
import re
import subprocess
from pathlib import Path

import pytest

from flownpu.aie.plan.limits import LIMITS, NPU1, NPU2, TABLE, Limits, TileLimits


def test_limit_fields_match_table_rows():
    fields = {field.name for field in dataclasses.fields(Limits)} - {"name", "compute", "memory", "shim"}
    tiles = {
        f"{kind}.{field.name}" for kind in ("compute", "memory", "shim") for field in dataclasses.fields(TileLimits)
    }
    assert sorted(row.name for row in TABLE) == sorted(fields | tiles)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_table_rows_have_unit_and_public_source(row):
    assert row.unit
    assert any(mark in row.source for mark in ("/", "AM0", "arXiv"))


def test_limits_have_tile_kinds_of_both_generations():
    # 4 and 8 usable columns of 4 compute tiles (arXiv 2512.13282, section 3.1).
    assert [limits.columns * (limits.rows - limits.first_compute_row) for limits in (NPU1, NPU2)] == [16, 32]
    assert LIMITS == {"npu1": NPU1, "npu2": NPU2}
    assert [NPU2.kind(0, row) for row in range(7)] == ["shim", "memory", *["compute"] * 4, ""]
    assert NPU1.kind(4, 2) == ""


def test_tile_outside_array_is_refused():
    with pytest.raises(ValueError, match=r"\[npu1\] expected a column in 0..3 and a row in 0..5, got tile \(4, 2\)"):
        NPU1.tile(4, 2)


@pytest.mark.parametrize(
    ("core", "memory", "reached"),
    [
        ((1, 3), (1, 3), True),
        ((1, 3), (1, 4), True),
        ((1, 3), (1, 2), True),
        ((1, 3), (0, 3), True),
        ((1, 3), (2, 3), False),  # the memory to the east is its own core's
        ((1, 2), (1, 1), False),  # a core reaches no memory tile
        ((1, 1), (2, 1), True),  # a memory tile's DMA reaches both neighbours
        ((1, 1), (3, 1), False),
        ((0, 0), (0, 0), False),
    ],
)
def test_memory_is_within_reach_of_neighbours_only(core, memory, reached):
    assert NPU2.reaches_memory(core, memory) is reached


def test_block_floats_are_only_in_xdna2():
    assert "bfp16ebs8" not in NPU1.mmul_shapes
    assert (8, 8, 8) in NPU2.mmul_shapes["bfp16ebs8"]


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_implied_limits_are_never_reached_first(limits):
    """No check of a plan reads these limits, because another limit is always reached first."""
    # A compute tile's memory without the stack has fewer words than its descriptor's length can count.
    assert (limits.compute.memory_bytes - limits.stack_bytes) // limits.granule_bytes < 1 << limits.compute.length_bits
    # A task is repeated by a tap's outermost dimension, a fifo's object by its lock's value.
    assert limits.repeat_maximum >= max(limits.iteration_maximum, limits.lock_maximum)


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
