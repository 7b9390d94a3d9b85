# SPDX-License-Identifier: Apache-2.0
"""The speed of a decoder on a GPU whose kernels (ops/gpu/decoder/) run as fast as memory and arithmetic permit.

Everything here is **predicted**, and was not compared with a GPU: a kernel takes as long as the slower of moving its
bytes and doing its operations, and then comes a gap before the next kernel. It is a bound: real kernels are slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flownpu._native import Attention, GatedDelta

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flownpu.aie.designs.decode_layer.call import CalledLayer
    from flownpu.aie.programs.decoder_shape import DecoderShape
    from flownpu.predict.target import Target

# Tokens of a prompt that are computed at once: ForwardPass::kMostTokens (ops/gpu/decoder/forward_pass.h).
CHUNK = 256
# Bytes per weight of 4 bits in narrow Q4NX blocks, 640 for 32 x 32, and of 8 bits without minima, 1088.
_WEIGHT, _WEIGHT_OF_EIGHT_BITS = 640 / (32 * 32), 1088 / (32 * 32)
_FLOAT, _CACHE = 4, 2  # bytes of activations, and of a key's or value's element in float16 or bfloat16
# Tokens of a chunk of the delta rule: kDeltaChunk (ops/gpu/kernels/states/kernels.h).
_DELTA_CHUNK = 16
# Bytes per int8 activation: itself, and a float scale and a float sum for each 32.
_ROUNDED = 1 + 2 * _FLOAT / 32
# Rows and columns of RDNA 3's matrices, and float operations of a score beside those: two comparisons with the range,
# the maximum, a difference, exp (2), a product, the sum, a rounding.
_MATRIX, _OF_SCORE = 16, 9


@dataclass(frozen=True)
class Gpu:
    """A processor's integrated GPU, which shares main memory.

    Attributes:
        name: its name in `flownpu predict --device`.
        description: its product name, architecture and memory.
        lanes: float operations that begin in one cycle; a multiply-add is one.
        clock: maximum clock in Hz.
        memory: bytes per second of the memory channels.
    """

    name: str
    description: str
    lanes: int
    clock: float
    memory: float

    # A 780M was measured to read 73 of its channels' 89.6 GB/s (DDR5-5600); the same share is assumed for all.
    READ_SHARE = 73 / 89.6
    # Seconds between the end of a kernel and the start of the next one, which reads its results: an assumption.
    GAP = 5e-6

    @property
    def read(self) -> float:
        """Bytes per second that kernels can read."""
        return self.memory * self.READ_SHARE

    @property
    def floats(self) -> float:
        """Float operations per second: a lane does a multiply-add, two operations, in a cycle."""
        return 2 * self.lanes * self.clock

    @property
    def halves(self) -> float:
        """Operations of float16 products per second: RDNA 3's matrix units begin 512 in a cycle for each 64 lanes."""
        return 8 * self.lanes * self.clock

    @property
    def dots(self) -> float:
        """Integer operations per second: a lane does a dot product of four int8 pairs, 8 operations, in a cycle."""
        return 8 * self.lanes * self.clock


# Numbers of compute units (of 64 lanes) and boost clocks from AMD's product pages.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("radeon-780m", "Radeon 780M (RDNA 3, 12 compute units), two channels of DDR5-5600", 12 * 64, 2.7e9, 89.6e9),
        Gpu("radeon-890m", "Radeon 890M (RDNA 3.5, 16 compute units), LPDDR5X-7500", 16 * 64, 2.9e9, 120e9),
    )
}


@dataclass(frozen=True)
class Kernel:
    """One launch: the bytes that it moves, and its operations: float, of int8 dot products, and of matrix units."""

    name: str
    bytes: float
    floats: float = 0
    dots: float = 0
    halves: float = 0

    def seconds(self, gpu: Gpu) -> float:
        """The longer of the times of memory and arithmetic, and a gap."""
        computing = self.floats / gpu.floats + self.dots / gpu.dots + self.halves / gpu.halves
        return max(self.bytes / gpu.read, computing) + gpu.GAP


