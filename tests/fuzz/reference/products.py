# SPDX-License-Identifier: Apache-2.0
"""Samples of products, with the roundings that the provider's options permit; weights in 4 and 8 bits; patches."""

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np

from flownpu.ops import q4nx
from flownpu.ops.definitions.q4nx_moe import route
from tests.fuzz.arrays import Array, is_float, limits, numpy_type
from tests.fuzz.reference.evaluate import Node, Table
from tests.fuzz.reference.pools import windows_of
from tests.fuzz.reference.samples import Samples, Unknown, each, of, unit
from tests.fuzz.reference.standard import FUNCTION_UNITS, elementwise, gelu, summed

# Errors of one rounding: to bf16, with 8 significant bits; of activations to int8, half of a 63rd of their group's
# largest magnitude (twice that in 127 steps on AVX2, finer elsewhere; a group is part of a row); of weights, half of a
# 127th of the distance between a group's ends.
BFLOAT16, INT7, BYTE = 2.0**-8, 0.5 / 63 * 1.02, 0.5 / 127 * 1.02
# The rounding of AVX2, whose eight weights of one sign share so many steps.
SHORT_SUMS, SHORT_STEPS = "int8, added up in 16 bits", 32767 // 150 - 4
# A group of magnitudes up to this is rounded to 0 (docs/operators.md, small numbers).
NEGLIGIBLE = 127 / float(np.finfo(np.float32).max)
# Above this, roundings to bf16 and scales of int8 may overflow.
ENORMOUS = 1e37
# The largest sum of a row of activations that does not overflow: it is multiplied by 8-bit codes before their scale.
MOST_ACTIVATIONS = float(np.finfo(np.float32).max) / 256
# The values of bitsandbytes' types: NF4 as in appendix E of arXiv 2305.14314, FP4 with a bias of 3, at most 1.
BNB4_VALUES = {
    "fp4": (0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4, 0, -1 / 192, -2 / 3, -1, -1 / 3, -1 / 2, -1 / 6, -1 / 4),
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
}
FOUR_BITS = (np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.uint4))


def product(
    x: Samples, w: Samples, rounding: str = "none", span: Array | None = None, scale: Samples | None = None
) -> Samples:
    """Samples of x [.., S, K] or [K] times w [.., K, M], in any order of summation.

    Args:
        x: the activations.
        w: the weight.
        rounding: rounding of activations and weight: "none", "bf16", "int8" or SHORT_SUMS.
        span: [M]: the range that the 8-bit codes of a column cover with "int8"; None: from its least to its largest
            number.
        scale: scale of a weight that is int8 in the model.
    """
    if len(x.shape) == 1:
        return product(x.map(lambda row: row[None]), w, rounding, span, scale).map(lambda rows: rows[..., 0, :])
    if not x.is_float:
        return of(np.matmul(x.exact(), w.exact()))
    sizes = [np.where(np.isfinite(s.numbers), np.abs(s.numbers), 0).max(axis=0) for s in (x, w)]
    magnitude = np.matmul(*sizes)
    largest = float(limits(x.dtype).max) / 2
    enormous = magnitude > largest
    if scale is not None:  # Codes are multiplied before their scale.
        enormous |= magnitude > largest * np.abs(scale.numbers[0]).min(initial=1)
    if rounding != "none":
        # Products with codes and with minima are summed separately; such numbers may round to infinity in bf16, and
        # their range, which int8 divides into steps, may be infinite.
        enormous |= (magnitude > ENORMOUS) | (sizes[0].sum(axis=-1, keepdims=True) > MOST_ACTIVATIONS)
        for size, axis in ((sizes[0], -1), (sizes[1], -2)):
            enormous |= size.max(axis=axis, keepdims=True, initial=0) > ENORMOUS
    shaken_x, shaken_w = _rounded_operands(x, w, rounding, span, scale, sizes)
    terms = (x.shape[-1] + 4) * unit(x.dtype)
    made = each(lambda a, b: [np.matmul(a, b)], [shaken_x.shaken(terms), shaken_w], x.dtype)[0].rounded()
    if rounding != "none" and not np.isfinite(made.numbers[0]).all():
        # Scales of infinities and NaN: either comes out.
        broken = ~np.isfinite(made.numbers)
        kinds = np.where(np.arange(len(made.numbers)) % 2, np.nan, np.inf).reshape(-1, *[1] * len(made.shape))
        made = made._replace(numbers=np.where(broken, kinds, made.numbers))
    return made.unknown_where(enormous)


