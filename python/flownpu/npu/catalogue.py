# SPDX-License-Identifier: Apache-2.0
"""Lists the designs and shapes that `flownpu build` builds without a model's folder: those of the models in `MODELS`.

Each design has a function in `OPERATORS`, which yields the calls that a decoder needs of it; the calls of an image
encoder are those of its program. Calls of the same array give it the same name, across models too; it is compiled once.

Decoding makes calls of one token, prefilling calls of `CHUNK` tokens; attention sees `CONTEXT` positions. Other lengths
are other sequences for the same arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import ceil_div, limits_of
from flownpu.aie.designs.decode_layer.design import WAYS, DecodeLayer, Layer
from flownpu.aie.designs.dequant_engine import DequantEngine
from flownpu.aie.designs.flow_kv import FlowKV
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.designs.fused_dqp import FusedDQP
from flownpu.aie.designs.gemm import Gemm
from flownpu.aie.designs.norm_rope import NormRope
from flownpu.aie.designs.vector_operators import ResidualLayerNorm, ResidualRMSNorm, RMSNorm
from flownpu.aie.programs.call import fixed_call
from flownpu.aie.programs.decoder_shape import DecoderShape
from flownpu.aie.programs.encode import encode_program
from flownpu.aie.programs.program import calls_of
from flownpu.npu.models import MODELS, projections

if TYPE_CHECKING:
    from flownpu._native import EncoderShape
    from flownpu.aie.iron.compat import Program
    from flownpu.aie.programs.call import ArtifactCall

CHUNK = 512  # tokens that are prefilled at a time
CONTEXT = 4096  # positions of the KV cache
_EPSILON = 1e-6  # a run-time parameter: any value works
_CORES = 4  # cores of the operators on vectors: both targets have columns for as many
_SUB_TILE = 32  # N of a GEMM is a multiple of this number


# Makes a program; raises ValueError if the target cannot hold it.
_Make = Callable[[], "Program"]
# The calls that a model needs of an operator's design: the array's name, the call's name, a function for the program.
_Calls = Iterator[tuple[str, str, _Make]]


def catalogue(target: str, operators: Iterable[str] = (), models: Iterable[str] = ()) -> list[ArtifactCall]:
    """The calls of some operators (default: all) in some models (default: all) on a target, each once.

    Raises:
        ValueError: there is no such target, operator or model; the message lists those that exist.
    """
    limits_of(target)
    calls: dict[tuple[str, str], ArtifactCall] = {}
    chosen_models = _chosen("a model", models, MODELS)
    for operator in _chosen("an operator", operators, OPERATORS):
        for model in chosen_models:
            of = MODELS[model]
            decodes = OPERATORS[operator]
            found = decodes(target, of) if isinstance(of, DecoderShape) else _of_encoder(operator, target, of)
            for array, name, program in found:
                calls.setdefault((array, name), fixed_call(operator, array, name, program))
    return list(calls.values())


def _chosen(what: str, names: Iterable[str], known: Mapping[str, object]) -> list[str]:
    names = list(dict.fromkeys(names)) or list(known)
    for name in names:
        if name not in known:
            raise ValueError(f"expected {what} of {', '.join(known)}, got {name!r}")
    return names


def _call(design: Callable[[], Any], *sizes: Any, **options: Any) -> Program:
    """The program of a design's array for one call."""
    program: Program = design().program(*sizes, **options)
    return program


# --- What a model calls each operator's design with -----------------------------------------------------------------


def _fused_dqp(target: str, model: DecoderShape) -> _Calls:
    tiles = 32 if limits_of(target).columns >= 8 else 16
    k_max = ceil_div(max(k for _, k, _ in projections(model)), 256) * 256
    for m, k, epilogue in [*projections(model), (model.model.vocabulary, model.shape.hidden, "none")]:
        design = partial(FusedDQP, target, k_max, tiles, epilogue)
        yield f"fused_dqp-{tiles}-k{k_max}-{epilogue}", f"m{m}-k{k}", partial(_call, design, m, k)


def _weights(target: str) -> tuple[str, ...]:
    """The types of GEMM's weights on a target."""
    return ("bf16",) if target == "npu1" else ("bf16", "bfp16")


def _gemm(target: str, model: DecoderShape) -> _Calls:
    for weights in _weights(target):
        for n, k, epilogue in projections(model):
            design = partial(Gemm, target, weights, epilogue)
            padded = ceil_div(n, _SUB_TILE) * _SUB_TILE
            yield f"gemm-{weights}-{epilogue}", f"m{CHUNK}-k{k}-n{padded}", partial(_call, design, CHUNK, k, padded)


def _dequant_engine(target: str, model: DecoderShape) -> _Calls:
    for weights in _weights(target):
        for m, k, epilogue in projections(model):
            gated = epilogue in {"geglu", "swiglu"}
            name = f"m{m}-k{k}" + ("-gated" if gated else "")
            make = partial(_call, partial(DequantEngine, target, weights), m, k, gated=gated)
            yield f"dequant_engine-{weights}", name, make