@dataclass(frozen=True)
class GpuPoint:
    """The prediction for one length of the prompt or context.

    Attributes:
        context: the length in tokens.
        ttft_seconds: time to the first token for a prompt of this length.
        decode_tokens_per_second: decode rate at this length of the context.
        roof: tokens per second if only reading main memory took time.
        read_bytes: bytes that the kernels of one decoded token move.
    """

    context: int
    ttft_seconds: float
    decode_tokens_per_second: float
    roof: float
    read_bytes: float

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prefill rate: the prompt's tokens per second."""
        return self.context / self.ttft_seconds


def kernels(decoder: DecoderShape, past: int, tokens: int, *, head: bool) -> Iterator[Kernel]:
    """The launches that compute tokens of one chunk, in order; equal launches are the same object.

    Args:
        decoder: the decoder's sizes.
        past: tokens in the KV cache before.
        tokens: tokens of the chunk.
        head: whether the LM head follows, for the last token.
    """
    if tokens > 1:
        yield _norm(decoder, tokens)
    launches: dict[CalledLayer, list[Kernel]] = {}
    for index, layer in enumerate(decoder.layers):
        if layer not in launches:
            launches[layer] = list(_layer(decoder, index, past, tokens))
        yield from launches[layer]
    if tokens == 1:
        yield _norm(decoder, tokens)
    if head:
        yield from _product(
            "LM head", decoder.model.vocabulary, decoder.shape.hidden, 1, eight_bits=decoder.model.head_eight_bits
        )


def _layer(decoder: DecoderShape, index: int, past: int, tokens: int) -> Iterator[Kernel]:
    layer, bits = decoder.model.layers[index], decoder.layers[index].eight_bits
    hidden, mixer, feed_forward = decoder.shape.hidden, layer.mixer, decoder.model.layers[0].feed_forward
    mixed = decoder.model.output_columns(layer)
    has_gates = isinstance(mixer, GatedDelta) or (isinstance(mixer, Attention) and mixer.output_gate)
    gates = mixed if has_gates else 0
    norm = _norm(decoder, tokens)
    if tokens == 1 and (gates or not isinstance(mixer, Attention)):  # else a token's products normalise
        yield norm
    first = decoder.model.input_rows(layer) - gates
    yield from _product("QKV", first, hidden, tokens, eight_bits=bool(bits & 1))
    if gates:
        yield from _product("gates", gates, hidden, tokens, eight_bits=bool(bits & 1))
    if isinstance(mixer, Attention):
        if tokens > 1:  # a token's attention appends
            yield Kernel("append", tokens * first * (_FLOAT + _CACHE), floats=12 * tokens * first)
        yield _attention(decoder, mixer.window, past, tokens)
    else:
        yield _convolution(first, first if gates else mixed, mixer.taps, tokens)
    if isinstance(mixer, GatedDelta):
        yield from _delta(mixer, hidden, tokens)
    if gates:
        yield Kernel("gate", 3 * tokens * gates * _FLOAT, floats=12 * tokens * gates)
    yield from _product("output", hidden, mixed, tokens, eight_bits=bool(bits >> 1 & 1))
    if tokens > 1:
        yield norm
    rows, size = feed_forward.gate_up_rows, feed_forward.size
    yield from _product("gate and up", rows, hidden, tokens, size, eight_bits=bool(bits >> 2 & 1))
    yield from _product("down", hidden, size, tokens, eight_bits=bool(bits >> 3 & 1))
    if tokens > 1:
        yield norm


def _norm(decoder: DecoderShape, tokens: int) -> Kernel:
    hidden = decoder.shape.hidden
    return Kernel("norm", 4 * tokens * hidden * _FLOAT, floats=8 * tokens * hidden)


def _convolution(given: int, channels: int, taps: int, tokens: int) -> Kernel:
    """A short convolution of rows of `given` elements, with its state."""
    moved = tokens * (given + channels) + (taps + 2 * (taps - 1)) * channels
    return Kernel("convolution", moved * _FLOAT, floats=2 * (taps + 2) * tokens * channels)


