# SPDX-License-Identifier: Apache-2.0
"""Bounds of products, with the roundings that the provider's options permit; weights in 4 and 8 bits; patches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flownpu.ops import q4nx
from tests.fuzz.arrays import Array, is_float, limits, numpy_type
from tests.fuzz.reference.bounds import (
    ALWAYS,
    NEVER,
    NOT_FINITE,
    PERHAPS,
    Bounds,
    Unknown,
    elementwise,
    of,
    rounded,
    unit,
)
from tests.fuzz.reference.elementwise import FUNCTION_UNITS, gelu, product_of, quotient_of, sum_of

if TYPE_CHECKING:
    from tests.fuzz.reference.evaluate import Node, Table

# Relative error of activations and weights that are rounded to bf16: half a unit of 8 significant bits, and the
# product's own rounding after it.
BFLOAT16 = 2.0**-8
# Error of rounding to int8, relative to the group's largest number: half of a 127th. A group is part of a row.
INT8 = 0.5 / 127 * 1.02
# A group of magnitudes up to this is rounded to 0 (docs/operators.md, small numbers).
NEGLIGIBLE = 127 / float(np.finfo(np.float32).max)
# Error of rounding to 8 bits between a group's lowest and highest number: half of a 255th of their distance.
BYTE = 0.5 / 255 * 1.02
# Above this, roundings to bf16 and scales of int8 may overflow.
ENORMOUS = 1e37
# The largest sum of a row of activations that does not overflow: it is multiplied by 8-bit codes before their scale.
MOST_ACTIVATIONS = float(np.finfo(np.float32).max) / 256


def product(
    x: Bounds, w: Bounds, rounding: str = "none", span: Array | None = None, scale: Bounds | None = None
) -> Bounds:
    """Bounds of x [.., S, K] or [K] times w [.., K, M], in any order of summation.

    Args:
        x: the activations.
        w: the weight.
        rounding: rounding of activations and weight: "none", "bf16" or "int8".
        span: [M]: the range that the 8-bit codes of a column cover with "int8"; None: from its least to its largest
            number.
        scale: scale of a weight that is int8 in the model.
    """
    if len(x.shape) == 1:
        return product(x.map(lambda row: row[None]), w, rounding, span, scale).map(lambda rows: rows[..., 0, :])
    if not is_float(x.dtype):
        exact = np.matmul(x.exact(), w.exact())
        return Bounds(exact, exact, x.dtype)
    (xm, xr), (wm, wr) = _middle(x), _middle(w)
    offset = 0.0
    if rounding == "bf16":
        xr, wr = xr + np.abs(xm) * BFLOAT16, wr + np.abs(wm) * BFLOAT16
    elif rounding == "int8" and xm.size and wm.size:
        xr = xr + (np.abs(xm) + xr).max(axis=-1, keepdims=True) * INT8 + np.minimum(np.abs(xm), NEGLIGIBLE)
        wr = wr + (np.ptp(wm, axis=-2, keepdims=True) if span is None else span) * BYTE
        if scale is not None:  # 128 is added to the codes, and subtracted from the product
            offset = np.abs(_middle(scale)[0]).max(initial=0) * 128
            wr = wr + offset * 2.0**-22
    terms = x.shape[-1]
    size, weight = np.abs(xm) + xr, np.abs(wm) + wr
    magnitude = np.matmul(size, weight)
    radius = np.matmul(size, wr) + np.matmul(xr, np.abs(wm)) + magnitude * (terms + 4) * unit(x.dtype) * 1.01
    middle = np.matmul(xm, wm)
    made = rounded(middle - radius, middle + radius, x.dtype)
    magnitude = np.maximum(magnitude, offset)
    return _with_infinities(made, x, w, magnitude, rounded_values=rounding != "none")


def _middle(x: Bounds) -> tuple[Array, Array]:
    """Middle and radius of the bounds; 0 where an end is not finite."""
    if x.is_exact:
        middle = np.where(np.isfinite(x.low), x.low, 0)
        return middle, np.zeros_like(middle)
    usable = np.isfinite(x.low) & np.isfinite(x.high)
    low, high = np.where(usable, x.low, 0), np.where(usable, x.high, 0)
    return (low + high) / 2, (high - low) / 2


def _with_infinities(made: Bounds, x: Bounds, w: Bounds, magnitude: Array, *, rounded_values: bool) -> Bounds:
    """The bounds of a product, corrected for rows and columns with infinities, NaN, or sums that may overflow."""

    def odd(value: Bounds, axis: int) -> Array:
        strange = ~(np.isfinite(value.low) & np.isfinite(value.high))
        if value.nan is not None:
            strange = strange | (value.nan != NEVER)
        return np.asarray(strange.any(axis=axis, keepdims=True))

    rows, columns = odd(x, -1), odd(w, -2)
    enormous = magnitude > (ENORMOUS if rounded_values else float(limits(x.dtype).max) / 2)
    if rounded_values:  # products with codes and with minima are summed separately
        sums = np.where(np.isfinite(x.low), np.abs(x.low), 0).sum(axis=-1, keepdims=True)
        enormous = enormous | (sums > MOST_ACTIVATIONS)
        # Such numbers may round to infinity in bf16, and their range, which int8 divides into steps, may be infinite.
        for value, axis in ((x, -1), (w, -2)):
            largest = np.where(np.isfinite(value.low), np.abs(value.low), 0).max(axis=axis, keepdims=True, initial=0)
            enormous = enormous | (largest > ENORMOUS)
    strange = np.broadcast_to(rows | columns, made.shape)
    if not strange.any() and not enormous.any():
        return made
    low, high = np.where(enormous, -np.inf, made.low), np.where(enormous, np.inf, made.high)
    nan = np.where(enormous, PERHAPS, NEVER).astype(np.uint8)
    if strange.any():
        values = [np.where(v.nan == ALWAYS, np.nan, v.low) if v.nan is not None else v.low for v in (x, w)]
        certain = all(v.is_exact and (v.nan is None or np.isin(v.nan, (NEVER, ALWAYS)).all()) for v in (x, w))
        exact = np.einsum("...sk,...km->...sm", *values)
        strange = strange & ~np.isfinite(exact) if certain else strange
        if not certain:
            low, high, nan = (
                np.where(strange, -np.inf, low),
                np.where(strange, np.inf, high),
                np.where(strange, PERHAPS, nan),
            )
        elif rounded_values:
            nan = np.where(strange, NOT_FINITE, nan)
            low, high = np.where(strange, -np.inf, low), np.where(strange, np.inf, high)
        else:
            # A sum with one infinity, and otherwise finite numbers, is this infinity.
            nan = np.where(strange & np.isnan(exact), ALWAYS, nan)
            infinite = strange & np.isinf(exact)
            low, high = np.where(infinite, exact, low), np.where(infinite, exact, high)
            low, high = (np.where(nan == ALWAYS, 0, end) for end in (low, high))
    return Bounds(low, high, made.dtype, nan.astype(np.uint8))


def _dense_rounding(node: Node) -> str:
    """The rounding of products with a constant weight: on AVX-512 that of `activations` (docs/operators.md)."""
    return node.provider.get("activations", "none") if node.provider.get("cpu_isa") in ("avx512", "auto") else "none"


def matmul(node: Node) -> Bounds:
    x, w = node.input(0), node.input(1)
    if x.shape[-1:] == (0,) and node.provider.get("on_unsupported") == "cpu":
        raise Unknown  # ONNX Runtime's kernel leaves a sum of nothing uninitialised
    rounding = _dense_rounding(node) if node.is_constant(1) and len(w.shape) == 2 else "none"
    if len(w.shape) == 1:
        return product(x, w.map(lambda column: column[:, None]), rounding).map(lambda columns: columns[..., 0])
    return product(x, w, rounding, scale=node.scale_behind(1))


def gemm(node: Node) -> Bounds:
    a, w = node.input(0), node.input(1)
    if len(a.shape) != 2:
        raise Unknown  # ONNX Runtime takes a vector as a row
    if node.attributes.get("transA", 0):
        a = a.map(np.transpose)
    if node.attributes.get("transB", 0):
        w = w.map(np.transpose)
    made = product(a, w, _dense_rounding(node) if node.is_constant(1) else "none", scale=node.scale_behind(1))
    alpha, beta = node.attributes.get("alpha", 1.0), node.attributes.get("beta", 1.0)
    if not is_float(a.dtype):
        if (alpha, beta) != (1.0, 1.0):
            raise Unknown
        return made if not node.has(2) else of(made.exact() + node.input(2).exact())
    if alpha != 1:
        made = product_of(made, _number(alpha, made))
    if node.has(2) and beta != 0:
        c = node.input(2)
        made = sum_of(made, product_of(c, _number(beta, c)) if beta != 1 else c)
    return made


def _number(value: float, like: Bounds) -> Bounds:
    array = np.full((1,) * len(like.shape), np.float64(np.float32(value)))
    return Bounds(array, array, like.dtype)


# --- Weights of few bits ----------------------------------------------------------------------------------------------


def _nibbles(codes: Array, columns: int) -> Array:
    """Unpacks codes [rows, bytes] to [rows, columns]; the low nibble comes first."""
    return np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)[:, :columns]


def _block_weight(
    node: Node, codes: int, scales: int, zeros: int, rows: int, columns: int, block: int
) -> tuple[Bounds, Array]:
    """A weight's bounds [rows, columns], with what repacking to Q4NX may round as radius; and each row's code range."""
    blocks = -(-columns // block)
    numbers = _nibbles(node.input(codes).exact().reshape(rows, -1), blocks * block).astype(np.float64)
    scale = node.float(scales).exact().reshape(rows, blocks)
    zero = np.full((rows, blocks), 8.0)
    if node.has(zeros):
        given = node.input(zeros).exact().reshape(rows, -1)
        zero = (
            given if is_float(given.dtype) or given.dtype == np.float64 else _nibbles(given, blocks).astype(np.float64)
        )
    span = _code_span(scale, -scale * zero)
    scale, zero = (np.repeat(a, block, axis=1)[:, :columns] for a in (scale, zero))
    numbers = numbers[:, :columns]
    weight = scale * (numbers - zero)
    # The scale is rounded to bf16, and the minimum, -zero times the scale, once more. Blocks of 16 are quantised again
    # in groups of 32 with 15 steps, whose ends may be clipped if that makes the other errors smaller.
    radius = np.abs(scale) * (numbers + 2 * np.abs(zero)) * BFLOAT16 * 1.01
    if block < 32 or columns % 32:
        padded = np.pad(weight, ((0, 0), (0, -columns % 32)), mode="edge").reshape(rows, -1, 32)
        steps = np.maximum(padded.max(-1), 0) - np.minimum(padded.min(-1), 0)
        radius = radius + np.repeat(steps, 32, axis=1)[:, :columns] * (1.6 / 15 if block < 32 else 0)
    return Bounds(weight - radius, weight + radius, numpy_type(1)), span


def _code_span(scale: Array, minimum: Array) -> Array:
    """The range [rows] of the numbers that 4-bit codes of a row's groups can stand for; inputs are [rows, groups].

    Like in the kernel, it follows from scales and minima, not from the codes that occur.
    """
    ends = np.stack([minimum, minimum + 15 * scale])
    span: Array = np.ptp(np.where(np.isfinite(ends), ends, 0), axis=(0, 2))
    return span


def q4nx_product(node: Node, x: Bounds, blocks: Array, rows: int, columns: int) -> Bounds:
    """Bounds of x times the weight [rows, columns] in Q4NX blocks."""
    weight, span = _q4nx_weight(blocks, rows, columns)
    return product(x, weight.map(np.transpose), node.provider.get("activations", "none"), span)


def matmul_n_bits(node: Node) -> Bounds:
    attributes = node.attributes
    if attributes.get("bits", 4) != 4 or node.has(4):
        raise Unknown
    rows, columns = attributes["N"], attributes["K"]
    weight, span = _block_weight(node, 1, 2, 3, rows, columns, attributes["block_size"])
    # FlowNPU takes constants only; ONNX Runtime's kernel rounds activations to int8 if accuracy_level is 4.
    is_ours = all(node.is_constant(i) for i in (1, 2, 3) if node.has(i))
    ours = is_ours or attributes.get("accuracy_level", 0) != 4
    rounding = node.provider.get("activations", "none") if ours else "int8"
    made = product(node.float(0), weight.map(np.transpose), rounding, span)
    return sum_of(made, node.float(5)) if node.has(5) else made


def gather_n_bits(node: Node) -> Bounds:
    scales = node.float(2)
    rows, block = scales.shape[0], node.attributes.get("block_size", 128)
    weight, _ = _block_weight(node, 0, 2, 3, rows, scales.shape[1] * block, block)
    index = node.input(1).exact()
    if index.size and (index.min() < 0 or index.max() >= rows):
        raise Unknown
    return weight.map(lambda array: np.take(array, index, axis=0))


def _q4nx_weight(blocks: Array, rows: int, columns: int) -> tuple[Bounds, Array]:
    """Bounds of a weight in Q4NX blocks, and each row's code range, as from `_block_weight`."""
    weight = q4nx.dequantize(blocks, rows, columns).astype(np.float64)
    # Products with codes and with minima may be summed separately.
    codes, scale, minimum = q4nx.unpack(blocks, rows, columns)
    scale, minimum = scale.astype(np.float64), minimum.astype(np.float64)
    scales, minima = (np.repeat(a, 32, axis=1)[:, :columns] for a in (scale, minimum))
    radius = (np.abs(scales * codes) + np.abs(minima)) * (columns + 4) * 2.0**-24
    return Bounds(weight - radius, weight + radius, numpy_type(1)), _code_span(scale, minimum)