def _flow_kv(target: str, model: DecoderShape) -> _Calls:
    sizes, name = _heads(model)
    for window, kind in _windows(model):
        make = partial(_call, partial(FlowKV, target, *sizes), CONTEXT, CONTEXT, window=window)
        yield f"flow_kv-{name}", f"total{CONTEXT}{kind}", make


def _flow_qkv(target: str, model: DecoderShape) -> _Calls:
    sizes, name = _heads(model)
    for past in (0, CONTEXT - CHUNK):
        for window, kind in _windows(model):
            make = partial(_call, partial(FlowQKV, target, *sizes), CHUNK, past, CONTEXT, window=window)
            yield f"flow_qkv-{name}", f"tokens{CHUNK}-past{past}{kind}", make


def _heads(model: DecoderShape) -> tuple[tuple[int, int, int], str]:
    """The parameters of attention designs (H, G, d), and the part of an array's name that states them."""
    shape = model.shape
    return (shape.heads, shape.kv_heads, shape.d), f"h{shape.heads}-g{shape.kv_heads}-d{shape.d}"


def _windows(model: DecoderShape) -> list[tuple[int | None, str]]:
    """The windows of a model's layers, each with the part of a call's name that states it."""
    window = max(model.windows)
    return [(None, "")] + ([(window, f"-swa{window}")] if window else [])


def _decode_layer(target: str, model: DecoderShape) -> _Calls:
    if target != "npu2":  # the only target of the design
        return
    shape = model.shape
    norms = "-post" * shape.post_norms + "-qk" * shape.qk_norm
    sizes = f"{shape.hidden}-{shape.feed_forward}-{_heads(model)[1]}-{shape.activation}{norms}"

    def call(way: str, **options: Any) -> Program:
        return DecodeLayer(shape, way).program(CONTEXT - 1, CONTEXT, **options)

    for way in WAYS:
        array = f"decode_layer-{way}-{sizes}"
        for window, kind in _windows(model):
            yield array, f"position{CONTEXT - 1}{kind}", partial(call, way, layers=(Layer(window),))
        yield array, f"position{CONTEXT - 1}-head", partial(call, way, vocabulary=model.model.vocabulary)


def _rms_norm(target: str, model: DecoderShape) -> _Calls:
    shape = model.shape
    for tokens in (1, CHUNK):
        sizes = [(shape.hidden, tokens)]
        if shape.qk_norm:
            sizes.append((shape.d, tokens * (shape.heads + shape.kv_heads)))
        for n, rows in sizes:
            design = partial(RMSNorm, target, n, _CORES)
            yield f"rms_norm-n{n}", f"rows{rows}", partial(_call, design, rows, _EPSILON)
        residual = partial(ResidualRMSNorm, target, shape.hidden, shape.post_norms, _CORES)
        kind = "rms_norm_add" if shape.post_norms else "add_rms_norm"
        yield f"{kind}-n{shape.hidden}", f"rows{tokens}", partial(_call, residual, tokens, _EPSILON)


def _norm_rope(target: str, model: DecoderShape) -> _Calls:
    (sizes, name), qk_norm = _heads(model), model.shape.qk_norm
    design = partial(NormRope, target, *sizes, qk_norm, _CORES)
    array = f"norm_rope-{name}" + "-qk" * qk_norm
    yield array, f"tokens{CHUNK}", partial(_call, design, CHUNK, CONTEXT - CHUNK, CONTEXT)


def _of_encoder(operator: str, target: str, encoder: EncoderShape) -> _Calls:
    if operator == "add_layer_norm":
        design, rows = partial(ResidualLayerNorm, target, encoder.hidden, _CORES), encoder.patches
        yield f"add_layer_norm-n{encoder.hidden}", f"rows{rows}", partial(_call, design, rows, _EPSILON)
    for call in _encoder_calls(encoder, target):
        if call.operator == operator:
            yield call.array, call.name, partial(call.program, 0)


@cache
def _encoder_calls(encoder: EncoderShape, target: str) -> list[ArtifactCall]:
    return calls_of([encode_program(encoder, target)])


OPERATORS: dict[str, Callable[[str, DecoderShape], _Calls]] = {
    "fused_dqp": _fused_dqp,
    "gemm": _gemm,
    "dequant_engine": _dequant_engine,
    "flow_qkv": _flow_qkv,
    "flow_kv": _flow_kv,
    "decode_layer": _decode_layer,
    "rms_norm": _rms_norm,
    "add_layer_norm": lambda _target, _decoder: iter(()),  # only encoders have it
    "norm_rope": _norm_rope,
    "patch_pooling": lambda _target, _decoder: iter(()),  # likewise
}
