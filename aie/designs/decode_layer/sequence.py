# SPDX-License-Identifier: Apache-2.0
"""The run-time sequence of decode layers (design.py): what is moved when, and what waits for what."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.attention import MOVING, sweep
from flownpu.aie.designs.common import BLOCK_ROWS, TILES, Window, bits, equal_steps, run
from flownpu.aie.designs.decode_layer.array import phase_words
from flownpu.aie.designs.decode_layer.weights import WeightStreams
from flownpu.aie.iron.compat import TensorAccessPattern

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flownpu.aie.designs.attention import Sweep
    from flownpu.aie.designs.decode_layer.array import DecodeArray
    from flownpu.aie.designs.decode_layer.attention import Attention
    from flownpu.aie.designs.decode_layer.call import HostBuffers, Layer, Token
    from flownpu.aie.designs.decode_layer.shape import Projection, Region
    from flownpu.aie.iron.compat import ObjectFifoHandle

__all__ = ["LayerSequence"]


class LayerSequence:
    """Writes the steps of layers and of an LM head, in order.

    Attributes:
        ends: the host's, of the array.
        regions: of the state, of `state_size` elements.
        weights: what the streams of weights carry.
        planned: phases of which they know.
    """

    def __init__(
        self,
        way: Attention,
        array: DecodeArray,
        buffers: HostBuffers,
        token: Token,
        layers: Sequence[Layer],
        head: Projection | None,
    ) -> None:
        self._way, self._shape, self._array, self._head = way, way.shape, array, head
        self.ends, self.buffers, self.token, self.layers = array.ends, buffers, token, layers
        self.regions: Mapping[str, Region] = self._shape.regions(way.regions)
        self.state_size = sum(region.size for region in self.regions.values())
        self._windows: defaultdict[ObjectFifoHandle, Window] = defaultdict(Window)
        self.weights, self.planned, self._phase = WeightStreams(array.ends.weights), 0, -1
        self._told: Sweep | None = None  # what the tiles that attend were told last
        self._plan_streams()
        # The vectors of all layers, then the norms of one more entry.
        self._vectors = len(layers) * self._shape.vector_size + (
            self._shape.entry_norms * self._shape.line if head else 0
        )

    def write(self) -> None:
        """All of it."""
        self.weights.start(self._phase)
        update = list[Any]()
        for index, layer in enumerate(self.layers):
            update = self._layer(index, layer, update)
        if self._head is not None:
            update = self._logits(self._head, update)
        self.wait(update)
        self.weights.finish()
        for window in self._windows.values():
            window.finish()

    def _plan_streams(self) -> None:
        """What the weights' streams carry, phase by phase."""
        shape, count = self._shape, len(self.layers)
        total = count * shape.weight_bytes + (self._head.bytes if self._head else 0)
        offset = 0

        def project(projection: Projection) -> None:
            nonlocal offset
            self.weights.add(self.planned, projection, self.buffers.weights, offset, total)
            self.planned, offset = self.planned + 1, offset + projection.bytes

        for index in range(count):
            qkv, *others = shape.projections
            project(qkv)
            self._way.plan(self, index)
            for projection in others:
                project(projection)
        if self._head is not None:
            project(self._head)

    # --- Layers -------------------------------------------------------------------------------------------------------

    def _layer(self, index: int, layer: Layer, update: list[Any]) -> list[Any]:
        """One layer; `update`: the drains of what the one before leaves. Returns its own."""
        shape, ends = self._shape, self.ends
        qkv, output, gate_up, down = shape.projections
        self._send_residual(index)
        self.wait(update)
        self._start_layer(index)
        self.send_region(ends.vectors, "update")
        self._send_tables(index, layer)
        self.wait(self._project(qkv, "qkv"))

        self._append_to_cache(index)
        self.wait(self._way.attend(self, index))

        self.send_region(ends.vectors, "context")
        norms = shape.entry_norms * shape.line
        attended = self._project(output, "attended")
        self.send(ends.vectors, self.buffers.vectors, run(self._vectors, index * shape.vector_size + norms, norms))
        hidden = [self.drain(ends.hidden, self.buffers.state, self._region("hidden"))]
        self.wait(attended)

        self.send_region(ends.vectors, "attended")
        # The residual stream leaves its tile before the x of this projection does.
        self.wait(self._project(gate_up, "activated") + hidden)

        self.send_region(ends.vectors, "activated")
        return self._project(down, "update")

    def _logits(self, head: Projection, update: list[Any]) -> list[Any]:
        """The LM head: the first half of what the residual tile and the projecting tiles do for a layer."""
        self._send_residual(len(self.layers))
        self.wait(update)
        self._start_projecting([head], [0, 0, 0], None)
        self.send_region(self.ends.vectors, "update")
        return self._project(head, None)

    def _send_residual(self, index: int) -> None:
        """What an entry needs but for the update, which may not be there yet."""
        norms = self._shape.entry_norms * self._shape.line
        self.send_region(self.ends.vectors, "hidden")
        self.send(self.ends.vectors, self.buffers.vectors, run(self._vectors, index * self._shape.vector_size, norms))

    # --- Run-time parameters ------------------------------------------------------------------------------------------

    def _start_layer(self, index: int) -> None:
        shape, attending = self._shape, self._array.attending
        attending.write(0, [bits(self.token.epsilon)])
        lines = [self._way.context_lines, 1, shape.lines(shape.feed_forward)]
        self._start_projecting(shape.projections, lines, self.sweep(index))
        attending.start()

    def _start_projecting(self, phases: Sequence[Projection], lines: list[int], part: Sweep | None) -> None:
        projecting, columns = self._array.projecting, self._way.columns
        # A layer that sees what the one before it saw is told nothing new, at any position.
        moving = 0 if part is not None and part == self._told else MOVING
        self._told = part
        for number, words in enumerate(self._way.words(self.token, part)):
            self._array.attending.write(1 + number, words, moving=moving)
        rows = [phase.column_rows(columns) for phase in phases]
        for tile in range(columns * TILES):
            words = [len(phases)]
            column, row = divmod(tile, TILES)
            for phase, of_columns in zip(phases, rows, strict=True):
                words += phase_words(phase, of_columns[column], row)
            projecting.write(tile, words)
        projecting.write(columns * TILES, [bits(self.token.epsilon), *lines])
        projecting.start()

    def sweep(self, index: int) -> Sweep:
        """What a layer of the call reads of its cache."""
        token, window = self.token, self.layers[index].window
        total = token.position + 1
        return sweep(token.position, 1, total, self._way.keys, window=window, causal=True, scale=token.scale)

    # --- Phases -------------------------------------------------------------------------------------------------------

    def _project(self, projection: Projection, region: str | None) -> list[Any]:
        """Start a projection, whose x is on its way, into a region of the state, or the logits. Returns the drains."""
        self._phase += 1
        buffer, size, place = self.buffers.logits, projection.rows, 0
        if region is not None:
            buffer, size, place = self.buffers.state, self.state_size, self.regions[region].offset
        drains, of_columns = [], projection.column_rows(self._way.columns)
        for column, end in enumerate(self.ends.products):
            rows = of_columns[column]
            groups = [first * BLOCK_ROWS for first in rows.groups]
            width = TILES * BLOCK_ROWS
            if rows.shared:
                # The first of a column's tiles has the sum, the others have nothing to say: what they give lies where
                # the next rows will be, which come later on this stream.
                offset = place + rows.first * BLOCK_ROWS
                tap = TensorAccessPattern([size], offset, [rows.shared, width], [BLOCK_ROWS, 1])
                drains.append(self.drain(end, buffer, tap))
            # The number of row groups is a dimension without a wrap register.
            for start, count in equal_steps(groups, width, len(groups)):
                tap = TensorAccessPattern([size], place + start, [count, width], [width, 1])
                drains.append(self.drain(end, buffer, tap))
        self.weights.start(self._phase)
        return drains

    def _send_tables(self, index: int, layer: Layer) -> None:
        """The norms of queries and keys, and the position's angles, each as often as fills a batch of heads."""
        shape, token, d = self._shape, self.token, self._shape.d
        rows = token.tables * token.positions
        tables = [(self.buffers.rotary, rows * d, (layer.table * token.positions + token.position) * d)]
        if shape.qk_norm:
            end = (index + 1) * shape.vector_size
            tables[:0] = [(self.buffers.vectors, self._vectors, end - before * d) for before in (2, 1)]
        for buffer, size, first in tables:
            self.send(self.ends.heads, buffer, TensorAccessPattern([size], first, [shape.batch, d], [0, 1]))

    def _append_to_cache(self, index: int) -> None:
        """Queries, keys and values through the RoPE tile; keys, then values, into the cache."""
        shape, d = self._shape, self._shape.d
        drains = self._way.send_heads(self)
        position = (index * self.token.capacity + self.token.position) * shape.position_size
        total = len(self.layers) * self.token.capacity * shape.position_size
        for value in range(2):
            tap = TensorAccessPattern([total], position + value * d, [shape.kv_heads, d], [2 * d, 1])
            drains.append(self.drain(self.ends.key_value, self.buffers.cache, tap))
        self.wait(drains)

    # --- Transfers ----------------------------------------------------------------------------------------------------

    def start_phase(self) -> None:
        """The next phase, whose x is on its way, has its weights, or its keys."""
        self._phase += 1
        self.weights.start(self._phase)

    def in_state(self, offset: int, sizes: list[int], strides: list[int]) -> TensorAccessPattern:
        """A walk over the state."""
        return TensorAccessPattern([self.state_size], offset, sizes, strides)

    def _region(self, name: str) -> TensorAccessPattern:
        region = self.regions[name]
        return run(self.state_size, region.offset, region.size)

    def send_region(self, end: ObjectFifoHandle, name: str) -> None:
        """Start the fill of a region of the state."""
        self.send(end, self.buffers.state, self._region(name))

    def send(self, end: ObjectFifoHandle, buffer: Any, tap: TensorAccessPattern) -> None:
        """Start a fill; the stream's oldest is awaited before a fifth, and is over by then (see design.py)."""
        self._windows[end].add(end.fill, buffer, tap)

    def drain(self, end: ObjectFifoHandle, buffer: Any, tap: TensorAccessPattern) -> Any:
        """Start a drain, which is to be awaited."""
        return end.drain(buffer, tap=tap, wait=True, managed=False)

    def wait(self, tasks: list[Any]) -> None:
        """Await all of them."""
        for task in tasks:
            task.await_()
