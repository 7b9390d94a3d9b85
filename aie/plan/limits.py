# SPDX-License-Identifier: Apache-2.0
"""The limits of the hardware: one table for XDNA (npu1: Phoenix, Hawk Point) and XDNA2 (npu2: Strix, Krackan).

`TABLE` has one row for each limit: a name, the value of each generation, the unit and the public source it was read in.
`Limits` is one generation's values as an object that can be asked about a tile: `NPU1` and `NPU2`.

Sources are written `repository:path`. Where two sources disagree, the row holds the smaller value and says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

_TARGET_MODEL = "Xilinx/mlir-aie:lib/Dialect/AIE/IR/AIETargetModel.cpp"
_TARGET_MODEL_HEADER = "Xilinx/mlir-aie:include/aie/Dialect/AIE/IR/AIETargetModel.h"
_STRIDES_WRAPS = "Xilinx/mlir-aie:lib/Dialect/AIEX/IR/AIEXDialect.cpp (verifyStridesWraps)"
_REGISTERS = "FIM43-Redeye/xdna-emu (register model of the tiles' DMAs, after AM025)"
_DRIVER = "amd/xdna-driver:src/driver/amdxdna (npu1_regs.c, npu4_family.h)"
_MMUL = "jgmelber/aie_api:include/aie_api/detail/mmul.hpp"
_GEMM_PAPER = "arXiv 2512.13282, section 3 (NPU architecture)"


class Row(NamedTuple):
    """One limit: its field in `Limits`, both generations' values, the unit, and where it was read."""

    name: str
    npu1: Any
    npu2: Any
    unit: str
    source: str


@dataclass(frozen=True)
class TileLimits:
    """The resources of one kind of tile.

    A resource that the kind of tile does not have is 0. The DMA counts strides, lengths and the innermost wrap of a
    walk in 32-bit words; outer wraps count repetitions.
    """

    memory_bytes: int
    input_channels: int  # S2MM: stream to memory
    output_channels: int  # MM2S: memory to stream
    buffer_descriptors: int
    locks: int
    dimensions: int  # of one buffer descriptor, without the iteration
    stride_bits: int
    wrap_bits: int
    length_bits: int


@dataclass(frozen=True)
class Limits:
    """One generation's column of `TABLE`."""

    name: str
    columns: int
    rows: int
    first_compute_row: int
    compute: TileLimits
    memory: TileLimits
    shim: TileLimits
    memory_descriptors_per_parity: int
    lock_maximum: int
    iteration_maximum: int
    repeat_maximum: int
    layout_size_maximum: int
    granule_bytes: int
    task_queue: int
    stack_bytes: int
    buffer_alignment: int
    constant_bytes: int
    program_bytes: int
    heap_bytes: int
    stream_bits: int
    clock_megahertz: int
    memory_neighbours: tuple[tuple[int, int], ...]
    mmul_shapes: dict[str, tuple[tuple[int, int, int], ...]] = field(hash=False)
    macs_per_cycle: dict[str, int] = field(hash=False)

    def kind(self, column: int, row: int) -> str:
        """The kind of tile at a place of the array.

        Returns:
            "shim", "memory", "compute", or "" where the array has no tile.
        """
        if not (0 <= column < self.columns and 0 <= row < self.rows):
            return ""
        if row == 0:
            return "shim"
        return "memory" if row < self.first_compute_row else "compute"

    def tile(self, column: int, row: int) -> TileLimits:
        """The limits of the tile at a place.

        Raises:
            ValueError: the array has no tile there.
        """
        kind = self.kind(column, row)
        if not kind:
            raise ValueError(
                f"[{self.name}] expected a column in 0..{self.columns - 1} and a row in 0..{self.rows - 1}, "
                f"got tile ({column}, {row})"
            )
        limits: TileLimits = getattr(self, kind)
        return limits

    def reaches_memory(self, core: tuple[int, int], memory: tuple[int, int]) -> bool:
        """Whether code on tile `core` (column, row) reads and writes the memory of tile `memory` without a DMA.

        A core reaches its own memory and that of its neighbours in `memory_neighbours`. A memory tile's DMA reaches
        its own memory and that of the memory tiles beside it.
        """
        kinds = {self.kind(*core), self.kind(*memory)}
        step = (memory[0] - core[0], memory[1] - core[1])
        if kinds == {"compute"}:
            return step in self.memory_neighbours
        return kinds == {"memory"} and step[1] == 0 and abs(step[0]) <= 1


