# SPDX-License-Identifier: Apache-2.0
"""The run-time sequence of decode layers (design.py): the order of transfers and waits."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.attention import MOVING, sweep
from flownpu.aie.designs.common import BLOCK_COLUMNS, BLOCK_ROWS, TILES, Window, bits, run
from flownpu.aie.designs.decode_layer.array import projecting_words
from flownpu.aie.designs.decode_layer.call import AFTER_STATE, BEFORE_STATE
from flownpu.aie.designs.decode_layer.residual import residual_words
from flownpu.aie.designs.decode_layer.rows import NO_ROWS, STREAMS, Phase, deal_rows
from flownpu.aie.designs.decode_layer.shape import Projection
from flownpu.aie.designs.decode_layer.weights import WeightStreams
from flownpu.aie.iron.compat import TensorAccessPattern

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flownpu.aie.designs.attention import Sweep
    from flownpu.aie.designs.decode_layer.array import DecodeArray
    from flownpu.aie.designs.decode_layer.attention import Attention
    from flownpu.aie.designs.decode_layer.call import CalledLayer, HostBuffers, Token
    from flownpu.aie.designs.decode_layer.shape import Region
    from flownpu.aie.iron.compat import ObjectFifoHandle


class LayerSequence:
    """Writes the steps of layers and of an LM head, in order.

    Attributes:
        ends: the host's ends of the array's streams.
        buffers: the host buffers.
        token: the token that the call is for.
        layers: the call's layers.
        regions: the regions of `state`.
        state_size: elements of `state`.
        weights: what the streams of weights carry.
        planned: for how many phases they know what to carry.
        vectors_size: elements of `vectors`.
    """

    def __init__(
        self,
        way: Attention,
        array: DecodeArray,
        buffers: HostBuffers,
        token: Token,
        layers: Sequence[CalledLayer],
        head: Projection | None,
    ) -> None:
        self._way, self._shape, self._array, self._head = way, way.shape, array, head
        self.ends, self.buffers, self.token, self.layers = array.ends, buffers, token, layers
        self.regions: Mapping[str, Region] = self._shape.regions(way.regions)
        self.state_size = sum(region.size for region in self.regions.values())
        self._windows: defaultdict[ObjectFifoHandle, Window] = defaultdict(Window)
        self.weights, self.planned, self._phase = WeightStreams(array.ends.weights, way.span), 0, -1
        self._told: Sweep | None = None  # the sweep for which the attending tiles' words were last written
        self._alike = self._starts()
        # The phases of layers, by which of their weights have 8 bits, and the head's, if there is one.
        self._phases = {
            (bits, state): deal_rows(way.shape.own_projections(bits, keeps_state=state), way.columns, way.span)
            for bits, state in {(layer.eight_bits, layer.keeps_state) for layer in layers}
        }
        self._of_head = deal_rows([head] if head else [], way.columns, way.span)
        self._plan_streams()
        # The vectors of all layers, then the norms of one more entry.
        self.vectors_size = len(layers) * self._shape.vector_size + (
            self._shape.entry_norms * self._shape.line if head else 0
        )

    def write(self) -> None:
        """Write all steps."""
        self.weights.start(self._phase)
        update = list[Any]()
        for index, layer in enumerate(self.layers):
            if layer.part == AFTER_STATE:
                update = self._after_state(index, layer)
            elif layer.part == BEFORE_STATE:
                update = self._before_state(index, layer, update)
            else:
                update = self._layer(index, layer, update)
        if self._head is not None:
            update = self._logits(update)
        self.wait(update)
        self.finish()

    def finish(self) -> None:
        """Await the transfers that are left."""
        self.weights.finish()
        for window in self._windows.values():
            window.finish()

    def _plan_streams(self) -> None:
        """Plan the weights' streams, phase by phase."""
        total = sum(phase.projection.bytes for layer in self.layers for phase in self._phases_of(layer))
        total += self._head.bytes if self._head else 0
        offset = 0

        def project(phase: Phase) -> None:
            nonlocal offset
            self.weights.add(self.planned, phase, self.buffers.weights, offset, total)
            self.planned, offset = self.planned + 1, offset + phase.projection.bytes

        for index, layer in enumerate(self.layers):
            phases = self._phases_of(layer)
            if not layer.part:
                project(phases.pop(0))
                self._way.plan(self, index)
            for phase in phases:
                project(phase)
        for phase in self._of_head:
            project(phase)

    # --- Layers -------------------------------------------------------------------------------------------------------

    def _layer(self, index: int, layer: CalledLayer, update: list[Any]) -> list[Any]:
        """One layer; `update`: the drains of the update of the layer before. Returns the drains of its own.

        The drains of a phase are started before its inputs are awaited, so that then only the inputs' fill is started.
        With experts the layer ends with the output projection, whose drains are returned.
        """
        qkv, output, *feed_forward = self._phases_of(layer)
        self._send_residual(index)
        heads = self._drain_products(qkv, "qkv")
        self._send_tables(index, layer)
        self.wait(update)
        self._start_layer(index)
        self.send_region(self.ends.vectors, "update")
        self.start_phase()
        contexts = self._way.drain_contexts(self)
        self.wait(heads)

        contexts += self._way.attend(self, index, self._append_to_cache(index))
        attended = self._drain_products(output, "attended")
        self.wait(contexts)

        self._send_context()
        self.start_phase()
        return self._feed_forward(index, feed_forward, attended)

    def _feed_forward(self, index: int, phases: Sequence[Phase], attended: list[Any]) -> list[Any]:
        """The feed-forward of a layer and the entry before it; `attended`: the drains of its output projection."""
        if not phases:
            return attended
        shape, ends, (gate_up, down) = self._shape, self.ends, phases
        norms = shape.entry_norms * shape.line
        self.send(ends.vectors, self.buffers.vectors, run(self.vectors_size, index * shape.vector_size + norms, norms))
        hidden = [self.drain(ends.hidden, self.buffers.state, self._region("hidden"))]
        activated = self._drain_products(gate_up, "activated")
        self.wait(attended)

        self.send_region(ends.vectors, "attended")
        self.start_phase()
        update = self._drain_products(down, "update")
        # The residual tile gives `hidden` before it deals the x of gate and up, so `hidden` is there as soon as the
        # activations.
        self.wait(activated + hidden)

        self.send_region(ends.vectors, "activated")
        self.start_phase()
        return update

    # --- Layers whose mixers the host computes ------------------------------------------------------------------------

    def _before_state(self, index: int, layer: CalledLayer, update: list[Any]) -> list[Any]:
        """The first projection, with whose products the call ends; returns their drains."""
        self._send_residual(index)
        mixed = self._drain_products(self._phases_of(layer)[0], "mixed")
        self.wait(update)
        self._start_part(layer, self._phases_of(layer))
        self.send_region(self.ends.vectors, "update")
        self.start_phase()
        return mixed

    def _after_state(self, index: int, layer: CalledLayer) -> list[Any]:
        """All from the output projection on, with which a call begins; returns the drains of the update.

        The residual tile makes the layer's first entry again, whose x tiles take without a projection. So it has the
        residual stream, whatever the array did in between.
        """
        shape, (output, *feed_forward) = self._shape, self._phases_of(layer)
        self._send_residual(index)
        attended = self._drain_products(output, "attended")
        only_x = Phase(Projection(output.projection.rows, shape.hidden), [NO_ROWS] * self._way.columns)
        self._start_part(layer, [only_x, output, *feed_forward])
        self.send_region(self.ends.vectors, "update")
        context = self.regions["context"]
        columns = shape.lines(shape.state_columns) * shape.line
        self.send(self.ends.vectors, self.buffers.state, run(self.state_size, context.offset, columns))
        self.start_phase()
        return self._feed_forward(index, feed_forward, attended)

    def _start_part(self, layer: CalledLayer, phases: Sequence[Phase]) -> None:
        self._tell(None)
        self._start_projecting(phases, residual_words(self._shape, layer, bits(self.token.epsilon)), 1)

    def _phases_of(self, layer: CalledLayer) -> list[Phase]:
        return list(layer.own(self._phases[layer.eight_bits, layer.keeps_state]))

    @property
    def caches(self) -> int:
        """How many of the call's layers have a cache."""
        return sum(not layer.part for layer in self.layers)

    def cache_of(self, index: int) -> int:
        """The number of a layer among those that have a cache."""
        return sum(not layer.part for layer in self.layers[:index])

    def _logits(self, update: list[Any]) -> list[Any]:
        """The LM head: the first half of what the residual tile and the projecting tiles do for a layer."""
        (head,) = self._of_head
        self._send_residual(len(self.layers))
        logits = self._drain_products(head, None)
        self.wait(update)
        self._tell(None)
        self._start_projecting(self._of_head, residual_words(self._shape, None, bits(self.token.epsilon)), 1)
        self.send_region(self.ends.vectors, "update")
        self.start_phase()
        return logits

    def _send_residual(self, index: int) -> None:
        """Send the inputs of an entry except the update, which may not be there yet."""
        norms = self._shape.entry_norms * self._shape.line
        self.send_region(self.ends.vectors, "hidden")
        first = index * self._shape.vector_size
        self.send(self.ends.vectors, self.buffers.vectors, run(self.vectors_size, first, norms))

    # --- Run-time parameters ------------------------------------------------------------------------------------------

    def _starts(self) -> list[int]:
        """By layer, how many layers the projecting tiles start with it: a run of equal ones with the first, else 0."""
        keys = (
            (self._way.start_key(self.sweep(i)), layer.eight_bits, layer.part) for i, layer in enumerate(self.layers)
        )
        runs = [len(list(alike)) for _, alike in groupby(keys)]
        return [layers for count in runs for layers in (count, *[0] * (count - 1))]

    def _start_layer(self, index: int) -> None:
        attending = self._array.attending
        attending.write(0, [bits(self.token.epsilon)])
        self._tell(self.sweep(index))
        if layers := self._alike[index]:
            layer = self.layers[index]
            words = residual_words(self._shape, layer, bits(self.token.epsilon))
            self._start_projecting(self._phases_of(layer), words, layers)
        attending.start()

    def _tell(self, part: Sweep | None) -> None:
        """Write attention's words. A layer with the previous layer's sweep needs no new ones, at any position."""
        moving = 0 if part is not None and part == self._told else MOVING
        before, self._told = self._told, part
        for number, (first, *others) in enumerate(self._way.words(self.token, part)):
            # A core reads the first word also if it attends to nothing.
            known = 0 if part is None and before is None else first
            self._array.attending.write(1 + number, [known, *others], moving=moving)

    def _start_projecting(self, phases: Sequence[Phase | None], of_residual: list[int], layers: int) -> None:
        projecting, columns = self._array.projecting, self._way.columns
        for tile in range(columns * TILES):
            projecting.write(tile, projecting_words(phases, tile // TILES, layers))
        projecting.write(columns * TILES, [*of_residual[:4], layers, *of_residual[4:]])
        projecting.start()

    def sweep(self, index: int) -> Sweep:
        """The part of its cache that a layer of the call reads."""
        token, window = self.token, self.layers[index].window
        total = token.position + 1
        return sweep(token.position, 1, total, self._way.keys, window=window, causal=True, scale=token.scale)

    # --- Phases -------------------------------------------------------------------------------------------------------

    def _drain_products(self, phase: Phase, region: str | None, first: int = 0) -> list[Any]:
        """Start the drains of a projection's products into a region of the state, from its element `first` on.

        None: into the logits.
        """
        buffer, size, place = self.buffers.logits, phase.projection.rows, 0
        if region is not None:
            buffer, size, place = self.buffers.state, self.state_size, self.regions[region].offset + first
        drains = []
        for column, (end, rows) in enumerate(zip(self.ends.products, phase.columns, strict=True)):
            if rows.shared and column % self._way.span == 0:
                # The span's first tile has the sum. The column's other stream sends an empty object to the place of the
                # next row, which is written later.
                sizes, strides = [rows.shared, STREAMS * BLOCK_ROWS], [BLOCK_ROWS, 1]
                tap = TensorAccessPattern([size], place + rows.first * BLOCK_ROWS, sizes, strides)
                drains.append(self.drain(end, buffer, tap))
            if rows.rows:
                sizes, strides = [rows.rows, STREAMS, BLOCK_ROWS], [BLOCK_ROWS, rows.rows * BLOCK_ROWS, 1]
                tap = TensorAccessPattern([size], place + rows.begin * BLOCK_ROWS, sizes, strides)
                drains.append(self.drain(end, buffer, tap))
        return drains

    def start_phase(self) -> None:
        """Go on to the next phase, whose x is on its way, and start all of its weights or keys."""
        self._phase += 1
        self.weights.start(self._phase)

    def _send_tables(self, index: int, layer: CalledLayer) -> None:
        """Send the norms of queries and keys, and the position's angles, each once for every head of a batch.

        A norm of all heads has weights of its own for each.
        """
        shape, token, d = self._shape, self.token, self._shape.d
        rows = token.tables * token.positions
        tables = [(self.buffers.rotary, rows * d, (layer.table * token.positions + token.position) * d)]
        end = (index + 1) * shape.vector_size
        if shape.norm_of_all_heads:
            first, (of_queries, of_keys) = end - sum(shape.qk_norm_sizes), shape.qk_norm_sizes
            for tap in (
                self._way.queries_in(self.vectors_size, first), run(self.vectors_size, first + of_queries, of_keys)
            ):  # fmt: skip
                self.send(self.ends.heads, self.buffers.vectors, tap)
        elif shape.qk_norm:
            tables[:0] = [(self.buffers.vectors, self.vectors_size, end - before * d) for before in (2, 1)]
        for buffer, size, first in tables:
            self.send(self.ends.heads, buffer, TensorAccessPattern([size], first, [shape.batch, d], [0, 1]))

    def _append_to_cache(self, index: int) -> list[Any]:
        """Send queries, keys and values through the RoPE tile; return the drains of keys and of values to the cache."""
        shape, d = self._shape, self._shape.d
        self._way.send_heads(self, index)
        drains = []
        heads, positions = shape.kv_heads, self.caches * self.token.capacity
        position = self.cache_of(index) * self.token.capacity + self.token.position
        for value in range(2):
            for end, buffer, row in zip(
                self.ends.key_value, (self.buffers.cache, self.buffers.int8_rows), (d, shape.row_bytes), strict=False
            ):
                size = heads * 2 * row
                tap = TensorAccessPattern([positions * size], position * size + value * row, [heads, row], [2 * row, 1])
                drains.append(self.drain(end, buffer, tap))
        return drains

    # --- Transfers ----------------------------------------------------------------------------------------------------

    def in_state(self, offset: int, sizes: list[int], strides: list[int]) -> TensorAccessPattern:
        """An access pattern over the state; offset, sizes and strides in elements."""
        return TensorAccessPattern([self.state_size], offset, sizes, strides)

    def _region(self, name: str) -> TensorAccessPattern:
        region = self.regions[name]
        return run(self.state_size, region.offset, region.size)

    def _send_context(self) -> None:
        """Start the fill of attention's output; with a gate, a line of the gate precedes each of its lines."""
        shape, first = self._shape, self.regions["context"].offset
        lines, parts = shape.lines(shape.projections[1].columns), shape.line // BLOCK_COLUMNS
        tap = run(self.state_size, first, lines * shape.line)
        if shape.output_gate:
            gate = self.regions["qkv"].offset + shape.heads_size
            sizes, strides = [lines, 2, parts, BLOCK_COLUMNS], [shape.line, first - gate, BLOCK_COLUMNS, 1]
            tap = self.in_state(gate, sizes, strides)
        self.send(self.ends.vectors, self.buffers.state, tap)

    def sinks_of(self, index: int) -> int:
        """The element of `vectors` where a layer's sinks begin."""
        return index * self._shape.vector_size + self._shape.sinks_begin

    def send_region(self, end: ObjectFifoHandle, name: str) -> None:
        """Start the fill of a region of the state."""
        self.send(end, self.buffers.state, self._region(name))

    def send(self, end: ObjectFifoHandle, buffer: Any, tap: TensorAccessPattern) -> None:
        """Start a fill. Before a stream's fifth fill, its oldest is awaited, which has ended by then."""
        self._windows[end].add(end.fill, buffer, tap)

    def drain(self, end: ObjectFifoHandle, buffer: Any, tap: TensorAccessPattern) -> Any:
        """Start a drain that will be awaited."""
        return end.drain(buffer, tap=tap, wait=True, managed=False)

    def wait(self, tasks: list[Any]) -> None:
        """Await all tasks."""
        for task in tasks:
            task.await_()