def q4nx_matmul(node: Node) -> Bounds:
    rows, columns = node.attributes["M"], node.attributes["K"]
    if rows < 1 or columns < 1:
        raise Unknown  # no blocks have such a size
    x, blocks = node.float(0), node.input(1).exact()
    gating = node.attributes.get("gating", b"none")
    if gating == b"none":
        made = q4nx_product(node, x, blocks, rows, columns)
    else:
        made = gated_product(node, x, blocks, rows, columns, is_geglu=gating == b"geglu")
    for addend in (2, 3):
        if node.has(addend):
            made = sum_of(made, node.float(addend))
    return made


def gated_product(node: Node, x: Bounds, blocks: Array, rows: int, columns: int, *, is_geglu: bool) -> Bounds:
    """Bounds of act(gate) * up, from the blocks of gate and up projection."""
    gate, up = (q4nx_product(node, x, half, rows, columns) for half in np.split(blocks, 2))
    return product_of(gelu(gate, tanh=True) if is_geglu else _silu(gate), up)


def _silu(x: Bounds) -> Bounds:
    """Bounds of SiLU, x / (1 + e^-x), which is not monotone below 0; its minimum there is -0.2785."""
    low, high = x.low, x.high
    if x.nan is not None or not (np.isfinite(low).all() and np.isfinite(high).all()):
        return product_of(x, elementwise(lambda a: 1 / (1 + np.exp(-a)), x, units=FUNCTION_UNITS))
    ends = [a / (1 + np.exp(-a)) for a in (low, high)]
    least, most = np.minimum(*ends), np.maximum(*ends)
    least = np.where((low < -1.2) & (high > -1.3), -0.2785, least)
    return rounded(least, most, x.dtype, FUNCTION_UNITS + np.minimum(np.abs(low), 100))


