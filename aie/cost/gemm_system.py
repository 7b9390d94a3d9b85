# SPDX-License-Identifier: Apache-2.0
"""Tiles of a GEMM for the whole array, at which computing and reading main memory balance.

The search is that of arXiv 2512.13282, section 4.5.2, with predictions in place of the paper's measurements. For every
k, m and n are as large as L1 allows (`gemm_kernel.largest_kernels`). A smaller k means fewer reads of main memory, and
slower cores; at the best k neither waits for the other. The paper starts where memory is the bound, and lowers k until
its measurements get worse. A prediction takes no time, so here all k are tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from flownpu.aie.cost.gemm_kernel import DEPTH, KernelSize, largest_kernels, peak_macs, precision_of, single_core_kernel
from flownpu.aie.cost.gemm_model import ROWS, GemmPrediction, Tiling, predict_gemm
from flownpu.aie.cost.gemm_parameters import gemm_parameters
from flownpu.aie.plan.limits import LIMITS

# The search takes the smallest k_mt with TOPS within this share of the best: longer runs in memory gain little, and K
# is padded to k_mt (section 5.2.2).
_SATURATED = 0.02
# The longest k_mt that is tried: that of the paper's best kernels (section 5.2.2).
_LONGEST_K_MT = 448


Candidate: TypeAlias = tuple[Tiling, GemmPrediction]


@dataclass(frozen=True)
class GemmSearch:
    """A search for tiles.

    Attributes:
        target: npu1 or npu2.
        precision: a name of `gemm_kernel.PRECISIONS`.
        size: M, K, N; None: for each tiling, the multiples of its native size that are nearest to 4096.
    """

    target: str
    precision: str
    size: tuple[int, int, int] | None = None

    def kernels(self, k: int, *, throughput: float = 0.0) -> list[KernelSize]:
        """The largest tiles of C with this k; `throughput`: multiply-adds a cycle measured at k + 8; 0: modelled."""
        known, kind = gemm_parameters(self.target), precision_of(self.target, self.precision)
        measured = throughput / peak_macs(known, kind) if throughput else None
        return largest_kernels(known, kind, k, measured=measured)

    def with_k_mt(self, size: KernelSize) -> Candidate | None:
        """The smallest k_mt with long enough runs in main memory; None if not even k fits in L2."""
        room = LIMITS[self.target].columns * LIMITS[self.target].memory.memory_bytes
        tried: list[Candidate] = []
        for k_mt in range(size.k, max(_LONGEST_K_MT, size.k) + 1, size.k):
            tiling = Tiling(size.m, size.k, size.n, k_mt)
            if l2_bytes(self.target, self.precision, tiling) > room:
                break
            tried.append((tiling, self.predict(tiling)))
        best = max((prediction.tops for _, prediction in tried), default=0.0)
        return next((one for one in tried if one[1].tops >= (1 - _SATURATED) * best), None)

    def predict(self, tiling: Tiling) -> GemmPrediction:
        """A tiling at the search's size."""
        return predict_gemm(self.target, self.precision, *(self.size or tiling.nearest(self.target)), tiling)

    def candidates(self) -> list[Candidate]:
        """The best tiles of every k, the fastest first.

        Raises:
            ValueError: there is no such target or precision.
        """
        known, kind = gemm_parameters(self.target), precision_of(self.target, self.precision)
        found: list[Candidate] = []
        for k in range(single_core_kernel(known, kind).k, DEPTH, -DEPTH):
            of_k = [one for size in self.kernels(k) if (one := self.with_k_mt(size)) is not None]
            if of_k:
                found.append(max(of_k, key=lambda one: (one[1].tops, -one[0].m)))
        return sorted(found, key=lambda one: -one[1].tops)


def l2_bytes(target: str, precision: str, tiling: Tiling) -> float:
    """Bytes in all memory tiles: A and B twice, C once."""
    kind, columns = precision_of(target, precision), LIMITS[target].columns
    a = 2 * ROWS * tiling.e_y * tiling.m * tiling.k_mt * kind.a
    b = 2 * columns * tiling.gates * tiling.e_x * tiling.n * tiling.k_mt * kind.b
    return a + b + columns * ROWS * tiling.m * tiling.n * kind.output
