# SPDX-License-Identifier: Apache-2.0
"""What the host does for a prompt: the calls that take a chunk of tokens through a model's layers, in order.

**Buffers of the model** are those of the decode layer (aie/designs/decode_layer_shape.py), one copy for both:

    weights  u8    [layer][QKV | output | gate and up, interleaved | down]
    vectors  bf16  [layer][norms][line], each layer followed by its QK-norm weights [q, k][d]
    rotary   bf16  [tables][context][d]
    cache    bf16  [layer][context][G][2][d]

**Buffers of a chunk**, bf16, for all layers the same (`Prefill.sizes`):

    hidden     [tokens][D]            the residual stream at a layer's beginning; for the first layer: the embeddings
    x          [tokens][D]            that, normalised: A of QKV, and of gate and up
    qkv        [tokens][(H + 2 G) d]  products
    q          [tokens][H][d]         queries, normalised and turned; keys and values go to the cache
    context    [tokens][H][d]         attention's output: A of the output projection
    attended   [tokens][D]            its product
    residual   [tokens][D]            the residual stream between attention and feed-forward
    activated  [tokens][I]            act(gate) * up: A of down
    update     [tokens][D]            its product, which the next layer's beginning adds
    panels     dequantised weights (B) of the projection that is at work: as large as the largest

A GEMM reads K padded to 256 elements of each row of A, whatever A's rows have (`Gemm.program`'s `line`): behind their
last row x, context and activated have the elements that it lacks, which only have to be finite. Rows of a chunk that no
token is in are zeros in `hidden`; they make finite numbers, and their keys and values are written over by the tokens
that come.

**Of the last layer** only keys and values are wanted: a prompt's last token is the decode layer's, which has the LM
head, and it needs nothing of the tokens before it but the cache. So the last layer ends with `norm_rope`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import BLOCK_BYTES, ceil_div
from flownpu.aie.designs.dequant_engine import DequantEngine
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.designs.gemm import Gemm
from flownpu.aie.designs.norm_rope import NormRope
from flownpu.aie.designs.vector_operators import ResidualRMSNorm, RMSNorm

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flownpu.aie.designs.decode_layer import Layer, LayerShape

_CORES = 4  # of the operators on rows


@dataclass(frozen=True)
class View:
    """Elements offset .. + size of a buffer."""

    buffer: str
    offset: int
    size: int


@dataclass(frozen=True)
class Step:
    """A call: `design.program(*sizes, **options)` over the design's array.

    Attributes:
        layer: which it is for.
        design: equal ones are one array.
        sizes: of the call.
        arguments: those that it writes come last.
        written: how many it writes.
        options: of the call, by name.
    """

    layer: int
    design: Any
    sizes: tuple[Any, ...]
    arguments: tuple[View, ...]
    written: int = 1
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Prefill:
    """Chunks of so many tokens, in multiples of 64.

    Attributes:
        shape: of the layers; its feed-forward a multiple of 64.
        layers: what tells them apart.
        tokens: rows of a chunk.
        context: positions of the cache and of a table.
        tables: of `rotary`.
        epsilon: of all norms.
        scale: of the scores.
    """

    shape: LayerShape
    layers: Sequence[Layer]
    tokens: int
    context: int
    tables: int
    epsilon: float
    scale: float

    def steps(self, position: int) -> Iterator[Step]:
        """The calls of a chunk whose first token is at `position`."""
        for index in range(len(self.layers)):
            yield from self._begin(index)
            yield from self._project(index, 0, "x", "qkv")
            yield self._norm_rope(index, position)
            if index + 1 == len(self.layers):
                return
            yield self.flow_qkv(index, position)
            yield from self._project(index, 1, "context", "attended")
            yield from self._add(index, 1, "attended", "hidden", "residual")
            yield from self._project(index, 2, "x", "activated")
            yield from self._project(index, 3, "activated", "update")

    # --- The residual stream ------------------------------------------------------------------------------------------

    def _begin(self, index: int) -> Iterator[Step]:
        """Hidden += the update of the layer before; x = norm(hidden)."""
        if index == 0:
            yield self._norm(index, "hidden", self._norm_weight(0, self.shape.entry_norms - 1))
        else:
            yield from self._add(index, 0, "update", "residual", "hidden")

    def _add(self, index: int, entry: int, update: str, before: str, after: str) -> Iterator[Step]:
        """After = before + update, normalised first where there are post-norms; x = norm(after)."""
        shape, sizes = self.shape, (self.tokens, self.epsilon)
        first = entry * shape.entry_norms
        design = ResidualRMSNorm("npu2", shape.hidden, shape.post_norms, _CORES)
        arguments = self._rows(update), self._rows(before), self._norm_weight(index, first), self._rows(after)
        if shape.post_norms:
            yield Step(index, design, sizes, arguments)
            yield self._norm(index, after, self._norm_weight(index, first + 1))
        else:
            yield Step(index, design, sizes, (*arguments, self._rows("x")), written=2)

    def _norm(self, index: int, source: str, weight: View) -> Step:
        """x = norm(source)."""
        design = RMSNorm("npu2", self.shape.hidden, _CORES)
        arguments = self._rows(source), weight, self._rows("x")
        return Step(index, design, (self.tokens, self.epsilon), arguments)

    def _norm_weight(self, index: int, number: int) -> View:
        """A norm's weight: of layer `index` that of `number`."""
        return View("vectors", index * self.shape.vector_size + number * self.shape.line, self.shape.hidden)

    def _rows(self, name: str) -> View:
        """[tokens][D] of a buffer."""
        return View(name, 0, self.tokens * self.shape.hidden)

    # --- Projections --------------------------------------------------------------------------------------------------

    def _project(self, index: int, number: int, source: str, target: str) -> Iterator[Step]:
        """Dequantise a weight, and multiply by it."""
        shape, projection = self.shape, self.shape.projections[number]
        m, k, gated = projection.rows, projection.columns, projection.gated
        padded = ceil_div(k, 256) * 256
        first = index * shape.weight_bytes + sum(p.bytes for p in shape.projections[:number])
        panels = View("panels", 0, projection.bytes // BLOCK_BYTES * 32 * 256)

        options = (("gated", True), ("interleaved", True)) if gated else ()
        blocks = View("weights", first, projection.bytes)
        yield Step(index, DequantEngine("npu2"), (m, k), (blocks, panels), options=options)

        gemm = Gemm("npu2", epilogue=shape.activation if gated else "none", m=self.tokens // 4, n=32 if m < 512 else 64)
        arguments = View(source, 0, self.tokens * k + padded - k), panels, View(target, 0, self.tokens * m)
        yield Step(index, gemm, (self.tokens, k, m), arguments, options=(("line", k),))

    # --- Attention ----------------------------------------------------------------------------------------------------

    def _norm_rope(self, index: int, position: int) -> Step:
        """Queries into a buffer of their own, keys and values into the cache."""
        shape, tokens, layer = self.shape, self.tokens, self.layers[index]
        design = NormRope("npu2", shape.heads, shape.kv_heads, shape.d, shape.qk_norm, _CORES)
        qkv = View("qkv", 0, tokens * shape.projections[0].rows)
        rotary = View("rotary", 0, self.tables * self.context * shape.d)
        norms = [View("vectors", (index + 1) * shape.vector_size - 2 * shape.d, 2 * shape.d)] * shape.qk_norm
        return Step(
            index, design, (tokens, position, self.context),
            (qkv, rotary, *norms, self._queries("q"), self._cache(index)),
            written=2, options=(("tables", self.tables), ("table", layer.table), ("epsilon", self.epsilon)),
        )  # fmt: skip

    def flow_qkv(self, index: int, position: int) -> Step:
        """Attention of a layer."""
        shape = self.shape
        return Step(
            index, FlowQKV("npu2", shape.heads, shape.kv_heads, shape.d), (self.tokens, position, self.context),
            (self._queries("q"), self._cache(index), self._queries("context")),
            options=(("window", self.layers[index].window), ("scale", self.scale)),
        )  # fmt: skip

    def _queries(self, name: str) -> View:
        return View(name, 0, self.tokens * self.shape.heads * self.shape.d)

    def _cache(self, index: int) -> View:
        size = self.context * self.shape.position_size
        return View("cache", index * size, size)

    # --- Buffers ------------------------------------------------------------------------------------------------------

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Elements of the buffers of a chunk, all bf16."""
        shape, tokens = self.shape, self.tokens
        qkv, output, gate_up, down = shape.projections
        operands = {"x": qkv.columns, "context": output.columns, "activated": down.columns}
        products = {"hidden": shape.hidden, "qkv": qkv.rows, "q": output.columns, "residual": shape.hidden}
        products |= {"attended": output.rows, "update": down.rows}
        panels = max(projection.bytes for projection in (qkv, output, gate_up, down)) // BLOCK_BYTES * 32 * 256
        return (
            {name: tokens * k + ceil_div(k, 256) * 256 - k for name, k in operands.items()}
            | {name: tokens * size for name, size in products.items()}
            | {"panels": panels}
        )