def q4nx_gather(node: Node) -> Bounds:
    rows, columns = node.attributes["M"], node.attributes["K"]
    index = node.input(1).exact()
    if index.size and (index.min() < 0 or index.max() >= rows):
        raise Unknown
    weight, _ = _q4nx_weight(node.input(0).exact(), rows, columns)
    return weight.map(lambda array: np.take(array, index, axis=0))


def dense_matmul(node: Node) -> Bounds:
    x, w = node.float(0), node.input(1)
    if not is_float(w.dtype):
        numbers = w.exact().astype(np.float64)
        w = Bounds(numbers, numbers, x.dtype)
    if node.attributes.get("transposed", 0):
        w = w.map(np.transpose)
    if node.has(2):
        w = product_of(w, node.float(2))
    scale = node.optional(2)
    made = product(x, w._replace(dtype=x.dtype), _dense_rounding(node), scale=scale)
    if node.has(3):
        made = sum_of(made, node.float(3))
    activation = node.attributes.get("activation", b"none")
    if activation != b"none":
        made = gelu(made, tanh=activation == b"gelu_tanh")
    return sum_of(made, node.float(4)) if node.has(4) else made


def dequantize(node: Node) -> Bounds:
    x, scale = node.input(0), node.float(1)
    result = (
        numpy_type(node.attributes.get("output_dtype", 0) or 0) if node.attributes.get("output_dtype") else scale.dtype
    )
    if node.attributes.get("block_size", 0) or is_float(x.dtype) or x.dtype.itemsize < 1 or result != np.float32:
        raise Unknown
    numbers = x.exact().astype(np.float64)
    zero = node.input(2).exact().astype(np.float64) if node.has(2) else np.zeros(scale.shape)

    def placed(array: Array) -> Array:
        if array.size == 1 and array.ndim <= 1:
            return array.reshape(())
        shape = [1] * numbers.ndim
        shape[node.attributes.get("axis", 1)] = -1
        return array.reshape(shape)

    difference = numbers - placed(zero)
    return product_of(Bounds(difference, difference, result), scale.map(placed))


