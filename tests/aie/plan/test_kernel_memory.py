# SPDX-License-Identifier: Apache-2.0
"""The table of the stacks and program memory that kernels need."""

import tomllib
from pathlib import Path

import pytest

from flownpu.aie.designs.gemm import Gemm
from flownpu.aie.plan.kernel_memory import core_needs, stack_for
from flownpu.aie.plan.limits import NPU2

KERNELS = Path(__file__).parents[3] / "aie" / "kernels"


def test_kernel_sources_have_memory_needs():
    table = tomllib.loads((KERNELS / "memory.toml").read_text(encoding="utf-8"))
    assert table.keys() == {file.stem for file in KERNELS.glob("*.cc")}
    for entry in table.values():
        assert entry["stack"] % 32 == 0, "the stack pointer moves by vectors"
        assert all(0 < low <= high for low, high in entry["program"].values())
        assert entry["program"].keys() == {"npu1", "npu2"}


@pytest.mark.parametrize(
    ("sources", "stack"),
    [(["flow_qkv"], 4096), (["gemm", "epilogue"], 2048), (["epilogue", "flow_kv_split"], 4096), (["scale"], 1024)],
)
def test_stack_is_largest_of_kernels(sources, stack):
    """aiecc measures a source that the table lacks: 1024 is its default."""
    assert stack_for(sources) == stack
    assert stack_for([]) == NPU2.stack_bytes


def test_core_needs_follow_from_kernels_that_it_calls():
    array = Gemm("npu2", "bf16", "none", m=64, n=64).program(512, 512, 1024).resolve_program("gemm").array
    for core in array.cores:
        assert core_needs(array, core).keys() == {"gemm", "epilogue"}
        assert core.stack_bytes == 2048