def _rounded_operands(
    x: Samples, w: Samples, rounding: str, span: Array | None, scale: Samples | None, sizes: list[Array]
) -> tuple[Samples, Samples]:
    if rounding == "bf16":
        return x.shaken(BFLOAT16), w.shaken(BFLOAT16)
    if rounding not in ("int8", SHORT_SUMS) or not (sizes[0].size and sizes[1].size):
        return x, w
    # A row's largest magnitude is at least each group's; codes of weights lie within twice a column's.
    error = sizes[0].max(axis=-1, keepdims=True) * INT7 + np.minimum(sizes[0], NEGLIGIBLE)
    finite = np.where(np.isfinite(w.numbers[0]), w.numbers[0], 0)
    of_weight = (2 * np.abs(finite).max(axis=-2, keepdims=True) if span is None else span) * BYTE
    if rounding == SHORT_SUMS:
        eight = np.sort(np.abs(finite), axis=-2)[..., -8:, :].sum(axis=-2, keepdims=True)
        of_weight = np.maximum(of_weight, eight / SHORT_STEPS * 0.5 * 1.02)
    if scale is not None:  # 128 is added to the codes, and subtracted from the product
        of_weight = of_weight + np.abs(scale.numbers[0]).max(initial=0) * 128 * 2.0**-22
    return x.shaken(absolute=error), w.shaken(absolute=of_weight)


def _dense_rounding(node: Node) -> str:
    """The rounding of products with a constant weight: that of `activations`, on AVX2 int8 only."""
    isa, activations = node.provider.get("cpu_isa"), node.provider.get("activations", "none")
    if activations == "int8" and isa in ("avx2", "auto"):
        return SHORT_SUMS
    return activations if isa in ("avx512", "auto") else "none"


def sum_of(a: Samples, b: Samples) -> Samples:
    return elementwise(np.add, a, b)


def matmul(node: Node) -> Samples:
    x, w = node.input(0), node.input(1)
    if x.shape[-1:] == (0,) and node.provider.get("on_unsupported") == "cpu":
        raise Unknown  # ONNX Runtime's kernel leaves a sum of nothing uninitialised
    rounding = _dense_rounding(node) if node.is_constant(1) and len(w.shape) == 2 else "none"
    span = _four_bit_span(node, 1)
    rounding = rounding if span is None else "int8"
    if len(w.shape) == 1:
        made = product(x, w.map(lambda column: column[:, None]), rounding)
        return made.map(lambda columns: columns[..., 0])
    return product(x, w, rounding, span, scale=node.scale_behind(1))


def gemm(node: Node) -> Samples:
    a, w = node.input(0), node.input(1)
    if len(a.shape) != 2:
        raise Unknown  # ONNX Runtime takes a vector as a row
    a = a.map(np.transpose) if node.attributes.get("transA", 0) else a
    w = w.map(np.transpose) if node.attributes.get("transB", 0) else w
    span = _four_bit_span(node, 1)
    rounding = "int8" if span is not None else _dense_rounding(node) if node.is_constant(1) else "none"
    made = product(a, w, rounding, span, scale=node.scale_behind(1))
    alpha, beta = (np.float64(np.float32(node.attributes.get(name, 1.0))) for name in ("alpha", "beta"))
    if not a.is_float:
        if (alpha, beta) != (1.0, 1.0):
            raise Unknown
        return made if not node.has(2) else of(made.exact() + node.input(2).exact())
    made = elementwise(lambda y: alpha * y, made) if alpha != 1 else made
    if node.has(2) and beta != 0:
        made = sum_of(made, elementwise(lambda c: beta * c, node.input(2)) if beta != 1 else node.input(2))
    return made


# --- Weights of few bits ---------------------------------------------------------------------------------------------


def _nibbles(codes: Array, columns: int) -> Array:
    """Unpacks codes [rows, bytes] to [rows, columns]; the low nibble comes first."""
    return np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)[:, :columns]


