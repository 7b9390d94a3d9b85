# SPDX-License-Identifier: Apache-2.0
"""Programs of operators by themselves: what the array does for one node of a graph, of one kind and size.

The host gives rows of activations and reads rows of results. What is computed element by element after a product (bias,
gate, activation, residual) the host computes as it reads them: they come back to it anyway, and so all products can
share one array, since changing it costs more than the work. Likewise the host computes norms and rotations of heads
before attention.

    q4nx_matmul, fused_dqp   one row: fused_dqp, over one array for all of a graph; several: dequant_engine -> gemm
    dense_matmul             gemm
    convolution              gemm, of one array for all sizes; k_mt of 320 suits the channels of Stable Diffusion's
                             U-Net, 320 to 2560, without padding
    flow_qkv_attention, flow_kv_attention
                             one token: flow_kv; several: flow_qkv

**Buffers**, bf16 unless said otherwise; rows and tokens as padded by the design

    weights    u8   Q4NX, wide blocks of [columns, inner], with rows of blocks of zeros up to at least 256 columns; of
                    8 bits, two planes of each (kernels/common/q4nx.h)
               bf16 (dense_matmul) panels of [inner, columns] (kernels/README.md), both sizes padded with zeros
    given-I    [rows][inner, padded to 256]; of one row, as long as the longest of the graph
    panels-B   B bytes: dequantised weights
    made-N     [rows][columns, padded]
    picture-.. a of designs/convolution.py, whose weights are its b, and made-N its c
    queries-N, attended-N
               [tokens][heads][d], N = heads d; queries are scaled already
    cache      [context][KV heads][2][d]: keys and values of the sequence, from the first one that is seen on
    sinks      those of the heads (designs/attention.py), if they have any

Programs of one size serve all nodes of that size: their constants are the node's own, all else is shared by name.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from flownpu._native import ConvolutionSizes, DenseProjection
from flownpu.aie.designs.common import BLOCK_BYTES, BLOCK_COLUMNS, BLOCK_ROWS, TILES, ceil_div
from flownpu.aie.designs.convolution import Convolution
from flownpu.aie.designs.dequant_engine import DequantEngine
from flownpu.aie.designs.flow_kv import FlowKV
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.designs.fused_dqp import FusedDQP
from flownpu.aie.designs.gemm import Gemm
from flownpu.aie.programs.call import fixed_call, moving_call
from flownpu.aie.programs.call_family import CallSweep
from flownpu.aie.programs.decoder_shape import bits_name
from flownpu.aie.programs.program import (
    BF16_BYTES,
    Buffer,
    CacheLayout,
    Program,
    ProgramWriter,
    Role,
    attribute_words,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from flownpu.aie.programs.program import Rows

# Rows (tokens) of the programs; the host pads a node's rows to one of them. Chosen for GEMM's tiles: 64 rows are 16 a
# tile, 256 are 64; with more rows the weights are dequantised less often.
_SEVERAL = (64, 256, 1024)
_PRODUCTS = (*_SEVERAL, 4096)
_ROWS_OF_A_TILE = 64  # at most
# Pictures of a convolution's programs: guidance makes pairs.
_PICTURES = (1, 2)
# Bytes of dequantised weights, which a session holds for all products of a size: a gate and up projection of 14336 x
# 4096 fit; LM heads, of which one row is wanted, do not.
_MOST_PANELS = 256 << 20


def buckets(kind: str) -> tuple[int, ...]:
    """Rows (tokens; of a convolution, pictures) of the programs that an operator, by its stem, has.

    Raises:
        ValueError: there is no such operator.
    """
    if kind not in _KINDS:
        raise ValueError(f"[operators] expected one of {', '.join(_KINDS)}, got {kind}")
    if kind in ("fused_dqp", "flow_kv_attention"):
        return (1,)
    if kind == "convolution":
        return _PICTURES
    if kind == "dense_matmul":
        return _PRODUCTS
    return (1, *_PRODUCTS) if kind == "q4nx_matmul" else (1, *_SEVERAL)


def longest_row(sizes: Iterable[Mapping[str, int]]) -> int:
    """K, padded, of the longest product with a Q4NX weight among these operators: that of the array of single rows."""
    return max((ceil_div(of["inner"], BLOCK_COLUMNS) * BLOCK_COLUMNS for of in sizes if "eight_bits" in of), default=0)


def operator_program(
    kind: str, sizes: Mapping[str, int], target: str, rows: int, context: int = 0, longest: int = 0
) -> Program:
    """The program of an operator for `rows` rows (tokens).

    Args:
        kind: the operator's stem.
        sizes: by the names that ops/npu/match/array_operator.h has for them; the host finds the program by them.
        target: npu1 or npu2.
        rows: one of its `buckets`.
        context: for attention, positions of the cache, a multiple of its chunk.
        longest: for a product of one row, K of the longest that shares its array (`longest_row`), which tokens then do
            not change; 0: its own.

    Raises:
        ValueError: a design does not take the sizes, or the kind has no program for so many rows.
    """
    if rows not in buckets(kind):
        raise ValueError(f"[operators] expected {kind} of {buckets(kind)} rows, got {rows}")
    if kind in _PRODUCTS_OF:
        return _product(kind, dict(sizes), target, rows, longest)
    if kind == "convolution":
        return _convolution(dict(sizes), target, rows)
    return _attention(kind, dict(sizes), target, rows, context)


def _product(kind: str, sizes: dict[str, int], target: str, rows: int, longest: int) -> Program:
    """Y [rows, columns] = X [rows, inner] W."""
    part = DenseProjection(sizes["inner"], sizes["columns"], has_bias=False)
    k, n, line = part.inner, part.padded_columns, part.padded_rows
    quantised = kind != "dense_matmul"
    planes = 1 + sizes.get("eight_bits", 0)
    blocks = planes * n // BLOCK_ROWS * (line // BLOCK_COLUMNS)
    writer = ProgramWriter([Buffer("weights", Role.CONSTANT, blocks * BLOCK_BYTES if quantised else part.bytes)])
    where = f"{k} x {n}"
    x, y, panels = f"given-{line}", f"made-{n}", "weights"
    if rows == 1 and quantised:
        line = max(line, longest)
        dqp = FusedDQP(target, line, 28 if target == "npu2" else 16)
        array, name = f"fused_dqp-{dqp.tiles}-k{line}-none", f"m{n}-k{k}{bits_name(planes - 1)}"
        x = f"given-{line}"
        make = partial(dqp.program, n, k, planes=planes)
        writer.step(fixed_call("fused_dqp", array, name, make), where, "weights", x, y)
    else:
        if quantised:
            if part.bytes > _MOST_PANELS:
                most, got = _MOST_PANELS >> 20, part.bytes >> 20
                raise ValueError(f"[operators] expected dequantised weights of {most} MB or less, got {got} MB")
            panels, name = f"panels-{part.bytes}", f"m{n}-k{k}"
            engine = DequantEngine(target, planes=planes)
            dequantise = fixed_call("dequant_engine", engine.name, name, partial(engine.program, n, k))
            writer.step(dequantise, where, "weights", panels)
        gemm, padded = _gemm(target, n, rows)
        array, name = f"gemm-bf16-none-{gemm.m}x{gemm.n}-{gemm.e_y}x{gemm.e_x}", f"m{padded}-k{k}-n{n}"
        writer.step(fixed_call("gemm", array, name, partial(gemm.program, padded, k, n)), where, x, panels, y)
    given = writer.rows(x, rows, k, line)
    made = writer.rows(y, rows, part.columns, n)
    return _program(kind, sizes, rows, writer, given, made)


def _gemm(target: str, n: int, rows: int) -> tuple[Gemm, int]:
    """The array for `rows` rows, and that number as the array pads it."""
    m = min(_ROWS_OF_A_TILE, ceil_div(rows, TILES * 16) * 16)
    gemm = Gemm(target, m=m)
    if n < gemm.width:
        gemm = Gemm(target, m=m, n=gemm.n // 2)
    return gemm, gemm.padded(rows, 1)[0]


def _convolution(sizes: dict[str, int], target: str, pictures: int) -> Program:
    """Filters over pictures, which the host lays out (ops/npu/operators/convolution_step.cc)."""
    of = ConvolutionSizes(**sizes)
    gemm = Gemm(target, m=32, k=64, n=of.LEAST_FILTERS, k_mt=of.RUN_UNIT, e_y=4)
    channels, filters = of.channels, of.padded_filters
    design = Convolution(gemm, of, pictures)
    size = "-".join(str(size) for size in (pictures, *sizes.values()))
    writer = ProgramWriter([Buffer("weights", Role.CONSTANT, design.inner * filters * BF16_BYTES)])
    array = f"gemm-bf16-none-{gemm.m}x{gemm.n}-{gemm.e_y}x{gemm.e_x}-k{gemm.k_mt}"
    picture, made = f"picture-{size}", f"made-{filters}"
    call = fixed_call("gemm", array, f"convolution-{size}", design.program)
    where = f"{of.kernel_height} x {of.kernel_width} taps of {channels} x {of.filters}"
    writer.step(call, f"{where} over {of.height} x {of.width}", picture, "weights", made)
    given = writer.rows(picture, ceil_div(call.buffers[0].type.elements, channels), channels)
    rows = writer.rows(made, design.rows, of.filters, filters)
    return _program("convolution", sizes, pictures * of.lines * of.pixels, writer, given, rows)


def _attention(kind: str, sizes: dict[str, int], target: str, tokens: int, context: int) -> Program:
    """Attention of `tokens` tokens, the first of them at the position that a run is given.

    Without a causal mask that position is the last key's: all keys up to it are seen.
    """
    heads, kv_heads, d = (sizes[name] for name in ("num_heads", "kv_num_heads", "head_size"))
    window, causal, has_sinks = sizes["local_window_size"], bool(sizes["causal"]), bool(sizes["sinks"])
    flow = FlowQKV(target, heads, kv_heads, d, has_sinks=has_sinks)
    name = f"h{heads}-g{kv_heads}-d{d}{'-sinks' * has_sinks}"
    size = context * kv_heads * 2 * d * BF16_BYTES
    constants = [Buffer("sinks", Role.CONSTANT, flow.sinks.size * BF16_BYTES)] if flow.sinks else []
    writer = ProgramWriter([Buffer("cache", Role.CACHE, size), *constants])
    line = heads * d
    if tokens == 1:
        single = FlowKV(target, heads, kv_heads, d, has_sinks=has_sinks)

        def attend_one(position: int) -> Any:
            return single.program(position + 1, context, window=window or None, scale=1.0)

        call = moving_call(
            "flow_kv", f"flow_kv-{name}", f"window{window}", attend_one, target, context, single.keys,
            [CallSweep(0, 1, 1, window)],
        )  # fmt: skip
    elif causal:
        attend = partial(flow.program, tokens, capacity=context, window=window or None, scale=1.0)
        block = TILES * flow.queries
        sweeps = [CallSweep(top, block, tokens, window) for top in range(0, tokens, block)]
        call = moving_call(
            "flow_qkv", f"flow_qkv-{name}", f"tokens{tokens}-window{window}", attend, target, context - tokens + 1,
            flow.keys, sweeps,
        )  # fmt: skip
    else:

        def attend_all(position: int) -> Any:
            return flow.program(tokens, 0, context, causal=False, scale=1.0, total=position + 1)

        call = moving_call(
            "flow_qkv", f"flow_qkv-{name}", f"tokens{tokens}-nca", attend_all, target, context, flow.keys,
            [CallSweep(0, 1, 1, 0)],
        )  # fmt: skip
    writer.step(call, f"{tokens} tokens", f"queries-{line}", "cache", f"attended-{line}", *["sinks"] * has_sinks)
    given, made = (writer.rows(f"{what}-{line}", tokens, line) for what in ("queries", "attended"))
    vector = d * BF16_BYTES
    layout = CacheLayout(size, kv_heads * 2 * vector, 2 * vector, vector)
    return _program(kind, sizes, tokens, writer, given, made, context, layout)


def _program(
    kind: str, sizes: dict[str, int], rows: int, writer: ProgramWriter, given: Rows, made: Rows, context: int = 0,
    cache: CacheLayout | None = None,
) -> Program:  # fmt: skip
    attributes = {name: attribute_words(size) for name, size in sizes.items()}
    return Program(
        kind, attributes, rows, 1, context, cache or CacheLayout(), writer.buffers, given, made, tuple(writer.steps)
    )


_PRODUCTS_OF = ("q4nx_matmul", "fused_dqp", "dense_matmul")
_KINDS = (*_PRODUCTS_OF, "convolution", "flow_qkv_attention", "flow_kv_attention")
