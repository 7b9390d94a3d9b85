# SPDX-License-Identifier: Apache-2.0
"""The run-time sequence of decode layers (designs/decode_layer.py): what is moved when, and what waits for what."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.attention import MOVING, Cache, sweep
from flownpu.aie.designs.common import TILES, Window, bits, ceil_div, equal_steps, limits_of, run
from flownpu.aie.designs.decode_layer_shape import BLOCK_ROWS
from flownpu.aie.designs.decode_layer_weights import WeightStreams
from flownpu.aie.iron_compat import TensorAccessPattern

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.aie.designs.attention import Sweep
    from flownpu.aie.designs.decode_layer_array import DecodeArray
    from flownpu.aie.designs.decode_layer_call import HostBuffers, Layer, Token
    from flownpu.aie.designs.decode_layer_shape import LayerShape, Projection
    from flownpu.aie.iron_compat import ObjectFifoHandle

__all__ = ["LayerSequence"]

_LIMITS = limits_of("npu2")


class LayerSequence:
    """Writes the steps of layers and of an LM head, in order."""

    def __init__(
        self,
        shape: LayerShape,
        array: DecodeArray,
        buffers: HostBuffers,
        token: Token,
        layers: Sequence[Layer],
        head: Projection | None,
    ) -> None:
        self._shape, self._array, self._ends, self._buffers = shape, array, array.ends, buffers
        self._token, self._layers, self._head = token, layers, head
        self._windows: defaultdict[ObjectFifoHandle, Window] = defaultdict(Window)
        self._weights = WeightStreams(array.ends.weights)
        self._plan_streams()
        # The vectors of all layers, then the norms of one more entry.
        self._vectors = len(layers) * shape.vector_size + (shape.entry_norms * shape.line if head else 0)
        self._phase = -1

    def write(self) -> None:
        """All of it."""
        self._weights.start(self._phase)
        update = list[Any]()
        for index, layer in enumerate(self._layers):
            update = self._layer(index, layer, update)
        if self._head is not None:
            update = self._logits(self._head, update)
        self._await(update)
        self._weights.finish()
        for window in self._windows.values():
            window.finish()

    def _plan_streams(self) -> None:
        """What the weights' streams carry, phase by phase."""
        phases = [*self._shape.projections * len(self._layers), *([self._head] if self._head else [])]
        total, offset = sum(projection.bytes for projection in phases), 0
        for phase, projection in enumerate(phases):
            self._weights.add(phase, projection, self._buffers.weights, offset, total)
            offset += projection.bytes

    # --- Layers -------------------------------------------------------------------------------------------------------

    def _layer(self, index: int, layer: Layer, update: list[Any]) -> list[Any]:
        """One layer; `update`: the drains of what the one before leaves. Returns its own."""
        shape, ends = self._shape, self._ends
        qkv, output, gate_up, down = shape.projections
        self._send_residual(index)
        self._await(update)
        self._start_layer(layer)
        self._send_region(ends.vectors, "update")
        self._send_tables(index, layer)
        self._await(self._project(qkv, "qkv"))

        self._append_to_cache(index)
        self._await(self._attend(index, layer))

        self._send_region(ends.vectors, "context")
        norms = shape.entry_norms * shape.line
        attended = self._project(output, "attended")
        self._send(ends.vectors, self._buffers.vectors, run(self._vectors, index * shape.vector_size + norms, norms))
        hidden = [self._drain(ends.hidden, self._buffers.state, self._region("hidden"))]
        self._await(attended)

        self._send_region(ends.vectors, "attended")
        self._await(self._project(gate_up, "activated"))

        self._send_region(ends.vectors, "activated")
        update = self._project(down, "update")
        self._await(hidden)
        return update

    def _logits(self, head: Projection, update: list[Any]) -> list[Any]:
        """The LM head: the first half of what the residual tile and the projecting tiles do for a layer."""
        self._send_residual(len(self._layers))
        self._await(update)
        self._start_projecting([head], [0, 0, 0])
        self._send_region(self._ends.vectors, "update")
        return self._project(head, None)

    def _send_residual(self, index: int) -> None:
        """What an entry needs but for the update, which may not be there yet."""
        norms = self._shape.entry_norms * self._shape.line
        self._send_region(self._ends.vectors, "hidden")
        self._send(
            self._ends.vectors, self._buffers.vectors, run(self._vectors, index * self._shape.vector_size, norms)
        )

    # --- Run-time parameters ------------------------------------------------------------------------------------------

    def _start_layer(self, layer: Layer) -> None:
        shape, attending = self._shape, self._array.attending
        attending.write(0, [bits(self._token.epsilon)])
        words = self._sweep(layer).words(self._token.position, 1)
        for pair in range(shape.pairs):
            attending.write(1 + 2 * pair, words, moving=MOVING)
            attending.write(2 + 2 * pair, words[:1], moving=1)
        lines = [shape.lines(shape.heads * shape.d), 1, shape.lines(shape.feed_forward)]
        self._start_projecting(shape.projections, lines)
        attending.start()

    def _start_projecting(self, phases: Sequence[Projection], lines: list[int]) -> None:
        projecting, columns = self._array.projecting, self._shape.columns
        for tile in range(columns * TILES):
            words = [len(phases)]
            for phase in phases:
                groups = len(phase.row_groups(tile // TILES, columns))
                words += [phase.blocks, 0 if phase.gated else groups, groups if phase.gated else 0]
            projecting.write(tile, words)
        projecting.write(columns * TILES, [bits(self._token.epsilon), *lines])
        projecting.start()

    def _sweep(self, layer: Layer) -> Sweep:
        token = self._token
        total = token.position + 1
        return sweep(token.position, 1, total, self._shape.keys, window=layer.window, causal=True, scale=token.scale)

    # --- Phases -------------------------------------------------------------------------------------------------------

    def _project(self, projection: Projection, region: str | None) -> list[Any]:
        """Start a projection, whose x is on its way, into a region of the state, or the logits. Returns the drains."""
        self._phase += 1
        buffer, size, place = self._buffers.logits, projection.rows, 0
        if region is not None:
            buffer, size, place = self._buffers.state, self._shape.state_size, self._shape.regions[region].offset
        drains = []
        for column, end in enumerate(self._ends.products):
            groups = [first * BLOCK_ROWS for first in projection.row_groups(column, self._shape.columns)]
            step, width = self._shape.columns * TILES * BLOCK_ROWS, TILES * BLOCK_ROWS
            # The number of row groups is a dimension without a wrap register.
            for start, count in equal_steps(groups, step, len(groups)):
                tap = TensorAccessPattern([size], place + start, [count, width], [step, 1])
                drains.append(self._drain(end, buffer, tap))
        self._weights.start(self._phase)
        return drains

    def _send_tables(self, index: int, layer: Layer) -> None:
        """The norms of queries and keys, and the position's angles."""
        shape, token = self._shape, self._token
        if shape.qk_norm:
            first = (index + 1) * shape.vector_size - 2 * shape.d
            self._send(self._ends.tables, self._buffers.vectors, run(self._vectors, first, 2 * shape.d))
        angles = (layer.table * token.positions + token.position) * shape.d
        self._send(
            self._ends.tables, self._buffers.rotary, run(token.tables * token.positions * shape.d, angles, shape.d)
        )

    def _append_to_cache(self, index: int) -> None:
        """Queries and keys through the RoPE tile, values through a memory tile; keys and values into the cache."""
        shape, state, region = self._shape, self._buffers.state, self._shape.regions["qkv"]
        d, pairs, group = shape.d, shape.pairs, shape.group
        # Queries: KV head of the pair, query head of the group, pair, d.
        sizes, strides = [shape.turns, group, pairs, d], [pairs * group * d, d, group * d, 1]
        self._send(self._ends.heads, state, TensorAccessPattern([shape.state_size], region.offset, sizes, strides))
        first, size = region.offset + shape.heads * d, shape.kv_heads * d
        for end, offset in ((self._ends.heads, first), (self._ends.value, first + size)):
            self._send(end, state, run(shape.state_size, offset, size))
        position = (index * self._token.capacity + self._token.position) * shape.position_size
        lines = [
            self._drain(end, self._buffers.cache, self._in_cache(position + value * d, [shape.kv_heads, d], [2 * d, 1]))
            for value, end in enumerate((self._ends.key, self._ends.value_line))
        ]
        self._await(lines)

    def _attend(self, index: int, layer: Layer) -> list[Any]:
        """Start attention. Returns the drains of its output."""
        shape, part, region = self._shape, self._sweep(layer), self._shape.regions["context"]
        columns, line, most = len(self._ends.keys), shape.group * shape.d, _LIMITS.iteration_maximum
        pairs = shape.pairs // columns
        contexts = [
            self._drain(
                end,
                self._buffers.state,
                TensorAccessPattern(
                    [shape.state_size],
                    region.offset + column * pairs * line,
                    [shape.turns, pairs * line],
                    [shape.pairs * line, 1],
                ),
            )
            for column, end in enumerate(self._ends.contexts)
        ]
        positions = len(self._layers) * self._token.capacity
        cache = Cache(positions, shape.kv_heads, shape.d, shape.keys)
        here = replace(part, first_key=index * self._token.capacity + part.first_key)
        for turn in range(shape.turns):
            taps = [
                (end, cache.chunks(here, 2 * (turn * shape.pairs + column * pairs) + value, pairs, 2, most))
                for value, ends in enumerate((self._ends.keys, self._ends.values))
                for column, end in enumerate(ends)
            ]
            # Keys and values in turn: a key's task may be waited for only where the values it needs are on their way.
            for place in range(ceil_div(part.chunks, most)):
                for end, of_end in taps:
                    self._send(end, self._buffers.cache, of_end[place])
        return contexts

    # --- Transfers ----------------------------------------------------------------------------------------------------

    def _region(self, name: str) -> TensorAccessPattern:
        region = self._shape.regions[name]
        return run(self._shape.state_size, region.offset, region.size)

    def _in_cache(self, offset: int, sizes: list[int], strides: list[int]) -> TensorAccessPattern:
        total = len(self._layers) * self._token.capacity * self._shape.position_size
        return TensorAccessPattern([total], offset, sizes, strides)

    def _send_region(self, end: ObjectFifoHandle, name: str) -> None:
        self._send(end, self._buffers.state, self._region(name))

    def _send(self, end: ObjectFifoHandle, buffer: Any, tap: TensorAccessPattern) -> None:
        """Start a fill; the stream's oldest is awaited before a fifth, and is over by then (see decode_layer.py)."""
        self._windows[end].add(end.fill, buffer, tap)

    def _drain(self, end: ObjectFifoHandle, buffer: Any, tap: TensorAccessPattern) -> Any:
        return end.drain(buffer, tap=tap, wait=True, managed=False)

    def _await(self, tasks: list[Any]) -> None:
        for task in tasks:
            task.await_()
