# SPDX-License-Identifier: Apache-2.0
"""The predicted time of a prompt, and of an image before it."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import TYPE_CHECKING

from flownpu.aie.cost.decode import Cost, head_cost
from flownpu.aie.cost.gemm_model import predict_design
from flownpu.aie.cost.prefill import (
    attention_macs,
    attention_seconds,
    dequant_seconds,
    gemm_seconds,
    vector_seconds,
)
from flownpu.aie.designs.bias import bias_column
from flownpu.aie.designs.common import TILES, ceil_div
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.designs.gemm import Gemm
from flownpu.npu_models import MODELS
from flownpu.prediction_designs import encoder_prefill

if TYPE_CHECKING:
    from flownpu.aie.cost.device import Device
    from flownpu.aie.cost.parameters import Values
    from flownpu.aie.cost.prefill import PrefillDesign
    from flownpu.npu_models import Model
    from flownpu.prediction import Decoder
    from flownpu.prediction_designs import Design

__all__ = ["prefill", "vision"]

_ENCODER = "siglip"
_IMAGE_TOKENS, _PROMPT_TOKENS = 256, 16  # of an image in the decoder, and a short question about it
_PATCH = 14 * 14 * 3  # values of a patch
_SUB_TILE = 32
_SHORT_CHUNK = 256
_BF16_BYTES = 2
_GATED = {"geglu", "swiglu"}


def prefill(of: Decoder, tokens: int, design: Design, device: Device, values: Values) -> Cost:
    """A prompt of so many tokens from an empty cache, to the first token."""
    model, way = of.model, design.prefill(of)
    cost = head_cost(model.hidden, model.vocabulary, design.decode(of), device, values)
    chunk = way.chunk or tokens
    for past in range(0, tokens, chunk):
        for window, count in Counter(of.windows).items():
            here = min(chunk, tokens - past)
            cost = cost + _layer(model, here, way, device, values, past=past, window=window) * count
    return cost


def vision(of: Decoder, design: Design, device: Device, values: Values) -> Cost:
    """An image through the encoder, then its tokens and a short question through the decoder, to the first token."""
    encoder, way = MODELS[_ENCODER], design.prefill(of)
    if way.own_kernels:
        way = encoder_prefill(encoder)
    assert encoder.encoder is not None
    tokens, layers = encoder.encoder.patches, encoder.encoder.layers
    cost = _layer(encoder, tokens, way, device, values, causal=False) * layers
    ends = [(tokens, _PATCH, encoder.hidden), (_IMAGE_TOKENS, encoder.hidden, of.model.hidden)]
    cost = cost + Cost({"gemm": sum(_gemm(way, m, k, n, "none", device, values) for m, k, n in ends)}, 0.0)
    return cost + prefill(of, _IMAGE_TOKENS + _PROMPT_TOKENS, design, device, values)


def _layer(
    model: Model, tokens: int, way: PrefillDesign, device: Device, values: Values,
    *, past: int = 0, window: int | None = None, causal: bool = True,
) -> Cost:  # fmt: skip
    d, heads, kv_heads = model.head_size, model.heads, model.kv_heads
    macs = attention_macs(tokens, past, heads, d, window=window, causal=causal)
    block = TILES * _queries(heads, kv_heads, d) if way.own_kernels else None
    calls = 2 * len(model.projections) + len(way.configurations)  # each projection's weights, then its product
    if way.own_kernels and not model.is_decoder:
        calls = len(way.configurations)
    # An encoder's weights are not quantised; its biases are rows of them in our designs.
    rows = {k: k if model.is_decoder or not way.own_kernels else bias_column(k) + 1 for _, k, _ in model.projections}
    return Cost(
        {
            "gemm": sum(_gemm(way, tokens, rows[k], m, kind, device, values) for m, k, kind in model.projections),
            "dequantisation": dequant_seconds(_blocks(model), way, device, values) if model.is_decoder else 0.0,
            "attention": attention_seconds(macs, kv_heads, heads, d, device, values, block=block),
            "vectors": vector_seconds(tokens * _elements(model, way), way.vector_cores, device, values),
            "configurations": way.switch_seconds(values),
            "dispatches": calls * values["dispatch"],
        },
        0.0,
    )


def _gemm(way: PrefillDesign, m: int, k: int, n: int, kind: str, device: Device, values: Values) -> float:
    """A projection of m tokens from k to n features."""
    if not way.own_kernels:
        return gemm_seconds(m, k, (2 if kind in _GATED else 1) * n, values)
    # Rows of a tile: a fourth of a short chunk (npu_calls.py), else the design's own choice.
    tile_rows = way.chunk // TILES if way.chunk and way.chunk <= _SHORT_CHUNK else 0
    design = _own_gemm(device.limits.name, "bf16" if way.weight_bytes == _BF16_BYTES else "bfp16", kind, tile_rows)
    unit = design.n if kind in _GATED else _SUB_TILE
    return predict_design(design, m, k, max(design.width, ceil_div(n, unit) * unit)).seconds


@cache
def _own_gemm(target: str, weights: str, kind: str, rows: int) -> Gemm:
    return Gemm(target, weights, kind, m=rows)


@cache
def _queries(heads: int, kv_heads: int, d: int) -> int:
    return FlowQKV("npu2", heads, kv_heads, d).queries


def _blocks(model: Model) -> int:
    """Q4NX blocks of a layer's weights."""
    return sum(ceil_div(m, 32) * ceil_div(k, 256) * (2 if kind in _GATED else 1) for m, k, kind in model.projections)


def _elements(model: Model, way: PrefillDesign) -> int:
    """What operators on vectors make of a token in a layer, element by element: norms, RoPE, activation."""
    heads = (model.heads + model.kv_heads) * model.head_size
    norms = (4 if model.post_norms else 2) * model.hidden + (heads if model.head_norms else 0)
    rope = heads if model.is_decoder else 0
    # Gate, up and their product; an encoder's has one input.
    activation = (3 if model.activation in _GATED else 2) * model.feed_forward
    return norms + rope + (0 if way.fused_activation else activation)
