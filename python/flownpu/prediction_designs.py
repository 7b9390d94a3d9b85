# SPDX-License-Identifier: Apache-2.0
"""The ways of running a model on the array that predictions are made for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from flownpu.aie.cost.decode import DecodeDesign, design_of
from flownpu.aie.cost.prefill import PrefillDesign
from flownpu.aie.designs.decode_layer import DecodeLayer
from flownpu.aie.designs.dequant_engine import DequantEngine
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.designs.gemm import Gemm
from flownpu.aie.designs.norm_rope import NormRope
from flownpu.aie.designs.vector_operators import ResidualLayerNorm, ResidualRMSNorm
from flownpu.aie.lowering import lower
from flownpu.aie.npu_limits import LIMITS

if TYPE_CHECKING:
    from collections.abc import Callable

    from flownpu.aie.iron_compat import Program
    from flownpu.npu_models import Model
    from flownpu.prediction import Decoder

__all__ = ["DESIGNS", "Design", "encoder_prefill", "lock_count"]

_TARGET = "npu2"
_PROVIDERS_CHUNK = 256  # the longer of npu_calls.py
_LONG_CHUNK = 4096  # a configuration is then a small part of what a layer takes


@dataclass(frozen=True)
class Design:
    """A way of running models: what it is, and how it decodes and prefills one."""

    name: str
    description: str
    decode: Callable[[Decoder], DecodeDesign]
    prefill: Callable[[Decoder], PrefillDesign]


# --- As published: arXiv 2602.06063, section 3 --------------------------------------------------------------------


def _published_decode(_: Decoder) -> DecodeDesign:
    """FusedDQP on four columns, FlowKV on two, each pair with two streams; attention is an xclbin of its own."""
    return DecodeDesign(
        "published", streams=8, tiles=16, pairs=4, pair_streams=2, layer_dispatches=2, host="host_per_logit"
    )


def _published_prefill(_: Decoder) -> PrefillDesign:
    """Dequantisation, GEMM, attention and vectors are four xclbins; one tile for each operator on vectors."""
    return PrefillDesign("published", weight_bytes=2, vector_cores=1, configurations=(None,) * 4, host="host_per_logit")


# --- The designs of aie/designs -------------------------------------------------------------------------------------


def _layer_decode(way: str, of: Decoder) -> DecodeDesign:
    """`decode_layer.py`: all layers and the LM head in as few dispatches as weights' offsets allow."""
    layer = DecodeLayer(of.shape, way)
    return design_of(layer, len(layer.calls(len(of.windows), of.model.vocabulary)))


def _fused_prefill(chunk: int, of: Decoder) -> PrefillDesign:
    """The designs one after the other: an array for each line below."""
    model = of.model
    gemm = [lock_count(partial(_gemm, epilogue)) for epilogue in ("none", model.activation)]
    norm = lock_count(partial(_norm, model.hidden))
    attention = lock_count(partial(_attention, model.heads, model.kv_heads, model.head_size))
    heads = lock_count(partial(_norm_rope, model.heads, model.kv_heads, model.head_size, model.head_norms))
    return PrefillDesign(
        "flownpu",
        weight_bytes=9 / 8,
        vector_cores=4,
        # QKV, output; gate and up; down.
        configurations=(norm, lock_count(_engine), gemm[0], heads, attention, gemm[0], norm, gemm[1], gemm[0]),
        host="own_host_per_logit",
        chunk=chunk,
        fused_activation=True,
        own_kernels=True,
    )


def encoder_prefill(model: Model) -> PrefillDesign:
    """An encoder of images (npu_encoder_calls.py): weights in bf16 as they are; rows on all columns' cores."""
    gemm, gelu = (lock_count(partial(_gemm, epilogue, "bf16")) for epilogue in ("none", "gelu"))
    norm = lock_count(partial(_layer_norm, model.hidden))
    attention = lock_count(partial(_attention, model.heads, model.kv_heads, model.head_size))
    return PrefillDesign(
        "encoder",
        weight_bytes=2,
        vector_cores=LIMITS[_TARGET].columns,
        # QKV; output; up, down.
        configurations=(gemm, attention, gemm, norm, gelu, gemm, norm),
        host="own_host_per_logit",
        fused_activation=True,
        own_kernels=True,
    )


DESIGNS: dict[str, Design] = {
    design.name: design
    for design in (
        Design("published", "the papers' own implementation", _published_decode, _published_prefill),
        Design(
            "flownpu",
            f"designs/decode_layer.py with pairs of tiles, prompts in chunks of {_PROVIDERS_CHUNK} tokens",
            partial(_layer_decode, "pairs"),
            partial(_fused_prefill, _PROVIDERS_CHUNK),
        ),
        Design(
            "split",
            f"designs/decode_layer.py with split keys, prompts in chunks of {_LONG_CHUNK} tokens",
            partial(_layer_decode, "split"),
            partial(_fused_prefill, _LONG_CHUNK),
        ),
    )
}


# --- Locks of arrays: what configuring them takes -------------------------------------------------------------------


def lock_count(make: Callable[[], Program]) -> int:
    """The locks of a design's array: those of its fifos' objects, and its barriers."""
    return _locks(make.func, *make.args) if isinstance(make, partial) else _locks(make)


@cache
def _locks(make: Callable[..., Program], *sizes: object) -> int:
    array = make(*sizes).resolve_program("locks").array
    return sum(pool.locks for pool in lower(array, LIMITS[_TARGET]).pools) + len(array.barriers)


def _gemm(epilogue: str, weights: str = "bfp16") -> Program:
    design = Gemm(_TARGET, weights, epilogue)
    return design.program(design.height, design.k_mt, design.width)


def _engine() -> Program:
    return DequantEngine(_TARGET, "bfp16").program(256, 256)


def _norm(n: int) -> Program:
    return ResidualRMSNorm(_TARGET, n, True, 4).program(4, 1e-6)


def _layer_norm(n: int) -> Program:
    return ResidualLayerNorm(_TARGET, n, LIMITS[_TARGET].columns).program(8, 1e-6)


def _norm_rope(heads: int, kv_heads: int, d: int, qk_norm: bool) -> Program:
    return NormRope(_TARGET, heads, kv_heads, d, qk_norm, 4).program(4, 0, 64)


def _attention(heads: int, kv_heads: int, d: int) -> Program:
    design = FlowQKV(_TARGET, heads, kv_heads, d)
    return design.program(1, 0, design.keys)
