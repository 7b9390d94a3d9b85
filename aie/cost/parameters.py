# SPDX-License-Identifier: Apache-2.0
"""Every number that the cost model takes from outside: value, unit, where it is from, and when that was read.

A *fitted* parameter has a physical meaning, one value for all models and lengths, and says from which published rows it
was fitted; the command in docs/model.md fits them again, and a test compares. All others were published as they are, or
are derived from what was; the derivation is in `source`.

Functions that use them take them as an argument (`values`), so that a fit, or a "what if", can change some.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TABLE", "VALUES", "Parameter", "Values"]

Values: TypeAlias = "Mapping[str, float]"


@dataclass(frozen=True)
class Parameter:
    """One number, its unit, where it was published, and when it was read; `fitted_from`: the rows it was fitted to."""

    value: float
    unit: str
    source: str
    date: str
    fitted_from: str = ""


_PROJECTIONS_PAPER = "arXiv 2602.06063"
_DECODE_TABLES = (
    "tables 3 and 4 of arXiv 2602.06063; figure 8 and table III of Xu et al., Efficient LLM Decoding on Ryzen AI NPUs"
)
_PROMPT_TABLES = "tables 1 and 2 of arXiv 2602.06063; FastFlowLM v0.9.22's prompts of d = 128"
_IRON_COSTS = "amd/IRON decode_costs_npu2.json (Strix Halo, turbo)"
_IRON_LEVERS = "Xilinx/mlir-aie levers.md, cycles of a core of XDNA2"

# fmt: off
# ruff: disable[E501]  one parameter, one line
TABLE: dict[str, Parameter] = {
    # --- Main memory and the streams into the array -------------------------------------------------------------------
    "memory_peak": Parameter(89.6e9, "bytes/s", "two channels of DDR5-5600, 64 bits each: the machines of arXiv 2602.06063 and 2512.13282", "2026-11"),
    "memory_read": Parameter(66e9, "bytes/s", "what the array reads of main memory with as many streams as help: `read` of gemm_parameters.py; the same chip with the software of 2026 decodes as if with 65.6e9 (FastFlowLM, nine models at 1k)", "2026-11", "GEMM throughput, table 3 of arXiv 2512.13282"),
    "channel_read": Parameter(5.271e9, "bytes/s", "what a shim tile's stream reads; 32 bits a cycle would be 7.2e9 at 1.8 GHz", "2026-11", _DECODE_TABLES),
    "burst_bytes": Parameter(64.0, "bytes", "a burst of DDR5 (16 beats of 32 bits): a shorter run costs as much", "2026-11"),
    "run_overhead_bytes": Parameter(12.0, "bytes", "B in runs of 16 bytes was read at 10 GB/s, in long ones at 47 (amd/IRON flm GEMM): 16 / (64 + x) = 10 / 47", "2026-11"),
    # --- Dispatches, waits, changes of array
    # ----------------------------------------------------------------------------
    "dispatch": Parameter(47e-6, "s", f"{_IRON_COSTS}: 44 to 50 us", "2026-11"),
    "wait": Parameter(3.4e-6, "s", f"{_IRON_COSTS}: a step inside a fused ELF, the cheapest (RMSNorm), all of it taken for the wait", "2026-11"),
    "instruction_word": Parameter(15e-9, "s", f"a word of the controller's instructions, read and done. **Assumed**: {_IRON_COSTS}'s cheapest step, RMSNorm, 3.4 us, has 71 words at least (two transfers and a wait, aie/plan/instructions.py); less what a row of 2048 takes by this table (two streams of 4096 bytes, 2048 elements) 1.08 us is left for them. At least 0.8e-9, a word from main memory at `channel_read`; at most 48e-9, if moving took nothing", "2026-11"),
    "array_change": Parameter(2.7e-3, "s", "one warm switch between two xclbins, 2.7 to 5.8 ms: a comment on pull request 71 of amd/IRON; 4.9 ms, not warm, in arXiv 2512.13282, section 5.3.1. The least is taken", "2026-11"),
    "reconfiguration": Parameter(4.9e-3, "s", "arXiv 2512.13282, section 5.3.1: a whole GEMM design, XDNA2; of the published implementation", "2026-11"),
    # --- The host -----------------------------------------------------------------------------------------------------
    "host_per_logit": Parameter(32.45e-9, "s", "choosing a token among all logits on the CPU, in the published implementation", "2026-11", _DECODE_TABLES),
    "own_host_per_logit": Parameter(2e-9, "s", "two bytes read by the CPU at 2 GB/s (host read of a buffer, docs of amd/IRON), and as long again to compare", "2026-11"),
    "host_memory": Parameter(30e9, "bytes/s", "what two cores read of main memory: 29 to 33e9 on a server of Zen 4, measured; a laptop's are taken to be as fast", "2026-11"),
    "host_flush": Parameter(30e9, "bytes/s", "writing back or dropping cache lines for the array: taken to be one more pass over the bytes, at `host_memory`", "2026-11"),
    # --- Kernels ------------------------------------------------------------------------------------------------------
    "dequant_block": Parameter(2115, "cycles", f"{_IRON_LEVERS}: q4nx_dequant of a block", "2026-11"),
    "dqp_block": Parameter(2903, "cycles", f"{_IRON_LEVERS}: q4nx_dequant (2115) and then bf16 mv 32 x 256 (788), as if nothing of them were fused", "2026-11"),
    "vector_element": Parameter(0.6774, "cycles", "norms, RoPE and gated activation, for each element on one core; single kernels were published at 0.2 to 0.84", "2026-11", _PROMPT_TABLES),
    "softmax_score": Parameter(0.414, "cycles", f"{_IRON_LEVERS}: partial softmax of 64 x 64, 1696", "2026-11"),
    "score_element": Parameter(0.1119, "cycles", "published attention of many tokens: of a tile, for each query, key and element of them, twice a multiply-add; a kernel was published at 2 / 26 (mlir-aie levers.md: prefill_fv of 8 x 8 x 512, 1265)", "2026-11", _PROMPT_TABLES),
    "product": Parameter(2.84, "cycles", "our attention, 8 x 8 x 8 multiply-adds with one operand converted to block floating point in registers: 512 / 180.4 cycles, what bf16 GEMM takes with one (gemm_parameters.py). Derived; 1.25 with none to convert (`bfp16` there)", "2026-11"),
    "product_loop": Parameter(30.0, "cycles", "our attention, around a loop of products: bundles + 5 (mlir-aie levers.md) of a body of 36 bundles (load 7, convert 8, two products 12, store 9), less one turn of 11. Derived", "2026-11"),
    "softmax_tile": Parameter(106.0, "cycles", "our attention, 8 keys and one or two sub-tiles of 8 rows, side by side, from the product to F, without masks: 2 x 48 vector instructions in a chain of 106 cycles (aie/kernels/attention.h; conversions 4 cycles, sums and products 6, loads 7). Derived; 96 if the chain hides, 212 if the two are one after the other, 54 as published in bf16 (`softmax_score`); with masks 288 scalar instructions more, one after the other", "2026-11"),
    "softmax_rows": Parameter(160.0, "cycles", "our attention, the same rows for each chunk of keys: maxima, corrections, sums: 2 x 70 instructions in a chain of 130 cycles. Derived; 280 if the two are one after the other", "2026-11"),
    "gemm_operations": Parameter(13.7e12, "operations/s", f"{_PROJECTIONS_PAPER}, section 3.1.2: bf16, megatiles of 512 x 512 x 512", "2026-11"),
}
# ruff: enable[E501]
# fmt: on

VALUES: Values = {name: parameter.value for name, parameter in TABLE.items()}