# --- Patches ----------------------------------------------------------------------------------------------------------


def _windows(array: Array, kernel: list[int], node: Node) -> Array:
    """The windows [N, C, rows, columns, height, width] of images [N, C, H, W]; none if the kernel is larger."""
    pads = node.attributes.get("pads", [0, 0, 0, 0])
    strides = node.attributes.get("strides", [1, 1])
    if (
        any(d != 1 for d in node.attributes.get("dilations", []))
        or node.attributes.get("auto_pad", b"NOTSET") != b"NOTSET"
    ):
        raise Unknown
    padded = np.pad(array, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])))
    if any(size < window for size, window in zip(padded.shape[2:], kernel, strict=True)):
        places = [max(size - window + 1, 0) for size, window in zip(padded.shape[2:], kernel, strict=True)]
        views = np.empty((*padded.shape[:2], *places, *kernel), padded.dtype)
    else:
        views = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=(2, 3))
    return views[:, :, :: strides[0], :: strides[1]]


def convolution(node: Node) -> Bounds:
    x, w = node.float(0), node.float(1)
    if len(x.shape) != 4 or node.attributes.get("group", 1) != 1:
        raise Unknown
    kernel = list(w.shape[2:])

    def patches(array: Array) -> Array:
        views = _windows(array, kernel, node)
        n, c, rows, columns = views.shape[:4]
        return views.transpose(0, 2, 3, 1, 4, 5).reshape(n, rows, columns, c * kernel[0] * kernel[1])

    weight = w.map(lambda array: array.reshape(array.shape[0], -1).T)
    made = product(x.map(patches), weight)
    if node.has(2):
        made = sum_of(made, node.float(2))
    return made.map(lambda array: array.transpose(0, 3, 1, 2))


