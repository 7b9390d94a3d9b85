# SPDX-License-Identifier: Apache-2.0
"""Cases for the emulator: designs with random inputs, the operators' float64 references and derived tolerances.

Tolerances are those of the kernels' tests, plus nothing: the array only moves what kernels make.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flownpu.aie.designs.decode_layer_shape import interleave
from flownpu.aie.designs.vector_operators import gated_activation
from flownpu.ops import q4nx
from flownpu.ops.definitions import flow_kv_attention, flow_qkv_attention, fused_dqp, q4nx_matmul
from tests.aie.attention_reference import ALL, Sweep, expectation
from tests.aie.emulation import Case, plan_of
from tests.aie.host_kernels import (
    BF16_ROUNDING,
    BFLOAT16,
    EXP2,
    F32_ROUNDING,
    INVERSE,
    PRODUCT,
    bf16,
    blocks_of,
    panels,
    wide,
)

if TYPE_CHECKING:
    from types import ModuleType

    from flownpu.aie.designs.flow_kv import FlowKV
    from flownpu.aie.designs.flow_qkv import FlowQKV
    from flownpu.aie.designs.fused_dqp import FusedDQP
    from flownpu.aie.designs.gemm import Gemm
    from flownpu.aie.designs.vector_operators import RMSNorm, RotaryEmbedding

    Rng = np.random.Generator

__all__ = [
    "attention_expectation",
    "flow_kv_case",
    "flow_qkv_case",
    "fused_dqp_case",
    "gated_activation_case",
    "gemm_case",
    "random_weight",
    "rms_norm_case",
    "rotary_embedding_case",
]

# |act(x) - act(y)| <= 1.13 |x - y|: the steepest of GELU (1.129) and SiLU (1.0998).
STEEPEST = 1.13


def activation_tolerance(x: np.ndarray, act: np.ndarray) -> np.ndarray:
    """Of act(x), a sigmoid's product: five products make its exponent, limited to 64; then exp2, and four more.

    The reference has 1 + tanh, which loses 2^-53 of 1.
    """
    exponent = np.minimum(1.4427 * np.maximum(np.abs(x), 1.5958 * np.abs(x + 0.044715 * x**3)), 64)
    return np.asarray((5 * exponent * PRODUCT + EXP2 + 4 * PRODUCT) * np.abs(act) + np.abs(x) * 2.0**-52)


def random_weight(rng: Rng, m: int, k: int) -> tuple[np.ndarray, q4nx.Quantized]:
    """Blocks of a weight [m, k] of random codes and parameters, and these."""
    groups = -(-k // q4nx.GROUP)
    codes = rng.integers(0, 16, (m, k), np.uint8)
    scale, minimum = bf16(rng.normal(size=(m, groups)) / 16), bf16(rng.normal(size=(m, groups)))
    return q4nx.pack(codes, scale, minimum), q4nx.Quantized(codes, scale, minimum)


def projection_tolerance(weight: q4nx.Quantized, x: np.ndarray) -> np.ndarray:
    """Of FusedDQP's sums: a group's are split in two bf16 parts, 2^-16; 32 products and 4 sums a group are added."""
    k = weight.shape[1]
    scale, minimum = (np.repeat(np.abs(wide(p)), q4nx.GROUP, 1)[:, :k] for p in (weight.scale, weight.minimum))
    magnitude = (scale * weight.codes + minimum) @ np.abs(wide(x))
    return np.asarray(1.01 * (2.0**-16 + (32 + 4 * k / 32) * F32_ROUNDING) * magnitude)


def fused_dqp_case(design: FusedDQP, m: int, k: int, rng: Rng, *, interleaved: bool = False) -> Case:
    """One row times a random weight [m, k], or two of them under the design's gating."""
    gated = design.epilogue in {"geglu", "swiglu"}
    weights = [random_weight(rng, m, k) for _ in range(2 if gated else 1)]
    blocks = np.concatenate([blocks for blocks, _ in weights])
    x = np.zeros(design.k_max, BFLOAT16)
    x[:k] = bf16(rng.normal(size=k) / (16 if gated else 1))
    sums = [projection_tolerance(weight, x[:k]) for _, weight in weights]
    gating = design.epilogue if gated else "none"
    expected = fused_dqp.reference(wide(x[:k]), blocks, rows=m, columns=k, gating=gating)
    tolerance = sums[0]
    if gated:
        gate, up = (wide(q4nx.dequantize(b, m, k)) @ wide(x[:k]) for b, _ in weights)
        act = {"geglu": q4nx_matmul.gelu, "swiglu": q4nx_matmul.silu}[gating](gate)
        tolerance = (STEEPEST * sums[0] + activation_tolerance(gate, act)) * (np.abs(up) + sums[1])
        tolerance = tolerance + np.abs(act) * sums[1] + PRODUCT * np.abs(expected)
    tolerance = tolerance + BF16_ROUNDING * (np.abs(expected) + tolerance)
    given = interleave(blocks) if interleaved else blocks
    plan = plan_of(design.program(m, k, interleaved=interleaved))
    return Case(plan, {"w": given, "x": x}, "y", expected, tolerance)