def _block_weight(
    node: Node, codes: int, scales: int, zeros: int, rows: int, columns: int, block: int
) -> tuple[Samples, Array]:
    """A weight's samples [rows, columns], with what repacking to Q4NX may round; and each row's code range."""
    blocks = -(-columns // block)
    numbers = _nibbles(node.input(codes).exact().reshape(rows, -1), blocks * block).astype(np.float64)
    scale = node.float(scales).exact().reshape(rows, blocks)
    zero = np.full((rows, blocks), 8.0)
    if node.has(zeros):
        given = node.input(zeros).exact().reshape(rows, -1)
        zero = given if is_float(given.dtype) else _nibbles(given, blocks).astype(np.float64)
    span = _code_span(scale, -scale * zero)
    scale, zero = (np.repeat(a, block, axis=1)[:, :columns] for a in (scale, zero))
    numbers = numbers[:, :columns]
    weight = scale * (numbers - zero)
    # The scale is rounded to bf16, and the minimum, -zero times the scale, once more. Blocks of 16 are quantised again
    # in groups of 32 with 15 steps, whose ends may be clipped if that makes the other errors smaller.
    error = np.abs(scale) * (numbers + 2 * np.abs(zero)) * BFLOAT16 * 1.01
    if block < 32:
        padded = np.pad(weight, ((0, 0), (0, -columns % 32)), mode="edge").reshape(rows, -1, 32)
        steps = np.maximum(padded.max(-1), 0) - np.minimum(padded.min(-1), 0)
        error = error + np.repeat(steps, 32, axis=1)[:, :columns] * (0.8 / 15)
    return Samples(weight[None], numpy_type(1)).shaken(absolute=error), span


def _code_span(scale: Array, minimum: Array) -> Array:
    """The range [rows] of the numbers that 4-bit codes of a row's groups can stand for; inputs are [rows, groups].

    Like in the kernel, it follows from scales and minima, not from the codes that occur.
    """
    ends = np.stack([minimum, minimum + 15 * scale])
    span: Array = np.ptp(np.where(np.isfinite(ends), ends, 0), axis=(0, 2))
    return span


def _four_bit_span(node: Node, index: int) -> Array | None:
    """The range that 4-bit codes of a dequantised weight can stand for; None if it is no such weight.

    Its product is one of Q4NX, or ONNX Runtime's MatMulNBits, which rounds activations to int8.
    """
    codes, scale, zero = (*node.dequantized(index), None, None, None)[:3]
    if codes is None or scale is None or codes.dtype not in FOUR_BITS:
        return None
    lowest, points = int(limits(codes.dtype).min), 0.0 if zero is None else zero.exact().astype(np.float64)
    ends = np.stack([scale.exact() * (lowest - points), scale.exact() * (lowest + 15 - points)])
    return np.asarray(np.ptp(np.where(np.isfinite(ends), ends, 0)) if ends.size else 0.0)


def matmul_n_bits(node: Node) -> Samples:
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


def matmul_bnb4(node: Node) -> Samples:
    rows, columns, block = (node.attributes[name] for name in ("N", "K", "block_size"))
    table = np.array(BNB4_VALUES["nf4" if node.attributes["quant_type"] else "fp4"])
    packed, scale = node.input(1).exact().reshape(-1), node.float(2).exact().reshape(-1)
    places = np.stack([packed >> 4, packed & 15], axis=-1).reshape(rows, columns)
    spread = np.repeat(scale, block)[: rows * columns].reshape(rows, columns)
    weight = spread * table[places]
    # FlowNPU's table has multiples of 1 / 127, and the scale is rounded to bf16.
    error = np.abs(spread) * (0.5 / 127 + BFLOAT16 * 1.01 * np.abs(table[places]))
    samples = Samples(weight[None], numpy_type(1)).shaken(absolute=error)
    span = 2 * np.abs(spread).max(axis=1)
    return product(node.float(0), samples.map(np.transpose), node.provider.get("activations", "none"), span)


def _rows_at(weight: Samples, index: Array) -> Samples:
    if index.size and (index.min() < 0 or index.max() >= weight.shape[0]):
        raise Unknown
    return weight.map(lambda array: np.take(array, index, axis=0))


def gather_n_bits(node: Node) -> Samples:
    scales = node.float(2)
    rows, block = scales.shape[0], node.attributes.get("block_size", 128)
    weight, _ = _block_weight(node, 0, 2, 3, rows, scales.shape[1] * block, block)
    return _rows_at(weight, node.input(1).exact())


def _q4nx_weight(blocks: Array, rows: int, columns: int) -> tuple[Samples, Array]:
    """Samples of a weight in Q4NX blocks, and each row's code range, as from `_block_weight`."""
    if rows < 1 or columns < 1:
        raise Unknown  # no blocks have such a size
    weight = q4nx.dequantize(blocks, rows, columns).astype(np.float64)
    # Products with codes and with minima may be summed separately.
    codes, scale, minimum = q4nx.unpack(blocks, rows, columns)
    scale, minimum = scale.astype(np.float64), minimum.astype(np.float64)
    scales, minima = (np.repeat(a, 32, axis=1)[:, :columns] for a in (scale, minimum))
    error = (np.abs(scales * codes) + np.abs(minima)) * (columns + 4) * 2.0**-24
    return Samples(weight[None], numpy_type(1)).shaken(absolute=error), _code_span(scale, minimum)


def q4nx_product(node: Node, x: Samples, blocks: Array, rows: int, columns: int) -> Samples:
    """Samples of x times the weight [rows, columns] in Q4NX blocks."""
    weight, span = _q4nx_weight(blocks, rows, columns)
    return product(x, weight.map(np.transpose), node.provider.get("activations", "none"), span)


def gated_product(
    node: Node, x: Samples, blocks: Array, rows: int, columns: int, *, is_geglu: bool, bias: Array | None = None
) -> Samples:
    """Samples of act(gate) * up, from the blocks of gate and up projection, and the biases of both."""
    gate, up = (q4nx_product(node, x, half, rows, columns) for half in np.split(blocks, 2))
    if bias is not None:
        gate, up = (
            sum_of(part, of(half.astype(np.float32))) for part, half in zip((gate, up), np.split(bias, 2), strict=True)
        )
    alpha, beta, limit = (node.attributes.get(f"swiglu_{name}", 0.0) for name in ("alpha", "beta", "limit"))
    if alpha:  # the limited SwiGLU
        most = limit or np.inf
        gate, up = gate.map(lambda x: np.minimum(x, most)), up.map(lambda x: np.clip(x, -most, most))
        steep = elementwise(lambda x: alpha * x, gate)
        units = FUNCTION_UNITS + np.minimum(np.nan_to_num(np.abs(steep.numbers)).max(axis=0), 100)
        opened = elementwise(lambda x, s: x / (1 + np.exp(-s)), gate, steep, units=units)
        return elementwise(np.multiply, opened, elementwise(lambda x: x + beta, up))
    if is_geglu:
        return elementwise(np.multiply, gelu(gate, tanh=True), up)
    # SiLU, in which a rounded x is the argument of an exponential; that of 100 is beyond float32.
    # NaN has no roundings, and NaN of them would make NaN of the infinities that it may be instead.
    units = FUNCTION_UNITS + np.minimum(np.nan_to_num(np.abs(gate.numbers)).max(axis=0), 100)
    return elementwise(np.multiply, elementwise(lambda x: x / (1 + np.exp(-x)), gate, units=units), up)


def q4nx_matmul(node: Node) -> Samples:
    rows, columns = node.attributes["M"], node.attributes["K"]
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


def q4nx_gather(node: Node) -> Samples:
    weight, _ = _q4nx_weight(node.input(0).exact(), node.attributes["M"], node.attributes["K"])
    return _rows_at(weight, node.input(1).exact())


def q4nx_moe(node: Node) -> Samples:
    """A mixture of experts; where samples of a row choose different experts, they spread over all that may come out."""
    experts, taken, hidden, inner = (
        node.attributes[name] for name in ("num_experts", "experts_per_token", "hidden_size", "expert_size")
    )
    x = node.float(0).map(lambda array: array.reshape(-1, hidden))
    if min(taken, inner) < 1 or taken > experts or node.has(1) == node.has(4):
        raise Unknown
    if any(node.input(i).shape[0] % experts for i in (2, 3)):
        raise Unknown  # the blocks do not divide by the experts
    if node.has(4):
        logits = node.float(4).map(lambda array: array.reshape(-1, experts))
    elif node.float(1).shape != (experts, hidden):
        raise Unknown
    else:
        logits = product(x, node.float(1).map(np.transpose)._replace(dtype=x.dtype))
        logits = sum_of(logits, node.float(8)) if node.has(8) else logits
    if not np.isfinite(logits.numbers).all():
        raise Unknown
    normalize = bool(node.attributes.get("normalize_routing_weights", 1))

    def weights_of(logits: Array) -> Array:
        made = np.zeros(logits.shape)
        np.put_along_axis(made, *route(logits, taken, normalize=normalize), axis=-1)
        return made

    # A rounded difference of two logits is the argument of each exponential.
    spread = np.abs(logits.numbers).max(axis=0).sum(-1, keepdims=True)
    weights = logits.map(weights_of).rounded(FUNCTION_UNITS + spread)
    if node.has(9):
        weights = elementwise(np.multiply, weights, node.float(9))
    is_geglu = node.attributes.get("gating", b"swiglu") == b"geglu"
    y = of(np.zeros(x.shape, np.float32))
    for e, (inner_blocks, outer) in enumerate(
        zip(*(np.split(node.input(i).exact(), experts) for i in (2, 3)), strict=True)
    ):
        bias = node.float(6).numbers[0][e] if node.has(6) else None
        made = gated_product(node, x, inner_blocks, inner, hidden, is_geglu=is_geglu, bias=bias)
        answer = q4nx_product(node, made, outer, hidden, inner)
        answer = sum_of(answer, of(node.float(7).numbers[0][e].astype(np.float32))) if node.has(7) else answer
        share = weights.map(lambda array, e=e: array[:, e, None])
        y = sum_of(y, elementwise(lambda a, p: np.where(p == 0, 0, a * p), answer, share))
    return y.map(lambda array: array.reshape(node.float(0).shape))


def dense_matmul(node: Node) -> Samples:
    x, w = node.float(0), node.input(1)
    w = Samples(w.numbers.astype(np.float64), x.dtype)
    w = w.map(np.transpose) if node.attributes.get("transposed", 0) else w
    w = elementwise(np.multiply, w, node.float(2)) if node.has(2) else w
    made = product(x, w, _dense_rounding(node), scale=node.optional(2))
    made = sum_of(made, node.float(3)) if node.has(3) else made
    activation = node.attributes.get("activation", b"none")
    if activation != b"none":
        made = gelu(made, tanh=activation == b"gelu_tanh")
    return sum_of(made, node.float(4)) if node.has(4) else made


def dequantize(node: Node) -> Samples:
    x, scale = node.input(0), node.float(1)
    output = node.attributes.get("output_dtype", 0)
    result = numpy_type(output) if output else scale.dtype
    if x.is_float or x.dtype.itemsize < 1 or result != np.float32:
        raise Unknown
    numbers = x.exact().astype(np.float64)
    place = _along_axis(node, numbers.shape)
    zero = place(node.input(2).exact().astype(np.float64)) if node.has(2) else 0.0
    placed = scale.map(place)
    made = elementwise(np.multiply, of(numbers - zero)._replace(dtype=result), placed)
    if x.dtype not in FOUR_BITS:
        return made
    # Q4NX rounds scale and minimum, as in _block_weight, with codes and zero points of at most 15; blocks of 16 are
    # quantised again, where a group of 32 may span 30 steps of either block's scale.
    steps = 45 * BFLOAT16 * 1.01 + (30 * 0.8 / 15 if node.attributes.get("block_size", 0) == 16 else 0)
    sizes = np.abs(placed.numbers[0]) if steps < 1 else np.abs(placed.numbers[0]).max(initial=0)
    return made.shaken(absolute=np.broadcast_to(np.where(np.isfinite(sizes), sizes, 0) * steps, numbers.shape))


def _along_axis(node: Node, sizes: tuple[int, ...]) -> Callable[[Array], Array]:
    """Gives one number, or one for each index or block of the node's axis, a shape that broadcasts to its input."""
    rank, axis = len(sizes), node.attributes.get("axis", 1)
    block = node.attributes.get("block_size", 0)

    def place(array: Array) -> Array:
        if block:
            return np.repeat(array, block, axis).take(np.arange(sizes[axis]), axis)
        if array.size == 1 and array.ndim <= 1:
            return array.reshape(())
        shape = [1] * rank
        shape[axis] = -1
        return array.reshape(shape)

    return place


def quantize(node: Node) -> Samples:
    x, scale = node.float(0), node.float(1)
    if node.attributes.get("output_dtype", 0):
        raise Unknown
    dtype = node.input(2).dtype if node.has(2) else np.dtype(np.uint8)
    place = _along_axis(node, x.shape)
    zero = place(node.input(2).exact().astype(np.float64)) if node.has(2) else 0.0
    quotient = elementwise(np.divide, x, scale.map(place))
    codes = np.rint(quotient.numbers) + zero
    missing, info = np.isnan(codes), limits(dtype)
    numbers = np.clip(np.where(missing, 0, codes), float(info.min), float(info.max)).astype(dtype)
    return Samples(numbers, dtype).unknown_where(missing.any(axis=0))


def integer_matmul(node: Node) -> Samples:
    a, b = (node.input(i).exact().astype(np.int64) for i in (0, 1))
    zeros = [node.input(i).exact().astype(np.int64) if node.has(i) else 0 for i in (2, 3)]
    return of(((a - zeros[0]) @ (b - zeros[1])).astype(np.int32))


def dynamic_quantize(_node: Node) -> Samples:
    raise Unknown  # tests/ops/cpu/test_extremes.py compares it


# --- Patches ---------------------------------------------------------------------------------------------------------


def convolution(node: Node) -> Samples:
    """Conv and FusedConv; more than 4 channels are rounded to bf16 where there are more than 8 results of them."""
    x, w = node.float(0), node.float(1)
    if len(x.shape) != len(w.shape) or len(x.shape) < 3 or 0 in (*x.shape[1:], *w.shape):
        raise Unknown
    group = int(node.attributes.get("group", 1))
    kernel = {"kernel_shape": list(w.shape[2:])}
    if any(axis.count < 1 for axis in windows_of(x.shape[2:], node.attributes | kernel)):
        raise Unknown  # ONNX Runtime cuts such windows
    if node.provider.get("cpu_isa") in ("avx512", "auto") and w.shape[0] // group > 8 and w.shape[1] > 4:
        largest = max(float(np.abs(np.nan_to_num(s.numbers)).max(initial=0)) for s in (x, w))
        if largest > ENORMOUS:
            raise Unknown
        x, w = x.shaken(BFLOAT16), w.shaken(BFLOAT16)
    attributes = {name: value for name, value in node.attributes.items() if name != "activation"}
    conv = replace(node, op_type="Conv", attributes=attributes, opset=max(node.opset, 11), outputs=1)
    bias = [node.float(2)] if node.has(2) else []
    made = summed(conv, [x, w, *bias], int(np.prod(w.shape[1:])) + 1)
    # onnx multiplies padding, too: 0 times infinity or NaN, which kernels leave out.
    made = made.unknown_where(np.isnan(made.numbers[0]))
    if node.has(3):
        made = sum_of(made, node.float(3))
    return made if "activation" not in node.attributes else made.map(lambda a: np.maximum(a, 0))


TABLE: Table = {
    ("", "MatMul"): matmul,
    ("", "Gemm"): gemm,
    ("", "Conv"): convolution,
    ("com.microsoft", "FusedConv"): convolution,
    ("", "DequantizeLinear"): dequantize,
    ("", "QuantizeLinear"): quantize,
    ("", "DynamicQuantizeLinear"): dynamic_quantize,
    ("", "MatMulInteger"): integer_matmul,
    ("com.microsoft", "MatMulBnb4"): matmul_bnb4,
    ("com.microsoft", "MatMulNBits"): matmul_n_bits,
    ("com.microsoft", "GatherBlockQuantized"): gather_n_bits,
    ("ai.flownpu", "Q4NXMatMul"): q4nx_matmul,
    ("ai.flownpu", "FusedDQP"): q4nx_matmul,
    ("ai.flownpu", "Q4NXGather"): q4nx_gather,
    ("ai.flownpu", "DenseMatMul"): dense_matmul,
    ("ai.flownpu", "Q4NXMoE"): q4nx_moe,
}
