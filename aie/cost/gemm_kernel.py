# SPDX-License-Identifier: Apache-2.0
"""The GEMM of one compute tile: the time of a kernel's call, and the best size of a call.

The integer programme of arXiv 2512.13282, section 4.5.1, solved by trying everything. A *call* multiplies A[m, k] by
B[k, n] and adds the product to C[m, n], which stays in L1; A and B are double-buffered.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from flownpu.aie.cost.gemm_parameters import gemm_parameters
from flownpu.aie.plan.limits import LIMITS

if TYPE_CHECKING:
    from flownpu.aie.cost.gemm_parameters import GemmParameters


# 1 KB of the 64 is the stack (equation 5). The paper's kernels stay below this limit: 48 x 288 x 48 of int8-int32 would
# reach it exactly, and table 1 has 48 x 280 x 48.
L1_BYTES = 63 * 1024
# All kernels of the paper's tables are multiples of 16 x 8 x 16: the matrix unit takes 8 x 8 x 8 (XDNA: 4 x 8 x 8, 4 x
# 8 x 4), and registers hold two (four) of these down and across.
SIDE, DEPTH = 16, 8
_LARGEST = 512  # bound of m and n: L1 does not hold 512 columns of C by 16 rows of the smallest type, with k of 8
_SIDES = list(itertools.product(range(SIDE, _LARGEST, SIDE), repeat=2))  # m, n
_ROUNDED = 2  # decimals of an efficiency: all throughputs of tables 1 to 3 are whole percents of the unit's rate


@dataclass(frozen=True)
class Precision:
    """The numbers that a GEMM multiplies: bytes of an element of each matrix.

    Attributes:
        name: as the paper names it, input-output; `bf16` and `bfp16` are those of our own design.
        unit: a kind of `macs` (parameters.toml).
        a: bytes of an element of A, in main memory and on the array.
        b: bytes of an element of B; block floating point holds 8 values in 9 bytes.
        accumulator: bytes of an element of C while it is reduced.
        output: bytes of an element of C in main memory.
        staged: whether C leaves through a buffer of its own, into which the sums are rounded.
    """

    name: str
    unit: str
    a: float
    b: float
    accumulator: int
    output: int
    staged: bool = False


_BFP16 = 9 / 8
PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("int8-int8", "int8", 1, 1, 1, 1),
        Precision("int8-int16", "int8", 1, 1, 2, 2),
        Precision("int8-int32", "int8", 1, 1, 4, 4),
        Precision("bf16-bf16", "bf16", 2, 2, 2, 2),
        Precision("bfp16-bf16", "bfp16", 2, _BFP16, 2, 2),
        Precision("bf16", "bf16", 2, 2, 4, 2, staged=True),
        Precision("bfp16", "bfp16", 2, _BFP16, 4, 2, staged=True),
    )
}


@dataclass(frozen=True)
class KernelSize:
    """m x k x n of a call."""

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.m} x {self.k} x {self.n}"

    @property
    def macs(self) -> int:
        """Multiply-adds."""
        return self.m * self.k * self.n


@cache
def precision_of(target: str, name: str) -> Precision:
    """A precision that a generation multiplies in.

    Raises:
        ValueError: there is no such precision, or the generation has no unit for it.
    """
    units = gemm_parameters(target).kinds("macs")
    known = [precision.name for precision in PRECISIONS.values() if precision.unit in units]
    if name not in known:
        raise ValueError(f"[gemm cost] expected a precision of {', '.join(known)} on {target}, got {name!r}")
    return PRECISIONS[name]


def call_cycles(known: GemmParameters, precision: Precision, size: KernelSize) -> float:
    """Cycles of a call (equation 1, with the efficiency resolved).

    The inner loop over k does the unit's multiply-adds. For each element of C the loop is filled and drained once, and
    the partial sum is loaded and stored: with a larger k this counts less.
    """
    c = known["element"] + known["accumulator_byte"] * precision.accumulator
    return size.macs / known[f"macs {precision.unit}"] + c * size.m * size.n


def macs_per_cycle(known: GemmParameters, precision: Precision, size: KernelSize) -> float:
    """Multiply-adds a cycle of a core while its kernel runs."""
    return size.macs / call_cycles(known, precision, size)


def peak_macs(known: GemmParameters, precision: Precision) -> int:
    """Multiply-adds a cycle of the matrix unit at best; XDNA2 multiplies bf16 in block floating point."""
    rates = LIMITS[known.target].macs_per_cycle
    if precision.unit == "int8":
        return rates["i8"]
    return rates.get("bfp16ebs8", rates["bf16"])


def efficiency(known: GemmParameters, precision: Precision, size: KernelSize) -> float:
    """The throughput as a share of `peak_macs`: `eff` of equation 1."""
    return macs_per_cycle(known, precision, size) / peak_macs(known, precision)


def l1_bytes(precision: Precision, size: KernelSize) -> float:
    """Bytes of a compute tile's memory (equation 5): A and B twice, C once.

    With staged sums, the sums are there once in addition to the buffers through which C leaves.
    """
    inputs = 2 * size.k * (size.m * precision.a + size.n * precision.b)
    outputs = precision.output + (precision.accumulator if precision.staged else 0)
    return inputs + size.m * size.n * outputs


def fits(precision: Precision, size: KernelSize) -> bool:
    """Whether a call's buffers fit in L1 beside the stack."""
    return l1_bytes(precision, size) < L1_BYTES


