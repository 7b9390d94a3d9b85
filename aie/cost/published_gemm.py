# SPDX-License-Identifier: Apache-2.0
"""GEMMs that others measured on the array, as they published them: what the model is fitted to and compared with.

All are of arXiv 2512.13282 (XDNA: Ryzen 9 7940HS; XDNA2: Ryzen AI 7 350; both with two channels of DDR5-5600, in turbo
mode), unless `source` says otherwise. TOPS are 2 M K N over wall-clock time. Where a table does not print k_mt it
follows from its column "L2 Total Mem.": k_mt is the one unknown of A twice, B twice and C once.

Where the text says "about 4K square", the size is the multiple of the native size that is nearest to 4096 in each
dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flownpu.aie.cost.gemm_model import Order, Tiling

__all__ = ["CORES", "GEMMS", "OTHERS", "SWEEPS", "Core", "Measured", "Sweep"]


@dataclass(frozen=True)
class Core:
    """A kernel on one compute tile (tables 1 to 3): multiply-adds a cycle and what it fills of L1, in KB of 1024."""

    source: str
    target: str
    precision: str
    m: int
    k: int
    n: int
    macs_per_cycle: float
    l1: float


@dataclass(frozen=True)
class Measured:
    """A GEMM on the whole array: its tiles, M x K x N, and TOPS.

    Attributes:
        source: table, figure or section.
        target: npu1 or npu2.
        precision: of `gemm_kernel.PRECISIONS`.
        tiling: the tiles.
        size: M, K, N; None where the text says "about 4K square".
        tops: as measured.
        macs_per_cycle: of a core, as measured; 0 if it is not said.
        l2: what is filled of all memory tiles, in KB of 1024; 0 if it is not said.
    """

    source: str
    target: str
    precision: str
    tiling: Tiling
    size: tuple[int, int, int] | None
    tops: float
    macs_per_cycle: float = 0.0
    l2: int = 0

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, K, N."""
        if self.size is not None:
            return self.size
        m, k, n = (round(4096 / unit) * unit for unit in self.tiling.native(self.target))
        return m, k, n


@dataclass(frozen=True)
class Sweep:
    """Over 400 sizes to 8K with one tiling (section 5.2.3): the best TOPS, and column- over row-major on average."""

    target: str
    precision: str
    tiling: Tiling
    best_tops: float
    column_over_row: float = 0.0  # 0: not said


# fmt: off
CORES: tuple[Core, ...] = (
    Core("table 1", "npu1", "int8-int8", 64, 232, 64, 233.0, 62.0),
    Core("table 1", "npu1", "int8-int16", 64, 216, 64, 217.6, 62.0),
    Core("table 1", "npu1", "int8-int32", 48, 280, 48, 192.0, 61.5),
    Core("table 1", "npu1", "bf16-bf16", 64, 104, 64, 112.6, 60.0),
    Core("table 1", "npu2", "int8-int8", 64, 232, 64, 450.6, 62.0),
    Core("table 1", "npu2", "int8-int16", 64, 216, 64, 419.8, 62.0),
    Core("table 1", "npu2", "int8-int32", 48, 280, 48, 384.0, 61.5),
    Core("table 1", "npu2", "bf16-bf16", 48, 152, 48, 158.1, 61.5),
    Core("table 2", "npu1", "int8-int8", 112, 112, 112, 212.5, 61.3),
    Core("table 2", "npu1", "int8-int8", 112, 104, 128, 207.4, 62.8),
    Core("table 2", "npu1", "int8-int16", 96, 112, 96, 192.0, 60.0),
    Core("table 2", "npu1", "int8-int16", 80, 104, 128, 186.9, 62.3),
    Core("table 2", "npu1", "int8-int32", 80, 88, 96, 146.0, 60.3),
    Core("table 2", "npu1", "int8-int32", 64, 80, 128, 133.1, 62.0),
    Core("table 2", "npu1", "bf16-bf16", 96, 56, 96, 99.8, 60.0),
    Core("table 2", "npu1", "bf16-bf16", 96, 48, 112, 97.3, 60.0),
    Core("table 3", "npu2", "int8-int8", 144, 72, 144, 343.0, 60.8),
    Core("table 3", "npu2", "int8-int8", 160, 64, 144, 322.6, 60.5),
    Core("table 3", "npu2", "int8-int16", 128, 72, 112, 307.2, 61.8),
    Core("table 3", "npu2", "int8-int16", 160, 64, 96, 271.4, 62.0),
    Core("table 3", "npu2", "int8-int32", 96, 64, 96, 256.0, 60.0),
    Core("table 3", "npu2", "int8-int32", 128, 56, 80, 209.9, 62.3),
    Core("table 3", "npu2", "bf16-bf16", 112, 48, 96, 137.2, 60.0),
    Core("table 3", "npu2", "bf16-bf16", 160, 40, 80, 124.1, 62.5),
)

