# SPDX-License-Identifier: Apache-2.0
"""Published GEMMs that others measured on the array. The model was fitted to them and is compared with them.

All are from arXiv 2512.13282 (XDNA: Ryzen 9 7940HS; XDNA2: Ryzen AI 7 350; both with two channels of DDR5-5600, in
turbo mode), unless `source` says otherwise; the rows of its tables are in published_gemm.toml. TOPS are 2 M K N over
wall-clock time.

Where the text says "about 4K square", the size is the multiple of the native size that is nearest to 4096 in each
dimension.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flownpu.aie.cost.gemm_kernel import KernelSize
from flownpu.aie.cost.gemm_model import Tiling

_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Core:
    """A kernel on one compute tile (tables 1 to 3): multiply-adds a cycle and what it fills of L1, in KB of 1024."""

    source: str
    target: str
    precision: str
    size: KernelSize
    macs_per_cycle: float
    l1: float


@dataclass(frozen=True)
class Measured:
    """A GEMM on the whole array: its tiles, M x K x N, and TOPS.

    Attributes:
        source: table, figure or section.
        target: npu1 or npu2.
        precision: a name of `gemm_kernel.PRECISIONS`.
        tiling: the tiles.
        size: M, K, N; None where the text says "about 4K square".
        tops: as measured.
        l2: what is used of all memory tiles, in KB of 1024; 0 if not published.
    """

    source: str
    target: str
    precision: str
    tiling: Tiling
    size: tuple[int, int, int] | None
    tops: float
    l2: int = 0

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, K, N."""
        return self.size or self.tiling.nearest(self.target)


_TABLE = {"npu1": "table 2", "npu2": "table 3"}


def _core(source: str, row: list[Any]) -> Core:
    target, precision, (m, k, n), (rate, l1), *_ = row
    return Core(source, target, precision, KernelSize(m, k, n), rate, l1)


CORES: tuple[Core, ...] = (
    *(_core("table 1", row) for row in _DATA["table_1"]),
    *(_core(_TABLE[row[0]], row) for row in _DATA["tables_2_and_3"]),
)
_TABLES = tuple(
    Measured(_TABLE[target], target, precision, Tiling(m, k, n, k_mt), tuple(size), tops, l2)
    for target, precision, (m, k, n), _, (k_mt, size, tops, l2) in _DATA["tables_2_and_3"]
)
# Numbers from the paper's text. A factor in the text multiplies the table's row of the same kernel.
_SINGLE_CORE = Tiling(64, 216, 64, 432)
_TEXT: tuple[Measured, ...] = (
    Measured("section 5.2.1: table 1's kernel", "npu1", "int8-int16", _SINGLE_CORE, None, 4.03),
    Measured("section 5.2.1: table 1's kernel", "npu2", "int8-int16", _SINGLE_CORE, None, 17.86),
    Measured("section 5.2.2, figure 6a: k_mt of 56", "npu1", "bf16-bf16", Tiling(96, 56, 96, 56), None, 1.27),
    Measured("section 5.2.2: k_mt of k, 3.6 less", "npu2", "int8-int16", Tiling(128, 72, 112, 72), None, 30.77 / 3.6),
    Measured(
        "section 5.3.3: no overlap, 27 % less", "npu1", "int8-int16", Tiling(96, 112, 96, 448, overlapped=False),
        (4224, 4032, 4224), 5.85 * 0.73,
    ),
    Measured(
        "section 5.3.3: no overlap", "npu2", "int8-int16", Tiling(128, 72, 112, 432, overlapped=False),
        (4096, 4320, 4480), 22.21,
    ),
)  # fmt: skip
GEMMS: tuple[Measured, ...] = (*_TABLES, *_TEXT)
