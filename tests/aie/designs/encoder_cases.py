# SPDX-License-Identifier: Apache-2.0
"""Cases for the emulator: the demands of an encoder of images on the designs that a decoder does not make.

As in tests/aie/designs/cases.py: random inputs, float64 references, tolerances of the kernels' tests. Most host buffers
have lines longer than their contents. The gaps must not be read, and must stay as they are in outputs.
"""

import numpy as np

from flownpu.aie.designs.bias import bias_column
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.designs.gemm import Gemm
from flownpu.ops.definitions import flow_qkv_attention, q4nx_matmul
from flownpu.selftest.reference.attention import attention_expectation
from flownpu.selftest.reference.projections import STEEPEST, activation_tolerance, as_multiplied
from tests.aie.emulation import Case, plan_of
from tests.aie.host_kernels import BF16_ROUNDING, F32_ROUNDING, bf16, panels, wide

Rng = np.random.Generator

_PAD = 32  # elements of a line beyond what it holds


def biased_gemm_case(design: Gemm, m: int, k: int, n: int, rng: Rng) -> Case:
    """act(A B + bias): the bias is B's row `bias_column(k)`, where A has ones; C's lines are longer than N."""
    place = bias_column(k)
    rows, inner = design.padded(m, place + 1)
    line = n + _PAD
    a, b = bf16(rng.normal(size=(rows, inner))), np.zeros((inner, n))
    a[:, k:], a[:, place] = 0, 1
    b[:k], b[place] = rng.normal(size=(k, n)), rng.normal(size=n) * 3
    before = bf16(rng.normal(size=(rows, line)))
    left, right = as_multiplied(a, bf16(b), design.target)
    sums = left @ right
    tolerance = (inner + 1) * F32_ROUNDING * (np.abs(left) @ np.abs(right))
    act = sums
    if design.epilogue == "gelu":
        act = q4nx_matmul.gelu(sums)
        tolerance = STEEPEST * tolerance + activation_tolerance(sums, act)
    expected, off = wide(before), np.zeros(before.shape)
    expected[:, :n] = act
    off[:, :n] = tolerance + BF16_ROUNDING * (np.abs(act) + tolerance)
    inputs = {"a": a, "b": panels(bf16(b)), "c": before}
    return Case(plan_of(design.program(m, place + 1, n, c_line=line)), inputs, "c", expected, off)


def packed_flow_qkv_case(design: FlowQKV, tokens: int, rng: Rng) -> Case:
    """Every token sees every other. Queries, keys and values lie in the lines of one buffer, with spare rows."""
    heads, kv_heads, d = design.heads, design.kv_heads, design.d
    rows = design.padded(tokens) + design.keys
    qkv = bf16(rng.normal(size=(rows, (heads + 2 * kv_heads) * d + _PAD)))
    by_head = qkv[:, :-_PAD].reshape(rows, -1, d)
    q, k, v = np.split(by_head, [heads, heads + kv_heads], axis=1)
    chunks = {"chunk": design.keys, "in_blocks": design.target == "npu2"}
    of_tokens, tolerance = attention_expectation(
        q[:tokens], np.stack([k, v], 2), flow_qkv_attention, key_end=tokens, causal=0, **chunks
    )
    before = bf16(rng.normal(size=(rows, heads * d + _PAD)))
    expected, off = wide(before[:tokens]), np.zeros((tokens, before.shape[1]))
    expected[:, :-_PAD], off[:, :-_PAD] = of_tokens.reshape(tokens, -1), tolerance.reshape(tokens, -1)
    plan = plan_of(design.packed_program(tokens, rows, line=qkv.shape[1], o_line=before.shape[1]))
    inputs = {"q": qkv, "kv": qkv, "o": before}
    return Case(plan, inputs, "o", expected, off, lambda o: o.reshape(before.shape)[:tokens])