_TABLES: tuple[Measured, ...] = (
    Measured("table 2", "npu1", "int8-int8", Tiling(112, 112, 112, 448), (4032, 4032, 4032), 6.52, 212.5, 980),
    Measured("table 2", "npu1", "int8-int8", Tiling(112, 104, 128, 416), (4032, 4160, 4096), 6.48, 207.4, 1004),
    Measured("table 2", "npu1", "int8-int16", Tiling(96, 112, 96, 448), (4224, 4032, 4224), 5.85, 192.0, 960),
    Measured("table 2", "npu1", "int8-int16", Tiling(80, 104, 128, 416), (4160, 4160, 4096), 5.75, 186.9, 996),
    Measured("table 2", "npu1", "int8-int32", Tiling(80, 88, 96, 352), (4160, 4224, 4224), 4.42, 146.0, 964),
    Measured("table 2", "npu1", "int8-int32", Tiling(64, 80, 128, 320), (4096, 4160, 4096), 4.09, 133.1, 992),
    Measured("table 2", "npu1", "bf16-bf16", Tiling(96, 56, 96, 224), (4224, 4032, 4224), 3.12, 99.8, 960),
    Measured("table 2", "npu1", "bf16-bf16", Tiling(96, 48, 112, 192), (4224, 4032, 4032), 3.02, 97.3, 960),
    Measured("table 3", "npu2", "int8-int8", Tiling(144, 72, 144, 432), (4032, 4320, 4608), 37.35, 343.0, 2106),
    Measured("table 3", "npu2", "int8-int8", Tiling(160, 64, 144, 384), (4480, 4224, 4608), 36.13, 322.6, 2064),
    Measured("table 3", "npu2", "int8-int16", Tiling(128, 72, 112, 432), (4096, 4320, 4480), 30.77, 307.2, 2084),
    Measured("table 3", "npu2", "int8-int16", Tiling(160, 64, 96, 384), (4480, 4224, 4608), 29.59, 271.4, 2016),
    Measured("table 3", "npu2", "int8-int32", Tiling(96, 64, 96, 384), (4224, 4224, 4608), 24.74, 256.0, 2016),
    Measured("table 3", "npu2", "int8-int32", Tiling(128, 56, 80, 336), (4096, 4032, 4480), 21.67, 209.9, 2036),
    Measured("table 3", "npu2", "bf16-bf16", Tiling(112, 48, 96, 384), (4032, 4224, 4608), 14.52, 137.2, 2496),
    Measured("table 3", "npu2", "bf16-bf16", Tiling(160, 40, 80, 320), (4480, 4160, 4480), 13.67, 124.1, 2400),
)
# fmt: on