def average_pool(node: Node) -> Bounds:
    kernel = list(node.attributes["kernel_shape"])
    if node.attributes.get("ceil_mode", 0) or any(node.attributes.get("pads", [])):
        raise Unknown
    views = node.float(0).map(
        lambda array: _windows(array, kernel, node).reshape(*_space(array, kernel, node), kernel[0] * kernel[1])
    )
    ones = np.ones((views.shape[-1], 1))
    total = product(views, Bounds(ones, ones, views.dtype)).map(lambda array: array[..., 0])
    return quotient_of(total, _number(float(kernel[0] * kernel[1]), total))


def _space(array: Array, kernel: list[int], node: Node) -> tuple[int, ...]:
    return tuple(_windows(array, kernel, node).shape[:4])


TABLE: Table = {
    ("", "MatMul"): matmul,
    ("", "Gemm"): gemm,
    ("", "Conv"): convolution,
    ("", "AveragePool"): average_pool,
    ("", "DequantizeLinear"): dequantize,
    ("com.microsoft", "MatMulNBits"): matmul_n_bits,
    ("com.microsoft", "GatherBlockQuantized"): gather_n_bits,
    ("ai.flownpu", "Q4NXMatMul"): q4nx_matmul,
    ("ai.flownpu", "FusedDQP"): q4nx_matmul,
    ("ai.flownpu", "Q4NXGather"): q4nx_gather,
    ("ai.flownpu", "DenseMatMul"): dense_matmul,
}