def gemm_case(design: Gemm, m: int, k: int, n: int, rng: Rng, *, plain: bool = False) -> Case:
    """A [m, k] times B [k, n], with gelu if the design has that; padding holds numbers that must not matter.

    `plain`: without the design's epilogue.
    """
    rows, inner = design.padded(m, k)
    a, b = bf16(rng.normal(size=(rows, inner))), bf16(rng.normal(size=(inner, n)))
    a[:, k:] = 0
    left, right = wide(a), wide(b)
    operand = panels(b)
    if design.target == "npu2":  # in block floating point along k
        coded, turned = blocks_of(np.ascontiguousarray(b.T))
        left, right = blocks_of(a)[1], turned.T
        if design.weights == "bfp16":
            coded = coded.reshape(n // 32, 4, 8, inner // 8, 9).transpose(0, 3, 1, 2, 4)
            operand = np.ascontiguousarray(coded).reshape(-1)
    sums = left @ right
    tolerance = (inner + 1) * F32_ROUNDING * (np.abs(left) @ np.abs(right))
    expected = sums
    if design.epilogue == "gelu" and not plain:
        expected = q4nx_matmul.gelu(sums)
        tolerance = STEEPEST * tolerance + activation_tolerance(sums, expected)
    tolerance = tolerance + BF16_ROUNDING * (np.abs(expected) + tolerance)
    return Case(plan_of(design.program(m, k, n, plain=plain)), {"a": a, "b": operand}, "c", expected, tolerance)


def _cache(rng: Rng, capacity: int, kv_heads: int, d: int) -> np.ndarray:
    """The KV cache [capacity, KV heads, 2, d]; behind the last key are numbers, too."""
    return bf16(rng.normal(size=(capacity, kv_heads, 2, d)))


def attention_expectation(
    q: np.ndarray, kv: np.ndarray, operator: ModuleType, **of_sweep: int
) -> tuple[np.ndarray, np.ndarray]:
    """The expectation and the tolerance of queries [tokens, heads, d], in the same shape, by a `Sweep` a KV head."""
    tokens, heads, d = q.shape
    kv_heads, in_blocks = kv.shape[1], bool(of_sweep.pop("in_blocks"))
    parts = []
    for head in range(kv_heads):
        group = q[:, head * heads // kv_heads : (head + 1) * heads // kv_heads].swapaxes(0, 1)
        sweep = Sweep(group, kv[:, head, 0], kv[:, head, 1], **of_sweep)
        parts.append(expectation(sweep, in_blocks=in_blocks, operator=operator))
    expected, tolerance = (np.concatenate(part).swapaxes(0, 1) for part in zip(*parts, strict=True))
    assert expected.shape == (tokens, heads, d)
    return expected, tolerance


def flow_kv_case(design: FlowKV, total: int, capacity: int, rng: Rng, *, window: int | None = None) -> Case:
    """The token at total - 1 over the keys before it."""
    q, kv = bf16(rng.normal(size=(1, design.heads, design.d))), _cache(rng, capacity, design.kv_heads, design.d)
    sweep = {"chunk": design.keys, "key_end": total, "first_query": total - 1, "window": window or ALL}
    expected, tolerance = attention_expectation(q, kv, flow_kv_attention, in_blocks=False, **sweep)
    return Case(plan_of(design.program(total, capacity, window=window)), {"q": q, "kv": kv}, "o", expected, tolerance)


def flow_qkv_case(
    design: FlowQKV, tokens: int, past: int, capacity: int, rng: Rng, *, window: int | None = None, causal: bool = True,
    block: bool = False,
) -> Case:  # fmt: skip
    """Tokens at `past` and on; what is padded to whole blocks of tokens holds numbers and is not compared.

    `block`: not causal, and compared with the operator whose bidirectional_blocks has these tokens as one block.
    """
    causal = causal and not block
    size = design.padded(tokens), design.heads, design.d
    q, kv = bf16(rng.normal(size=size)), _cache(rng, capacity, design.kv_heads, design.d)
    sweep = {
        "key_end": past + tokens,
        "first_query": past,
        "window": window or ALL,
        "causal": int(causal),
        "block": int(block),
    }
    in_blocks = design.target == "npu2"
    chunks = {"chunk": design.keys, "in_blocks": in_blocks}
    expected, tolerance = attention_expectation(q[:tokens], kv, flow_qkv_attention, **sweep, **chunks)
    plan = plan_of(design.program(tokens, past, capacity, window=window, causal=causal))
    return Case(plan, {"q": q, "kv": kv}, "o", expected, tolerance, lambda o: o.reshape(size)[:tokens])


def rms_norm_case(design: RMSNorm, rows: int, rng: Rng) -> Case:
    """Rows over their root mean square, times a weight."""
    x, weight = bf16(rng.normal(size=(rows, design.n)) * 3), bf16(rng.normal(size=design.n))
    expected = wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + 1e-6) * wide(weight)
    # 1/n, the root's inverse (half of whose argument's error counts), f32 sums, and two split products.
    relative = BF16_ROUNDING + 2 * INVERSE + design.n * F32_ROUNDING + 2 * PRODUCT
    plan = plan_of(design.program(rows, 1e-6))
    return Case(plan, {"x": x, "weight": weight}, "y", expected, relative * np.abs(expected))


def rotary_embedding_case(design: RotaryEmbedding, tokens: int, rng: Rng) -> Case:
    """Tokens at positions 0 and on."""
    heads, d = design.heads, design.d
    angle = np.arange(tokens)[:, None] * 10000.0 ** (-2 * np.arange(d // 2) / d)
    table, x = bf16(np.concatenate([np.cos(angle), np.sin(angle)], 1)), bf16(rng.normal(size=(tokens, heads, d)))
    cosine, sine = (wide(part)[:, None] for part in np.split(table, 2, axis=1))
    pairs = (slice(0, d, 2), slice(1, d, 2)) if design.interleaved else (slice(d // 2), slice(d // 2, d))
    a, b = (wide(x)[..., pair] for pair in pairs)
    expected, magnitude = np.zeros(x.shape), np.zeros(x.shape)
    expected[..., pairs[0]], expected[..., pairs[1]] = a * cosine - b * sine, b * cosine + a * sine
    magnitude[..., pairs[0]] = magnitude[..., pairs[1]] = np.abs(a) + np.abs(b)
    # Products are exact, their difference is rounded to f32 and to bf16.
    tolerance = BF16_ROUNDING * np.abs(expected) + 2 * F32_ROUNDING * magnitude
    return Case(plan_of(design.program(tokens)), {"x": x, "table": table}, "y", expected, tolerance)


def gated_activation_case(target: str, activation: str, elements: int, rng: Rng, *, cores: int = 1) -> Case:
    """GeGLU or SwiGLU of two vectors."""
    gate, up = bf16(rng.normal(size=elements) * 3), bf16(rng.normal(size=elements))
    act = {"geglu": q4nx_matmul.gelu, "swiglu": q4nx_matmul.silu}[activation](wide(gate))
    expected = act * wide(up)
    tolerance = activation_tolerance(wide(gate), act) * np.abs(wide(up)) + (PRODUCT + BF16_ROUNDING) * np.abs(expected)
    plan = plan_of(gated_activation(target, activation, elements, cores=cores))
    return Case(plan, {"gate": gate, "up": up}, "y", expected, tolerance)