def is_compute_bound(
    known: GemmParameters, precision: Precision, size: KernelSize, input_bytes: float, efficiency: float
) -> bool:
    """Equations 2 to 4: whether A and B arrive during the call before, each at `input_bytes` a cycle."""
    rate = peak_macs(known, precision) * round(efficiency, _ROUNDED)
    return rate * precision.a <= input_bytes * size.n and rate * precision.b <= input_bytes * size.m


def single_core_kernel(known: GemmParameters, precision: Precision, *, measured: float | None = None) -> KernelSize:
    """The kernel of highest throughput (table 1): the smallest tile of C whose inputs arrive in time.

    The paper names two objectives, most multiply-adds and least m n. Taken in that order they yield the kernels of
    tables 2 and 3 (144 x 72 x 144); table 1's need the other order: least m n, then most multiply-adds.

    Args:
        known: the generation's parameters.
        precision: what is multiplied.
        measured: a measured efficiency, to replace the modelled one.
    """
    found = [
        size
        for m, n in _SIDES
        if (size := _deepest(precision, m, n)) is not None
        and is_compute_bound(
            known, precision, size, known["core_input"], measured or efficiency(known, precision, size)
        )
    ]
    return min(found, key=lambda size: (size.m * size.n, -size.macs))


def largest_kernels(
    known: GemmParameters, precision: Precision, k: int, *, measured: float | None = None
) -> list[KernelSize]:
    """The kernels of this k with the largest m n (section 4.5.2): one, or several with equal m n.

    A and B come in at the streams' width, by which they reach a tile on the array. The efficiency is taken from the
    search's step before, k + 8, as in the paper: the modelled one, or the one `measured` there.
    """
    best: list[KernelSize] = []
    for m, n in _SIDES:
        size = KernelSize(m, k, n)
        if not fits(precision, size):
            continue
        before = measured or efficiency(known, precision, KernelSize(m, k + DEPTH, n))
        if not is_compute_bound(known, precision, size, known["stream"], before):
            continue
        product = best[0].m * best[0].n if best else 0
        if m * n >= product:
            best = [*best, size] if m * n == product else [size]
    return best


def _deepest(precision: Precision, m: int, n: int) -> KernelSize | None:
    """The largest k with which m x n fits."""
    each = 2 * (m * precision.a + n * precision.b)
    most = int((L1_BYTES - l1_bytes(precision, KernelSize(m, 0, n))) / each) // DEPTH * DEPTH
    while most > 0 and not fits(precision, KernelSize(m, most, n)):
        most -= DEPTH
    return KernelSize(m, most, n) if most > 0 else None
