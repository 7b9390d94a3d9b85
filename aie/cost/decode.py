# SPDX-License-Identifier: Apache-2.0
"""The time of a decoder layer for one token, and of the LM head, from the shapes: no plan is made.

    projection   the most rows of blocks that a stream has / channel; no faster than memory or the tiles' kernels
    attention    turns x keys of a pair x key and value / (the pair's streams x channel), no faster than memory
    layer        projections + attention (+ shares put together) + waits + dispatches

A layer's attention needs what its projections make, and its projections what attention makes, so they add up. Rows of
blocks are dealt to columns in groups of four, so where there are few, some streams have more than others.

`aie/cost/simulation.py` follows a plan event by event instead; tests compare the two.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flownpu.aie.cost.memory import STORED_WEIGHT_RUN, read_rate
from flownpu.aie.designs.common import BLOCK_BYTES, BLOCK_ROWS, TILES, ceil_div
from flownpu.aie.designs.decode_layer_pairs import PairsOfTiles
from flownpu.aie.designs.decode_layer_shape import LayerShape, Projection
from flownpu.aie.designs.decode_layer_weights import STREAMS

if TYPE_CHECKING:
    from flownpu.aie.cost.device import Device
    from flownpu.aie.cost.parameters import Values
    from flownpu.aie.designs.decode_layer import DecodeLayer

__all__ = ["Cost", "DecodeDesign", "design_of", "head_cost", "layer_cost"]

_BF16_BYTES = 2


@dataclass(frozen=True)
class Cost:
    """Seconds by what takes them, and the bytes that are read from main memory."""

    seconds: dict[str, float]
    read_bytes: float

    @property
    def total(self) -> float:
        """All seconds."""
        return sum(self.seconds.values())

    def __add__(self, other: Cost) -> Cost:
        names = dict.fromkeys([*self.seconds, *other.seconds])
        seconds = {name: self.seconds.get(name, 0.0) + other.seconds.get(name, 0.0) for name in names}
        return Cost(seconds, self.read_bytes + other.read_bytes)

    def __mul__(self, count: float) -> Cost:
        return Cost({name: count * value for name, value in self.seconds.items()}, count * self.read_bytes)


@dataclass(frozen=True)
class DecodeDesign:
    """How decoding is laid on the array.

    Attributes:
        name: of the design.
        streams: shim streams of weights.
        tiles: compute tiles that project.
        pairs: pairs of tiles that attend, at most; a pair takes whole KV heads, unless keys are split.
        pair_streams: shim streams of a pair, keys and values together.
        split_keys: a head's keys are shared by all streams' tiles, `pairs` then counts streams; what each makes of its
            share goes through main memory to be put together, on one stream.
        layer_dispatches: dispatches of a layer.
        token_dispatches: other ones of a token.
        waits: times that a layer waits for main memory and the sequence.
        host: the parameter that says what the host needs for a logit.
    """

    name: str
    streams: int
    tiles: int
    pairs: int
    pair_streams: float
    split_keys: bool = False
    layer_dispatches: float = 0
    token_dispatches: float = 1
    waits: int = 0
    host: str = "own_host_per_logit"

    @property
    def columns(self) -> int:
        """Columns of tiles that project."""
        return self.tiles // TILES

    def weight_seconds(self, projection: Projection, device: Device, values: Values) -> float:
        """A projection's weights through the streams and the tiles."""
        rows = len(projection.row_groups(0, self.columns))  # of blocks: the first column has the most
        kernels = rows * projection.row_bytes / BLOCK_BYTES * values["dqp_block"] / device.clock
        of_stream = rows * TILES * self.columns / self.streams * projection.row_bytes
        return max(
            of_stream / read_rate(1, STORED_WEIGHT_RUN, values), projection.bytes / values["memory_read"], kernels
        )

    def with_streams(self, streams: int, tiles: int) -> DecodeDesign:
        """The same with other streams and tiles for weights."""
        return dataclasses.replace(self, streams=streams, tiles=tiles)


def design_of(layer: DecodeLayer, dispatches: float = 1) -> DecodeDesign:
    """How `decode_layer` is laid on the array, with so many dispatches a token.

    A column's two pairs share its two streams, keys on one, values on the other; split keys are on all streams.
    """
    way, streams = layer.attention, STREAMS * layer.attention.columns
    pairs, of_a_pair, split = streams, 1.0, True
    if isinstance(way, PairsOfTiles):
        pairs, of_a_pair, split = way.pairs, STREAMS * way.attention_columns / way.pairs, False
    return DecodeDesign(
        layer.way, streams, TILES * way.columns, pairs, of_a_pair, split_keys=split, waits=way.waits,
        token_dispatches=dispatches,
    )  # fmt: skip


def layer_cost(shape: LayerShape, keys: int, design: DecodeDesign, device: Device, values: Values) -> Cost:
    """One layer of a token that sees so many keys (the window, where the layer has one and it is shorter)."""
    key_bytes = 2.0 * keys * shape.kv_heads * shape.d * _BF16_BYTES
    return Cost(
        {
            "weights": sum(design.weight_seconds(projection, device, values) for projection in shape.projections),
            "attention": attention_seconds(shape, keys, design, values),
            "merge": _merge_seconds(shape, design, values),
            "waits": design.waits * values["wait"],
            "dispatches": design.layer_dispatches * values["dispatch"],
        },
        shape.weight_bytes + key_bytes,
    )


def attention_seconds(shape: LayerShape, keys: int, design: DecodeDesign, values: Values) -> float:
    """Attention of one token over so many keys."""
    run = shape.d * _BF16_BYTES
    head_bytes = 2.0 * keys * run
    if design.split_keys:
        pairs, heads_of_a_pair = design.pairs, shape.kv_heads / design.pairs
    else:
        pairs = min(design.pairs, shape.kv_heads)
        heads_of_a_pair = ceil_div(shape.kv_heads, pairs)
    rate = read_rate(pairs * design.pair_streams, run, values) / pairs
    return heads_of_a_pair * head_bytes / rate


def _merge_seconds(shape: LayerShape, design: DecodeDesign, values: Values) -> float:
    """Every tile's outputs of its share, in parts of 32, through one stream."""
    if not design.split_keys:
        return 0.0
    moved = design.tiles * shape.heads * shape.d * _BF16_BYTES
    return moved / read_rate(1, BLOCK_ROWS * _BF16_BYTES, values)


def head_cost(hidden: int, vocabulary: int, design: DecodeDesign, device: Device, values: Values) -> Cost:
    """The LM head with what the host does with its logits."""
    projection = Projection(vocabulary, hidden)
    return Cost(
        {
            "head": design.weight_seconds(projection, device, values),
            "dispatches": design.token_dispatches * values["dispatch"],
            "host": vocabulary * values[design.host],
        },
        projection.bytes,
    )
