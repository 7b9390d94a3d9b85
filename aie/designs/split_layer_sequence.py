# SPDX-License-Identifier: Apache-2.0
"""The run-time sequence of split decode layers (designs/split_layer.py): where it differs from a decode layer's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.attention import MOVING
from flownpu.aie.designs.common import TILES, bits, ceil_div, limits_of, run
from flownpu.aie.designs.decode_layer_sequence import LayerSequence
from flownpu.aie.designs.split_layer_shape import COLUMNS, PART, PARTIAL_LINE, STREAMS
from flownpu.aie.iron_compat import TensorAccessPattern

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.aie.designs.attention import Sweep
    from flownpu.aie.designs.decode_layer_array import DecodeArray
    from flownpu.aie.designs.decode_layer_call import HostBuffers, Layer, Token
    from flownpu.aie.designs.decode_layer_shape import Projection
    from flownpu.aie.designs.split_layer_shape import SplitShape

__all__ = ["SplitSequence"]

_LIMITS = limits_of("npu2")
_CELL, _LINE = TILES * PART, PARTIAL_LINE  # elements of a part from a column's tiles, and from all


class SplitSequence(LayerSequence):
    """Writes the steps of layers and of an LM head, in order."""

    def __init__(
        self,
        shape: SplitShape,
        array: DecodeArray,
        buffers: HostBuffers,
        cache_bytes: Any,
        token: Token,
        layers: Sequence[Layer],
        head: Projection | None,
    ) -> None:
        self._split, self._cache_bytes = shape, cache_bytes
        self._shares: list[list[int]] = []
        super().__init__(shape, array, buffers, token, layers, head)

    def _plan_streams(self) -> None:
        """Weights, and after the first projection of each layer its keys and values."""
        layers, head = self._layers, self._head
        total = len(layers) * self._split.weight_bytes + (head.bytes if head else 0)
        phase = offset = 0

        def project(projection: Projection) -> None:
            nonlocal phase, offset
            self._weights.add(phase, projection, self._buffers.weights, offset, total)
            phase, offset = phase + 1, offset + projection.bytes

        for index, layer in enumerate(layers):
            qkv, *others = self._split.projections
            project(qkv)
            # The stream that has the newest position waits until it was written.
            newest = (self._sweep(layer).chunks - 1) % STREAMS
            self._weights.streams[newest].not_ahead.add(phase)
            for number, stream in enumerate(self._weights.streams):
                stream.waiting += [(phase, self._cache_bytes, tap) for tap in self._key_taps(index, layer, number)]
            phase += 1
            for projection in others:
                project(projection)
        if head:
            project(head)

    # --- Keys ---------------------------------------------------------------------------------------------------------

    def _objects(self, part: Sweep, stream: int) -> int:
        """Objects for each of a stream's tiles, of each KV head: every twelfth from its own on."""
        return max(0, ceil_div(part.chunks - stream, STREAMS))

    def _key_taps(self, index: int, layer: Layer, stream: int) -> list[TensorAccessPattern]:
        """A layer's keys and values for a stream: object x keys, values x positions of both tiles x bytes of d."""
        shape, part = self._split, self._sweep(layer)
        line, run_bytes, step = 2 * shape.position_size, 2 * shape.d, shape.round
        total = len(self._layers) * self._token.capacity * line
        first = index * self._token.capacity + part.first_key + stream * shape.keys
        objects, most = self._objects(part, stream), _LIMITS.iteration_maximum
        return [
            TensorAccessPattern(
                [total],
                (first + start * step) * line + turn * 2 * run_bytes,
                [min(most, objects - start), 2, shape.keys, run_bytes],
                [step * line, run_bytes, line, 1],
            )
            for turn in range(shape.turns)
            for start in range(0, objects, most)
        ]

    # --- Run-time parameters ------------------------------------------------------------------------------------------

    def _start_layer(self, layer: Layer) -> None:
        shape, part, attending = self._split, self._sweep(layer), self._array.attending
        attending.write(0, [bits(self._token.epsilon)])
        words = part.words(self._token.position, 1)
        queries = ceil_div(shape.heads * shape.d, shape.line) * (shape.line // 256)
        self._shares = []
        for tile in range(COLUMNS * TILES):
            stream, place = divmod(tile, TILES * COLUMNS // STREAMS)
            first = part.first_key + stream * shape.keys + place * shape.keys_of_object
            here = [self._objects(part, stream), words[1], first, *words[3:8]]
            self._shares.append([*here, shape.round, queries, shape.turns])
        heads = shape.lines(shape.heads * shape.d)
        self._start_projecting(shape.projections, [2 * heads, 1, shape.lines(shape.feed_forward)])
        attending.start()

    def _start_projecting(self, phases: Sequence[Projection], lines: list[int]) -> None:
        for tile in range(COLUMNS * TILES):
            words = self._shares[tile] if len(phases) > 1 else [0] * 11
            self._array.attending.write(1 + tile, words, moving=MOVING)
        super()._start_projecting(phases, lines)

    # --- Phases -------------------------------------------------------------------------------------------------------

    def _append_to_cache(self, index: int) -> None:
        """Queries and keys through the RoPE tile, values through a memory tile; keys and values into the cache."""
        shape, state, region = self._split, self._buffers.state, self._shape.regions["qkv"]
        queries, size = shape.heads * shape.d, shape.kv_heads * shape.d
        self._send(self._ends.heads, state, run(shape.state_size, region.offset, queries + size))
        self._send(self._ends.value, state, run(shape.state_size, region.offset + queries + size, size))
        (queries_end,) = self._ends.contexts
        drains = [self._drain(queries_end, state, run(shape.state_size, shape.regions["queries"].offset, queries))]
        position = (index * self._token.capacity + self._token.position) * shape.position_size
        drains += [
            self._drain(
                end,
                self._buffers.cache,
                self._in_cache(position + value * shape.d, [shape.kv_heads, shape.d], [2 * shape.d, 1]),
            )
            for value, end in enumerate((self._ends.key, self._ends.value_line))
        ]
        self._await(drains)

    def _attend(self, index: int, layer: Layer) -> list[Any]:  # noqa: ARG002 the taps are known from the start
        """All tiles attend to their shares, then one puts them together. Returns the drain of the context."""
        shape, state, region = self._split, self._buffers.state, self._shape.regions["partial"]
        self._send_region(self._ends.vectors, "queries")
        self._phase += 1
        partial = [
            self._drain(end, state, self._in_state(region.offset + column * _CELL, [shape.parts, _CELL], [_LINE, 1]))
            for column, end in enumerate(self._ends.products)
        ]
        self._weights.start(self._phase)
        self._await(partial)

        (context_end,) = self._ends.contexts
        context = self._drain(
            context_end, state, run(shape.state_size, shape.regions["context"].offset, shape.heads * shape.d)
        )
        parts = shape.d // PART
        outputs = shape.heads * parts * _LINE
        self._send(self._ends.tables, state, run(shape.state_size, region.offset + outputs, shape.kv_heads * _LINE))
        sizes, strides = [shape.heads, _LINE // PART, parts, PART], [parts * _LINE, PART, _LINE, 1]
        self._send(self._ends.heads, state, self._in_state(region.offset, sizes, strides))
        return [context]

    def _in_state(self, offset: int, sizes: list[int], strides: list[int]) -> TensorAccessPattern:
        return TensorAccessPattern([self._split.state_size], offset, sizes, strides)
