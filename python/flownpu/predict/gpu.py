# SPDX-License-Identifier: Apache-2.0
"""What a GPU would do with a decoder if its kernels (ops/gpu/decoder/) went as fast as memory and arithmetic permit.

Everything here is **predicted**, and nothing of it was compared with a GPU: a kernel takes as long as the slower of the
bytes that it has to move and the operations that it does, and a gap before the next one. It is a bound: real kernels
are slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flownpu.aie.programs.decoder_shape import DecoderShape
    from flownpu.predict.target import Target

__all__ = ["CHUNK", "GPUS", "Gpu", "GpuPoint", "Kernel", "kernels", "predict_gpu"]

# Tokens of a prompt that are computed at once: ForwardPass::kMostTokens (ops/gpu/decoder/forward_pass.h).
CHUNK = 256
# Bytes of a weight in narrow Q4NX blocks: 5120 for 32 x 256.
_WEIGHT = 5120 / (32 * 256)
_FLOAT, _CACHE = 4, 2  # bytes of activations, and of a key's or value's element in float16 or bfloat16
# int8 activations have a scale and a sum for each 32.
_ROUNDED = 1 + 2 * _FLOAT / 32


@dataclass(frozen=True)
class Gpu:
    """A GPU of a processor, which shares its memory.

    Attributes:
        name: what `flownpu predict --device` calls it.
        description: what it is.
        lanes: additions or multiplications that begin in a cycle, in float.
        clock: cycles a second, at most.
        memory: bytes a second between it and main memory, as its channels have them.
    """

    name: str
    description: str
    lanes: int
    clock: float
    memory: float

    # A 780M was seen to read 73 GB/s of the 89.6 that its channels have (DDR5-5600); taken for all.
    READ_SHARE = 73 / 89.6
    # Seconds between the end of a kernel and the begin of the next one that reads what it wrote: assumed.
    GAP = 5e-6

    @property
    def read(self) -> float:
        """Bytes a second that kernels read."""
        return self.memory * self.READ_SHARE

    @property
    def floats(self) -> float:
        """Float operations a second: a lane multiplies and adds, once in a cycle."""
        return 2 * self.lanes * self.clock

    @property
    def dots(self) -> float:
        """Operations a second of dots of four 8-bit integers: a lane does one in a cycle."""
        return 8 * self.lanes * self.clock


# Compute units of 64 lanes, and boost clocks, as AMD's product pages have them.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("radeon-780m", "Radeon 780M (RDNA 3, 12 compute units), two channels of DDR5-5600", 12 * 64, 2.7e9, 89.6e9),
        Gpu("radeon-890m", "Radeon 890M (RDNA 3.5, 16 compute units), LPDDR5X-7500", 16 * 64, 2.9e9, 120e9),
    )
}


@dataclass(frozen=True)
class Kernel:
    """One launch: bytes that it moves, operations in float, and of dots of integers."""

    name: str
    bytes: float
    floats: float = 0
    dots: float = 0

    def seconds(self, gpu: Gpu) -> float:
        """The slower of memory and arithmetic, and a gap."""
        return max(self.bytes / gpu.read, self.floats / gpu.floats + self.dots / gpu.dots) + gpu.GAP


@dataclass(frozen=True)
class GpuPoint:
    """A length of the context, or of the prompt.

    Attributes:
        context: tokens.
        ttft_seconds: of a prompt of so many.
        decode_tokens_per_second: after so many.
        roof: tokens a second if nothing but reading main memory took time.
        read_bytes: of a token.
    """

    context: int
    ttft_seconds: float
    decode_tokens_per_second: float
    roof: float
    read_bytes: float

    @property
    def prefill_tokens_per_second(self) -> float:
        """Speed of reading the prompt."""
        return self.context / self.ttft_seconds


def kernels(decoder: DecoderShape, past: int, tokens: int, *, head: bool) -> Iterator[Kernel]:
    """The launches of some tokens behind others, in their order; those that are alike are one object.

    Args:
        decoder: its sizes.
        past: tokens before.
        tokens: of one chunk.
        head: whether the LM head follows, for the last of them.
    """
    shape, attention = decoder.shape, decoder.shape.heads * decoder.shape.d
    packed = (shape.heads + 2 * shape.kv_heads) * shape.d
    norm = Kernel("norm", 4 * tokens * shape.hidden * _FLOAT, floats=8 * tokens * shape.hidden)
    append = Kernel("append", tokens * packed * (_FLOAT + _CACHE), floats=12 * tokens * packed)
    before = [*_product("QKV", packed, shape.hidden, tokens), append]
    behind = [
        *_product("output", shape.hidden, attention, tokens),
        norm,
        *_product("gate and up", 2 * decoder.feed_forward, shape.hidden, tokens, decoder.feed_forward),
        *_product("down", shape.hidden, decoder.feed_forward, tokens),
        norm,
    ]
    attend = {window: _attention(decoder, window, past, tokens) for window in set(decoder.windows)}
    yield norm
    for window in decoder.windows:
        yield from (*before, attend[window], *behind)
    if head:
        yield from _product("LM head", decoder.vocabulary, shape.hidden, 1)


def _product(name: str, rows: int, columns: int, tokens: int, written: int = 0) -> Iterator[Kernel]:
    """One row is multiplied as it is, in float: dequantised, multiplied, added. More are rounded first.

    `written`: results of a row, if a gate makes them fewer.
    """
    weight, results = rows * columns * _WEIGHT, tokens * (written or rows) * _FLOAT
    if tokens == 1:
        yield Kernel(name, weight + columns * _FLOAT + results, floats=4 * rows * columns)
        return
    yield Kernel(f"{name}: rounding", tokens * columns * (_FLOAT + _ROUNDED), floats=6 * tokens * columns)
    # Four more operations in float for each group of 32.
    work = tokens * rows * columns
    yield Kernel(name, weight + tokens * columns * _ROUNDED + results, floats=4 * work / 32, dots=2 * work)


def _attention(decoder: DecoderShape, window: int, past: int, tokens: int) -> Kernel:
    """Keys and values are read once for the heads that share them; by a chunk's tokens out of the cache of the GPU."""
    shape = decoder.shape
    keys = [min(past + token + 1, window or past + token + 1) for token in range(tokens)]
    seen = min(past + tokens, (window or past + tokens) + tokens - 1)
    width = shape.heads * shape.d
    moved = 2 * seen * shape.kv_heads * shape.d * _CACHE + 2 * tokens * width * _FLOAT
    return Kernel("attention", moved, floats=4 * sum(keys) * width)


def predict_gpu(target: Target, gpu: Gpu, contexts: Sequence[int] = ()) -> list[GpuPoint]:
    """Predicts a model at these `Target.lengths`."""
    return [_point(target.decoder, gpu, context) for context in target.lengths(contexts)]


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
