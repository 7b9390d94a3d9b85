# SPDX-License-Identifier: Apache-2.0
"""A decoder layer for one token whose tiles all attend: the streams of weights carry keys and values, too.

    norm -> QKV -> (QK-norm) RoPE -> cache, FlowKV split -> merge -> output -> ... as decode_layer.py

    columns 0-5     24 tiles project and attend, two streams a column
    (6, bottom)     the residual tile, as in decode_layer.py; it deals the queries to the tiles, as any x
    (7, bottom)     the RoPE tile; after attention it puts the tiles' shares together

In decode_layer.py eight streams carry weights and four carry keys and values, and either wait while the others work;
the cost model (docs/model.md) says that streams are what decoding waits for. Here twelve carry whatever there is to
carry. An object of a stream is a Q4NX block, or as many bytes of keys and values: 1280 / d keys of a head, then their
values. So one fifo of a tile takes both, and nothing of the array is for attention alone.

**Split keys.** A KV head's keys are dealt to all 24 tiles, object by object: one KV head keeps all streams busy as well
as eight. Each tile runs FlowKV over its share (kernels/flow_kv_split.cc) and gives Y / l, m and l; the RoPE tile weighs
them (kernels/flow_kv_merge.cc). They go there through main memory, H d + 32 G elements a tile: 100 KB a layer for eight
heads of 256, which is one wait more than in decode_layer.py, seven a layer.

**What is early.** Weights wait for nothing, nor do keys and values, but for the one stream that has the object with the
cache's new position. So memories are full when the queries come.

Rows of blocks are dealt to columns in groups of four; 24 tiles share 80 rows less evenly than 16 do: four groups where
3.3 would be even. That costs up to a tenth, and is in the model's predictions.

Host buffers are those of decode_layer.py (`SplitShape.regions` has two more), and `cache_bytes`: the cache once more,
as bytes, the same memory; a stream's objects are bytes, and what is written to the cache are bf16. A capacity is a
multiple of `SplitShape.keys`. The cache's layout is that of all designs, [capacity][G][2][d].

Resources, largest of all shapes (checked; limits in brackets): a tile 62 KB of L1 (64); all 16 shim streams into the
array. That a tile's nine kernel entries fit 16 KB of program memory is not known: Peano has not compiled them. **It ran
on the emulator only.**
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import U8, device, tensor
from flownpu.aie.designs.decode_layer import DecodeLayer
from flownpu.aie.designs.decode_layer_array import Ends
from flownpu.aie.designs.decode_layer_call import HostBuffers, Layer, Token
from flownpu.aie.designs.split_layer_array import build
from flownpu.aie.designs.split_layer_sequence import SplitSequence
from flownpu.aie.iron_compat import Program, Runtime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.aie.designs.split_layer_shape import SplitShape

__all__ = ["SplitLayer"]


@dataclass(frozen=True)
class SplitLayer(DecodeLayer):
    """The array for split decoder layers of one shape; npu2.

    Attributes:
        shape: of the layers.
    """

    shape: SplitShape

    def program(
        self,
        position: int,
        capacity: int,
        *,
        layers: Sequence[Layer] = (Layer(),),
        vocabulary: int = 0,
        epsilon: float = 1e-6,
        scale: float | None = None,
        positions: int | None = None,
        tables: int = 1,
    ) -> Program:
        """As `DecodeLayer.program`, with one host buffer more, `cache_bytes`, after `state`: u8, the cache's memory."""
        shape = self.shape
        token = Token(position, capacity, epsilon, scale or shape.d**-0.5, positions or capacity, tables)
        head = self._require(token, layers, vocabulary)
        array = build(shape)

        def sequence(
            ends: list[Any], weights: Any, vectors: Any, rotary: Any, cache: Any, state: Any, cache_bytes: Any,
            logits: Any = None,
        ) -> None:  # fmt: skip
            buffers = HostBuffers(weights, vectors, rotary, cache, state, logits)
            here = array._replace(ends=Ends(*ends))
            SplitSequence(shape, here, buffers, cache_bytes, token, layers, head).write()

        kinds = self._host_buffers(token, layers, head)
        cache = len(layers) * capacity * shape.position_size
        kinds.insert(5, tensor(2 * cache, U8))
        return Program(device("npu2"), Runtime(sequence, [[*array.ends], *kinds]), array.workers)
