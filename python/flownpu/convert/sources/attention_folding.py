# SPDX-License-Identifier: Apache-2.0
"""Returns how much of an attention the NPU computes in one call (Zen-Attention, section III.B), for prompts and tokens.

The folding level is 3 (all of it: the design of FlowQKV or FlowKV passes the checker), 2 (all but the product with the
values: a tile holds whole rows of scores) or 1 (nothing). Each level comes with a reason.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from flownpu.aie.check import check
from flownpu.aie.designs.common import ceil_div
from flownpu.aie.designs.flow_kv import FlowKV
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.plan.kernel_memory import stack_for
from flownpu.aie.plan.limits import NPU2

if TYPE_CHECKING:
    from flownpu.graph_rewrites.report import AttentionGeometry

# Tokens of a call if the graph does not give their number: the prompt of the measurements (docs/performance.md).
_NOMINAL_TOKENS = 1024
# Cache positions assumed for the call of one new token; a longer cache takes more chunks of the same tiles.
_NOMINAL_KEYS = 4096
_SUB_TILE = 8  # how many rows, keys and elements the kernels multiply at a time


def prompt_folding(geometry: AttentionGeometry) -> tuple[int, str]:
    """Level and reason of a call with many tokens: as many as the graph says, or a nominal prompt."""
    tokens = geometry.tokens or _NOMINAL_TOKENS
    level, reason = _fold(FlowQKV, geometry, tokens)
    return level, f"{tokens} tokens: {reason}"


def token_folding(geometry: AttentionGeometry) -> tuple[int, str]:
    """Level and reason of a call with one token over a cache."""
    level, reason = _fold(FlowKV, geometry, _NOMINAL_KEYS)
    return level, f"1 token of {_NOMINAL_KEYS}: {reason}"


def _fold(kind: type[FlowQKV | FlowKV], geometry: AttentionGeometry, keys: int) -> tuple[int, str]:
    padded = ceil_div(geometry.head_size, _SUB_TILE) * _SUB_TILE
    missing = _missing(kind(NPU2.name, geometry.heads, geometry.kv_heads, padded))
    if not missing:
        return 3, "all of it is folded"
    operands, scores = 2 * _SUB_TILE * padded * 2, _SUB_TILE * keys * (4 + 2)  # bf16; scores in f32, then in bf16
    if operands + scores <= NPU2.compute.memory_bytes - stack_for(("flow_qkv",)):
        return 2, f"{missing}; whole rows of scores fit"
    return 1, f"{missing}; whole rows of {keys} scores need {operands + scores}"


@cache
def _missing(design: FlowQKV | FlowKV) -> str:
    """The reason why the checker refuses a call over one chunk of keys; "" if it accepts the call."""
    program = design.program(1, 0, design.keys) if isinstance(design, FlowQKV) else design.program(1, design.keys)
    found = check(program.resolve_program("attention"))
    return str(found[0]) if found else ""