def _delta(mixer: GatedDelta, hidden: int, tokens: int) -> Iterator[Kernel]:
    """The rates, and the rule: token by token, or in chunks by two kernels (ops/gpu/kernels/states/)."""
    heads, size = mixer.value_heads, mixer.key_size
    values = heads * mixer.value_size
    given = tokens * (2 * mixer.key_heads * size + values)
    rates = (2 * hidden * heads + tokens * (hidden + 2 * heads)) * _FLOAT
    yield Kernel("rates", rates, floats=4 * tokens * hidden * heads)
    moved = (given + tokens * values + 2 * values * size) * _FLOAT
    if tokens < _DELTA_CHUNK:
        yield Kernel("delta rule", moved, floats=8 * tokens * values * size)
        return
    # A token's pairs with its chunk's tokens: dot products of keys and queries, and a triangular system.
    pairs = tokens * heads * (2 * _DELTA_CHUNK + 4) * _FLOAT
    of_pairs = 4 * _DELTA_CHUNK * size * mixer.key_heads + _DELTA_CHUNK**2 * heads
    yield Kernel("delta rule: pairs", given * _FLOAT + pairs, floats=tokens * of_pairs)
    # For each column a token's key, query and change, twice its chunk's tokens, and a share of the state's decay.
    of_column = 3 * size + 2 * _DELTA_CHUNK + size / _DELTA_CHUNK
    yield Kernel("delta rule: chunks", moved + pairs, floats=2 * tokens * values * of_column)


def _product(
    name: str, rows: int, columns: int, tokens: int, written: int = 0, *, eight_bits: bool = False
) -> Iterator[Kernel]:
    """The launches of a product of `tokens` activations [columns] with a weight [rows, columns].

    A single token is multiplied in float, with dequantised weights; several are rounded to int8 first. `written` is how
    many results per token are written, if gating makes them fewer than `rows`. Weights of 8 bits are dequantised and
    multiplied by as many operations as those of 4.
    """
    weight = rows * columns * (_WEIGHT_OF_EIGHT_BITS if eight_bits else _WEIGHT)
    results = tokens * (written or rows) * _FLOAT
    if tokens == 1:
        yield Kernel(name, weight + columns * _FLOAT + results, floats=4 * rows * columns)
        return
    yield Kernel(f"{name}: rounding", tokens * columns * (_FLOAT + _ROUNDED), floats=6 * tokens * columns)
    # Beside the dot products, four float operations for each group of 32.
    work = tokens * rows * columns
    yield Kernel(name, weight + tokens * columns * _ROUNDED + results, floats=4 * work / 32, dots=2 * work)


def _attention(decoder: DecoderShape, window: int, past: int, tokens: int) -> Kernel:
    """Memory is read once for all heads that share keys and values, and for all tokens of a chunk (GPU's cache).

    Several tokens are multiplied by matrix units, if these divide the heads' size (ops/gpu/kernels/matrices).
    """
    shape = decoder.shape
    keys = [min(past + token + 1, window or past + token + 1) for token in range(tokens)]
    seen = min(past + tokens, (window or past + tokens) + tokens - 1)
    width = shape.heads * shape.d
    moved = 2 * seen * shape.kv_heads * shape.d * _CACHE + 2 * tokens * width * _FLOAT
    work = 4 * sum(keys) * width
    if tokens == 1 or shape.d % _MATRIX:
        return Kernel("attention", moved, floats=work)
    return Kernel("attention", moved, floats=_OF_SCORE * sum(keys) * shape.heads, halves=work)


def predict_gpu(target: Target, gpu: Gpu, contexts: Sequence[int] = ()) -> list[GpuPoint]:
    """Predicts a model at these context lengths (none: see `Target.lengths`)."""
    return [_point(target.whole, gpu, context) for context in target.lengths(contexts)]


def _point(decoder: DecoderShape, gpu: Gpu, context: int) -> GpuPoint:
    token = list(kernels(decoder, context - 1, 1, head=True))
    read = sum(kernel.bytes for kernel in token)
    begins = range(0, context, CHUNK)
    prompt = sum(
        kernel.seconds(gpu)
        for begin in begins
        for kernel in kernels(decoder, begin, min(CHUNK, context - begin), head=begin == begins[-1])
    )
    return GpuPoint(context, prompt, 1 / sum(kernel.seconds(gpu) for kernel in token), gpu.read / read, read)
