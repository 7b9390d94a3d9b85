# SPDX-License-Identifier: Apache-2.0
"""A decoder layer for one token, and all layers and the LM head of a token, over one array configuration.

    norm -> QKV -> (QK-norm) RoPE -> cache, FlowKV -> output -> (norm) add, norm -> gate, up, GeGLU or SwiGLU -> down

The array (npu2):

    columns 0-..    project: FusedDQP (fused_dqp.py), two streams of weights a column; with `split` they attend, too
    columns ..-5    attend, with `pairs`
    (6, bottom)     the residual tile: adds, normalises, and deals x to the projecting tiles, in parts of 256
    (7, bottom)     the RoPE tile: QK-norm and RoPE; its queries go on to attention, keys and values to the cache
    columns 6, 7    two tiles each above those two: together one more column that projects, on a stream of either shim
                    tile

An *entry* is what the residual tile does before a projection: it adds an update to the residual stream and normalises
the sum. A layer has two entries, before QKV and before gate and up; the LM head has one.

**Streams.** A shim tile sends two streams, the array sixteen. What is neither weights nor keys takes two of them, one
to the residual tile and one to the RoPE tile, on which norms, angles and heads come one after the other. So with
`split` fourteen carry weights and keys; thirteen would carry more than main memory gives. An object of a stream of
weights is a block for each of its two tiles; the two are neighbours in memory, so that a stream's rows come in one run.

**Two ways of attention**: `pairs` of tiles, on columns of their own (pairs.py; four columns and two, as in
arXiv 2602.06063, section 3.2.3), and `split` keys, on the tiles that project (split.py). Split keys use all streams for
whatever is to be moved; pairs also take head sizes that do not divide 256, and more query heads to a KV head.

**Shared rows.** A row of blocks is shared by tiles: its blocks are dealt to them one by one, and their sums meet
through neighbours' memory (rows.py). Every stream has the same number of rows, which its two tiles share. The rows that
are left, fewer than there are streams, are shared by all tiles of a *span*: with split keys all 28, with pairs those of
a column. So all tiles have the same number of blocks, or one more; in the next projection it is other tiles that have
one more. If a few streams had rows left to themselves, they would not keep main memory busy.

**Phases.** The products of a phase leave through the shim tiles to a buffer `state` in main memory and come back as one
stream: a few KB each way. A layer waits for QKV, for attention, for the output projection, for the gated activations,
for the down projection; with pairs for the cache's new position, too. Everything else stays in the array: the residual
stream stays in its tile from one norm to the next, what the norms give goes to the projecting tiles, queries go to the
pairs or, with the token's own keys and values, to the residual tile and from there to all, and shares of attention from
tile to tile. A layer leaves the *update*, its down projection, unadded: adding it is the first thing the next layer
does, so that no layer of a call waits for the addition, and all entries are alike. The drains of a phase are started
before its inputs are awaited, so that then the controller has only one transfer left to start.

**Equal layers start once.** A core runs as many layers as its run-time parameters say: for neighbouring layers with
equal parameters, these and the barrier are written once, for the first of them.

**Weights of 8 bits** are two planes of 4 (kernels/common/q4nx.h): a run-time parameter says how many blocks belong to
256 columns, so one array computes layers of both kinds, and a call may have both.

**Weights do not wait.** Those of the next phase are sent as soon as a stream has room. They fill two objects a stream
in L2 and up to four blocks a tile in L1: 860 KB in all, 13 us at main memory's rate.

**Layers that keep a state** in the place of keys and values (Qwen3.5's gated delta rule, LFM2's short convolution) are
computed in two parts: a call ends with their first projection, the host computes the mixer, and the next call begins
with their output projection. So a call goes from one such layer's second part through whole layers to the next one's
first part. **An output's gate** (Qwen3.5) is rows behind those of QKV; the residual tile opens what it deals by them.

**One configuration, few dispatches.** A sequence may have any number of layers, and the LM head, which is an entry and
a projection like others: one dispatch a token and no reconfiguration. What limits it is that offsets into the weights
are below 2^31 bytes (`DecodeLayer.calls`). Lengths, windows, positions, which layer's weights: all are run-time
parameters and taps. The array is compiled for a `LayerShape` (sizes, norms, biases, activation) and a way of attention.

Alternatives that were considered:

- An xclbin for each operator: nine dispatches a layer at 44-50 us and a configuration switch of 39 us each (published
  for Strix Halo), where the weights of a Gemma3-1B layer take 0.3 ms.
- All 32 tiles in every role: 16 KB of program memory have to hold every kernel, and it would not be faster. Fourteen
  shim streams carry more than main memory gives.
- Values straight from the projecting tiles into the cache: a column gives 64 rows at once, and where these are both
  keys and values one transfer cannot go to both places. Through the RoPE tile they take a microsecond a layer.
- Products that never leave the array: a tile takes two streams and a fifo is in one link at most, so gathering the
  products of several columns would take cores that only forward. It would save four of the six waits, a few us each.
- Every projecting tile normalises for itself: no residual tile, but the norms' weights go to every such tile, and the
  waits remain.

Resources, largest of all shapes (checked; limits in brackets): a projecting tile 58,324 bytes of L1 (65,536), with
split keys 63,580, of which x is 32 KB; a longer x leaves room for fewer blocks ahead. The residual tile 53,328; a V
tile 42,076. A projecting column's memory tile has 4 + 5 of its 6 + 6 channels and 24 of 48 descriptors. All 16 shim
streams into the array are used, and 9 of 16 out of it (10 with an int8 cache). No core links more than six kernels from
two source files, with split keys eleven from three, and with sinks one more; that they fit 16 KB is expected, not
known, until Peano has compiled them.

Run-time parameters: see the tiles' functions. Host buffers: shape.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.bias import bias_column
from flownpu.aie.designs.common import U8, device, named, tensor
from flownpu.aie.designs.decode_layer.array import Ends, build
from flownpu.aie.designs.decode_layer.attention import AttentionEnds
from flownpu.aie.designs.decode_layer.call import CalledLayer, HostBuffers, Token
from flownpu.aie.designs.decode_layer.experts import ExpertSequence
from flownpu.aie.designs.decode_layer.pairs import PairsOfTiles
from flownpu.aie.designs.decode_layer.sequence import LayerSequence
from flownpu.aie.designs.decode_layer.shape import LayerShape, Projection
from flownpu.aie.designs.decode_layer.split import SplitKeys
from flownpu.aie.iron.compat import Program, Runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flownpu.aie.designs.decode_layer.array import DecodeArray
    from flownpu.aie.designs.decode_layer.attention import Attention
    from flownpu.aie.designs.decode_layer.shape import Region

__all__ = ["WAYS", "CalledLayer", "DecodeLayer", "LayerShape"]

# Ways of attention.
WAYS: Mapping[str, type[Attention]] = {"pairs": PairsOfTiles, "split": SplitKeys}
# Offsets into a host buffer are 32-bit signed numbers of elements (aie.dma_bd's `offset`).
_WEIGHTS_MAXIMUM = 1 << 31


@dataclass(frozen=True)
class DecodeLayer:
    """The array for decoder layers of one shape; npu2.

    Attributes:
        shape: the layers' sizes.
        way: the way of attention, pairs or split.
    """

    shape: LayerShape
    way: str = "pairs"

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise ValueError(f"[decode_layer] expected a way of attention of {', '.join(WAYS)}, got {self.way!r}")
        _ = self.attention  # raises for shapes that the way does not take

    @cached_property
    def attention(self) -> Attention:
        """The way of attention, for the shape."""
        return WAYS[self.way](self.shape)

    @cached_property
    def regions(self) -> dict[str, Region]:
        """The regions of `state`, by name."""
        return self.shape.regions(self.attention.regions)

    @property
    def state_size(self) -> int:
        """Elements of `state`."""
        return sum(region.size for region in self.regions.values())

    @property
    def one(self) -> int:
        """The element of `state` that must be 1 for the output projection's bias (designs/bias.py)."""
        return self.regions["context"].offset + bias_column(self.shape.heads * self.shape.d)

    @property
    def capacity_step(self) -> int:
        """Positions that a cache's capacity must be a multiple of."""
        return self.attention.keys if self.attention.cache_bytes(1, 0) is None else 1

    def byte_arguments(self, capacity: int) -> int:
        """How many arguments of a token's call are the bytes that it reads of a cache with this `capacity`."""
        return (self.attention.cache_bytes(1, capacity) is not None) + self.shape.int8_cache

    def takes_head(self, head: Projection, eight_bits: int = 0) -> bool:
        """Whether a call takes the weights of an LM head behind those of a layer."""
        return head.bytes + self.shape.weight_bytes(eight_bits) <= _WEIGHTS_MAXIMUM

    def calls(
        self, layers: Sequence[CalledLayer], head: Projection | None = None, most: int | None = None
    ) -> list[int]:
        """How many layers each call of a token has, in as few calls as may be; the last one has the LM head, too.

        Args:
            layers: the model's.
            head: the LM head; None: none.
            most: the most layers of a call; None: as many as its weights have room for.

        Raises:
            ValueError: the weights of one layer and the head are more than a call takes.
        """
        room, counts = _WEIGHTS_MAXIMUM - (head.bytes if head else 0), [0]
        for layer in reversed(layers):
            size = self.shape.weight_bytes(layer.eight_bits)
            if counts[0] and (size > room or counts[0] == most):
                counts.insert(0, 0)
                room = _WEIGHTS_MAXIMUM
            if size > room:
                what = f"a layer{' and the LM head' if head else ''} in {_WEIGHTS_MAXIMUM} bytes"
                raise ValueError(
                    f"[decode_layer] expected {what}, got one of {size} with {head.rows if head else 0} rows"
                )
            counts[0] += 1
            room -= size
        return counts

    def program(
        self,
        position: int,
        capacity: int,
        *,
        layers: Sequence[CalledLayer] = (CalledLayer(),),
        vocabulary: int = 0,
        head_eight_bits: bool = False,
        epsilon: float = 1e-6,
        scale: float | None = None,
        positions: int | None = None,
        tables: int = 1,
    ) -> Program:
        """Neighbouring layers of a model for the token at `position`, and the LM head after the last of them.

        Host buffers weights, vectors, rotary, cache, state, as in shape.py, each with what belongs to these layers
        only; with split keys cache_bytes, u8, the memory of the cache, or of its rows in int8, once more and some of
        what follows (`Attention.cache_bytes`); with an int8 cache int8_rows, u8; and with a head, logits [vocabulary],
        bf16. Before a call with the model's first layer, the regions `hidden` and `update` of state hold the token's
        embedding and zeros; before other calls, what the call before left there. With a bias of the output projection
        its element `one` is 1.

        Args:
            position: the token's, from 0.
            capacity: positions of a layer's cache, a multiple of `capacity_step`. What it holds beyond the token must
                be finite.
            layers: each layer's window, table of angles and bits of weights, and the part of it; with experts, one at
                most. Without attention there are no buffers rotary and cache.
            vocabulary: rows of the LM head, a multiple of 32; 0: none.
            head_eight_bits: whether its weights have 8 bits.
            epsilon: of all norms.
            scale: factor of the scores; None: 1 / sqrt(d).
            positions: positions of a table of `rotary`; None: as many as the capacity.
            tables: tables of `rotary`.

        Raises:
            ValueError: a position, table or capacity that does not fit, no layer, or more weights than a call takes.
        """
        token = Token(position, capacity, epsilon, scale or self.shape.d**-0.5, positions or capacity, tables)
        head = Projection(vocabulary, self.shape.hidden, eight_bits=head_eight_bits) if vocabulary else None
        self._require(token, layers, head)
        buffers = self._host_buffers(token, layers, head)

        def steps(here: DecodeArray, *given: Any) -> LayerSequence:
            held = HostBuffers(**dict(zip(buffers, given, strict=True)))
            return LayerSequence(self.attention, here, held, token, layers, head)

        return self._program(buffers, steps)

    def of_experts(self, chosen: Sequence[int], experts: int, *, epsilon: float = 1e-6, eight_bits: int = 0) -> Program:
        """The experts that a token chose in a layer, after a call of `program` with that layer (experts.py).

        Host buffers experts, vectors, state, as there. In state, `hidden` is the residual stream before attention.

        Args:
            chosen: the numbers of `LayerShape.experts` experts.
            experts: how many the layer has.
            epsilon: of the norm.
            eight_bits: see `LayerShape.of_bits`.

        Raises:
            ValueError: numbers that do not fit, or more weights than a call takes.
        """
        shape = self.shape
        total = experts * shape.expert_bytes(eight_bits)
        if not shape.experts or len(chosen) != shape.experts or not all(0 <= number < experts for number in chosen):
            raise ValueError(f"[decode_layer] expected {shape.experts} numbers below {experts}, got {list(chosen)}")
        if total > _WEIGHTS_MAXIMUM:
            raise ValueError(f"[decode_layer] expected at most {_WEIGHTS_MAXIMUM} bytes of experts, got {total}")
        types = {"experts": tensor(total, U8), "vectors": tensor(shape.line), "state": tensor(self.state_size)}

        def steps(here: DecodeArray, weights: Any, vectors: Any, state: Any) -> LayerSequence:
            held = HostBuffers(weights, vectors, state)
            return ExpertSequence(self.attention, here, held, chosen, experts, epsilon, eight_bits)

        return self._program(types, steps)

    def _program(self, buffers: Mapping[str, Any], steps: Callable[..., LayerSequence]) -> Program:
        """The array with a sequence. `buffers`: its host buffers' types, by name; `steps` gets them after the array."""
        array = build(self.attention).of_a_sequence()

        def sequence(ends: list[Any], *given: Any) -> None:
            *others, attention = ends
            here = array._replace(ends=Ends._make([*others, AttentionEnds._make(attention)]))
            steps(here, *given).write()

        runtime = Runtime(named(sequence, ["ends", *buffers]), [[*array.ends], *buffers.values()])
        return Program(device("npu2"), runtime, array.workers)

    def _weight_bytes(self, layers: Sequence[CalledLayer], head: Projection | None) -> int:
        of_layers = (layer.own(self.shape.own_projections(layer.eight_bits, keeps_state=layer.keeps_state))
                     for layer in layers)  # fmt: skip
        return sum(part.bytes for parts in of_layers for part in parts) + (head.bytes if head else 0)

    def _host_buffers(self, token: Token, layers: Sequence[CalledLayer], head: Projection | None) -> dict[str, Any]:
        """The types of a call's host buffers, by name."""
        shape, count = self.shape, sum(not layer.part for layer in layers)
        types = {
            "weights": tensor(self._weight_bytes(layers, head), U8),
            "vectors": tensor(len(layers) * shape.vector_size + (shape.entry_norms * shape.line if head else 0)),
        }
        if count:
            types["rotary"] = tensor(token.tables * token.positions * shape.d)
            types["cache"] = tensor(count * token.capacity * shape.position_size)
        types["state"] = tensor(self.state_size)
        if count and (cache_bytes := self.attention.cache_bytes(count, token.capacity)):
            types["cache_bytes"] = tensor(cache_bytes, U8)
        if count and shape.int8_cache:
            types["int8_rows"] = tensor(count * token.capacity * shape.kv_heads * 2 * shape.row_bytes, U8)
        return types | ({"logits": tensor(head.rows)} if head else {})

    def _require(self, token: Token, layers: Sequence[CalledLayer], head: Projection | None) -> None:
        """Raise for what a call cannot be."""
        keys = self.capacity_step
        if token.capacity % keys or not 0 <= token.position < min(token.capacity, token.positions):
            raise ValueError(
                f"[decode_layer] expected a capacity in multiples of {keys} and a position in it and in `rotary`, got "
                f"position {token.position} of {token.capacity} and {token.positions}"
            )
        if any(not 0 <= layer.table < token.tables for layer in layers):
            raise ValueError(
                f"[decode_layer] expected each layer's table in 0..{token.tables - 1}, "
                f"got {[layer.table for layer in layers]}"
            )
        weights = self._weight_bytes(layers, head)
        if not (layers or head) or (self.shape.experts and len(layers) > 1) or weights > _WEIGHTS_MAXIMUM:
            most = "one layer" if self.shape.experts else "one layer or more"
            raise ValueError(
                f"[decode_layer] expected {most}, or an LM head, with at most {_WEIGHTS_MAXIMUM} bytes of weights, got "
                f"{len(layers)} with {weights}: call `calls` for how many a call takes"
            )