# fmt: off
# ruff: disable[E501]  one row, one line
TABLE: tuple[Row, ...] = (
    Row("columns", 4, 8, "tiles", f"{_TARGET_MODEL_HEADER} (XDNA has a fifth column without a shim DMA: {_GEMM_PAPER})"),
    Row("rows", 6, 6, "tiles", _TARGET_MODEL_HEADER),
    Row("first_compute_row", 2, 2, "row", _TARGET_MODEL_HEADER),
    Row("compute.memory_bytes", 65536, 65536, "bytes", f"{_TARGET_MODEL_HEADER} (getLocalMemorySize)"),
    Row("compute.input_channels", 2, 2, "channels", f"{_TARGET_MODEL} (getNumDestSwitchboxConnections, DMA)"),
    Row("compute.output_channels", 2, 2, "channels", f"{_TARGET_MODEL} (getNumSourceSwitchboxConnections, DMA)"),
    Row("compute.buffer_descriptors", 16, 16, "descriptors", f"{_TARGET_MODEL_HEADER} (getNumBDs)"),
    Row("compute.locks", 16, 16, "locks", f"{_TARGET_MODEL_HEADER} (getNumLocks)"),
    Row("compute.dimensions", 3, 3, "dimensions", "Xilinx/mlir-aie:lib/Dialect/AIE/IR/AIEDialect.cpp (DMABDOp verifier)"),
    Row("compute.stride_bits", 13, 13, "bits of words", _REGISTERS),
    Row("compute.wrap_bits", 8, 8, "bits", _REGISTERS),
    Row("compute.length_bits", 14, 14, "bits of words", _REGISTERS),
    Row("memory.memory_bytes", 524288, 524288, "bytes", f"{_TARGET_MODEL_HEADER} (getMemTileSize)"),
    Row("memory.input_channels", 6, 6, "channels", f"{_TARGET_MODEL} (getNumDestSwitchboxConnections, DMA)"),
    Row("memory.output_channels", 6, 6, "channels", f"{_TARGET_MODEL} (getNumSourceSwitchboxConnections, DMA)"),
    Row("memory.buffer_descriptors", 48, 48, "descriptors", f"{_TARGET_MODEL_HEADER} (getNumBDs)"),
    Row("memory.locks", 64, 64, "locks", f"{_TARGET_MODEL_HEADER} (getNumLocks)"),
    Row("memory.dimensions", 4, 4, "dimensions", "Xilinx/mlir-aie:lib/Dialect/AIE/IR/AIEDialect.cpp (DMABDOp verifier)"),
    Row("memory.stride_bits", 17, 17, "bits of words", _REGISTERS),
    Row("memory.wrap_bits", 10, 10, "bits", _REGISTERS),
    Row("memory.length_bits", 17, 17, "bits of words", _REGISTERS),
    Row("shim.memory_bytes", 0, 0, "bytes", _TARGET_MODEL_HEADER),
    Row("shim.input_channels", 2, 2, "channels", f"{_TARGET_MODEL} (getNumDestShimMuxConnections, DMA)"),
    Row("shim.output_channels", 2, 2, "channels", f"{_TARGET_MODEL} (getNumSourceShimMuxConnections, DMA)"),
    Row("shim.buffer_descriptors", 16, 16, "descriptors", f"{_TARGET_MODEL_HEADER} (getNumBDs)"),
    Row("shim.locks", 16, 16, "locks", f"{_TARGET_MODEL_HEADER} (getNumLocks)"),
    Row("shim.dimensions", 3, 3, "dimensions", _STRIDES_WRAPS),
    Row("shim.stride_bits", 20, 20, "bits of words", _STRIDES_WRAPS),
    Row("shim.wrap_bits", 10, 10, "bits", _STRIDES_WRAPS),
    Row("shim.length_bits", 32, 32, "bits of words", _REGISTERS),
    Row("memory_descriptors_per_parity", 24, 24, "descriptors", f"{_TARGET_MODEL_HEADER} (isBdChannelAccessible: even channels 0..23, odd 24..47)"),
    Row("lock_maximum", 63, 63, "value", f"{_TARGET_MODEL_HEADER} (getMaxLockValue); {_REGISTERS}: 6 bits"),
    Row("iteration_maximum", 64, 64, "repetitions", f"{_STRIDES_WRAPS}: the outermost size is in 1..64"),
    Row("repeat_maximum", 256, 256, "repetitions", "Xilinx/mlir-aie:lib/Dialect/AIEX/Transforms/AIEDMATasksToNPU.cpp: the field is 0..255, one less than the count"),
    Row("layout_size_maximum", 512, 512, "elements", "Xilinx/mlir-aie:lib/Dialect/AIE/IR/AIEDialect.cpp (DMABDOp verifier; its message says 1023)"),
    Row("granule_bytes", 4, 4, "bytes", f"{_TARGET_MODEL_HEADER} (getAddressGenGranularity: 32 bits)"),
    Row("task_queue", 4, 4, "tasks a channel", "amd/IRON:iron/operators/flm/gemm/README.md measured 4 good, 8 hanging; the register manual says 8"),
    Row("stack_bytes", 1024, 1024, "bytes", f"{_TARGET_MODEL_HEADER} (default of aie.core's stack_size)"),
    Row("buffer_alignment", 32, 64, "bytes", f"{_TARGET_MODEL_HEADER} (getComputeTileMaxVectorAlignBits: the widest access; smaller buffers may have 32)"),
    Row("constant_bytes", 1024, 1024, "bytes", "what a core's kernels are left for .data and .rodata, one region (Xilinx/mlir-aie:lib/Targets/AIETargetLdScript.cpp). An estimate: as compiled for this machine by g++ the largest, flow_qkv, has constants of 268 bytes, in vectors of 128 bits, and AIE's have 512: 4 x 256. No object of Peano's was seen"),
    Row("program_bytes", 16384, 16384, "bytes", "AMD AM020 and AM025 (16 KB a core)"),
    Row("heap_bytes", 1 << 26, 1 << 26, "bytes", f"{_DRIVER}: what the controller reads, instructions and arrays' configurations, lies in a heap of 64 MB a process (at most 512 MB; XRT 2.25 asks for 64)"),
    Row("stream_bits", 32, 32, "bits a cycle", "AMD AM020 (AXI4-Stream width of a port)"),
    Row("clock_megahertz", 1600, 1800, "MHz", f"{_DRIVER}: highest step of the H clock"),
    Row("memory_neighbours", ((0, 0), (0, 1), (0, -1), (-1, 0)), ((0, 0), (0, 1), (0, -1), (-1, 0)), "(columns, rows) from the core",
        f"{_TARGET_MODEL} (AIE2TargetModel::isLegalMemAffinity): own, north, south, west"),
    Row("mmul_shapes", {
        "i8": ((4, 8, 8), (2, 8, 8), (8, 8, 8), (4, 8, 4), (4, 16, 4), (8, 8, 4)),
        "bf16": ((4, 8, 4), (8, 8, 4), (4, 16, 8), (8, 8, 8)),
    }, {
        "i8": ((4, 8, 8), (8, 8, 8), (2, 8, 8), (4, 16, 8), (8, 16, 8)),
        "bf16": ((4, 8, 4), (8, 8, 4), (4, 8, 8), (8, 1, 8), (8, 8, 8)),
        "bfp16ebs8": ((8, 8, 8), (8, 8, 16)),
    }, "rows x inner x columns", _MMUL),
    Row("macs_per_cycle", {"i8": 256, "i16": 64, "bf16": 128}, {"i8": 512, "i16": 64, "bf16": 64, "bfp16ebs8": 512}, "a core",
        "AMD AM020; Xilinx/aie_api (XDNA2's bf16 is elementwise, mac_elem_64; its matrix unit takes bfp16)"),
)
# ruff: enable[E501]
# fmt: on


def _column(name: str) -> Limits:
    """Build one generation's `Limits`; a dotted row belongs to one kind of tile."""
    values: dict[str, Any] = {"name": name}
    tiles: dict[str, dict[str, int]] = {"compute": {}, "memory": {}, "shim": {}}
    for row in TABLE:
        value = row.npu1 if name == "npu1" else row.npu2
        kind, _, field = row.name.rpartition(".")
        if kind:
            tiles[kind][field] = value
        else:
            values[field] = value
    values.update({kind: TileLimits(**fields) for kind, fields in tiles.items()})
    return Limits(**values)


NPU1 = _column("npu1")
NPU2 = _column("npu2")
LIMITS: dict[str, Limits] = {limits.name: limits for limits in (NPU1, NPU2)}