# Numbers of the text; factors are of the table's row of the same kernel.
_SINGLE_CORE = Tiling(64, 216, 64, 432)
_SHORT_RUNS, _LONG_RUNS = Tiling(96, 56, 96, 56), Tiling(96, 112, 96, 448)
_TEXT: tuple[Measured, ...] = (
    Measured("section 5.2.1: table 1's kernel", "npu1", "int8-int16", _SINGLE_CORE, None, 4.03, 217.6),
    Measured("section 5.2.1: table 1's kernel", "npu2", "int8-int16", _SINGLE_CORE, None, 17.86, 419.8),
    Measured("section 5.2.2, figure 6a: k_mt of 56", "npu1", "bf16-bf16", _SHORT_RUNS, None, 1.27, 99.8),
    Measured("section 5.2.2: k_mt of k, 2.4 less", "npu1", "bf16-bf16", _SHORT_RUNS, None, 3.12 / 2.4, 99.8),
    Measured(
        "section 5.2.2: k_mt of k, 3.6 less", "npu2", "int8-int16", Tiling(128, 72, 112, 72), None, 30.77 / 3.6, 307.2
    ),
    Measured(
        "section 5.3.2: two output buffers", "npu1", "bf16-bf16", Tiling(80, 40, 96, 200, output_buffers=2), None, 2.76
    ),
    Measured(
        "section 5.3.2: two output buffers", "npu2", "int8-int16", Tiling(112, 48, 96, 384, output_buffers=2), None,
        26.1,
    ),
    Measured(
        "section 5.3.3: no overlap, 27 % less", "npu1", "int8-int16", replace(_LONG_RUNS, overlapped=False),
        (4224, 4032, 4224), 5.85 * 0.73, 192.0,
    ),
    Measured(
        "section 5.3.3: no overlap", "npu2", "int8-int16", Tiling(128, 72, 112, 432, overlapped=False),
        (4096, 4320, 4480), 22.21, 307.2,
    ),
)  # fmt: skip

GEMMS: tuple[Measured, ...] = (*_TABLES, *_TEXT)

SWEEPS: tuple[Sweep, ...] = (
    Sweep("npu1", "int8-int8", Tiling(112, 112, 112, 448), 6.76, 1.048),
    Sweep("npu1", "int8-int16", Tiling(96, 112, 96, 448), 6.05, 1.044),
    Sweep("npu1", "int8-int32", Tiling(80, 88, 96, 352), 4.57),
    Sweep("npu1", "bf16-bf16", Tiling(96, 56, 96, 224), 3.14, 1.0057),
    Sweep("npu2", "int8-int8", Tiling(144, 72, 144, 432), 38.05, 1.191),
    Sweep("npu2", "int8-int16", Tiling(128, 72, 112, 432), 31.52, 1.252),
    Sweep("npu2", "int8-int32", Tiling(96, 64, 96, 384), 25.31),
    Sweep("npu2", "bf16-bf16", Tiling(112, 48, 96, 384), 14.71, 1.087),
)

# Other designs on other machines, in other power modes; nothing is fitted to them. Those of amd/IRON
# (operators/flm/gemm/README.md, read 2026-11) have C in f32 in L1, 64 x 64 on each tile, A in chunks of 32 rows and
# prepacked B; how deep their calls are is not said: 64 is taken. On XDNA their B is in a single buffer, which the model
# does not know. TOPS follow from M, K, N and the microseconds.
_IRON = Tiling(32, 64, 64, 512, e_y=2, b_order=Order.PANELS)


def _iron(target: str, precision: str, size: tuple[int, int, int], microseconds: float) -> Measured:
    m, k, n = size
    return Measured("amd/IRON flm.GEMM", target, precision, _IRON, size, 2 * m * k * n / microseconds / 1e6)


OTHERS: tuple[Measured, ...] = (
    _iron("npu1", "bf16", (256, 512, 512), 218),
    _iron("npu1", "bf16", (512, 512, 1024), 390),
    _iron("npu1", "bf16", (512, 1024, 1024), 639),
    _iron("npu1", "bf16", (1024, 1024, 1024), 1071),
    _iron("npu1", "bf16", (1024, 2048, 1024), 2134),
    _iron("npu1", "bf16", (512, 1536, 1536), 1498),
    _iron("npu1", "bf16", (1024, 2560, 2560), 6364),
    _iron("npu2", "bfp16", (1024, 1536, 6144), 1143),
)
