# SPDX-License-Identifier: Apache-2.0
"""The operators that the host computes between dispatches, because a change of array would take longer than the work.

The host computes in f32. Arrays read and write bf16. The residual stream, which no array sees, is f32; what
it begins with (embeddings, an encoder's positions) is bf16. Rows of x, y and qkv may be further apart than they are
long.

    rms_norm       y = norm(x)
    add_rms_norm   s = x + residual, y = norm(s)
    rms_norm_add   s = residual + norm(x), y = norm(s); the weights of the two norms are neighbours, a line each
    rms_norm_sum   s = residual + norm(x), y = s
    add_layer_norm s = x + residual, y = layer norm(s)
    experts        s' = s + experts(x); y = norm(s'), or s' without a weight
    route          the experts that the router chooses for x (i32), and their shares (f32)
    add_experts    s' = s + the chosen experts' answers, each times its share; y = s'
    mixer          y = what is between the projections of a layer that keeps a state; x: what they read, projected:
                   their products
    before_delta   up to a gated delta rule that an array applies (designs/gated_delta.py)
    after_delta    from there on
    output_gate    y = y sigmoid(gate): attention's output; a row of gate is `first` elements behind one of QKV
    norm_rope      queries and keys of packed rows [H | G | G][d], normalised and turned: queries -> q, keys and values
                   -> the cache, from the position of the first row on; with an int8 cache also its rows

Router and experts are those of a layer's Q4NXMoE in the graph, whose constants are no arguments.

ops/npu/run/host_operators.h, which computes these operators, checks their arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flownpu._native import GatedDelta
from flownpu.aie.designs.common import BLOCK_BYTES, BLOCK_COLUMNS, BLOCK_ROWS
from flownpu.aie.plan.data import HostBuffer, Type
from flownpu.aie.programs.call import HostArgument, HostCall

if TYPE_CHECKING:
    from flownpu._native import Decoder, FeedForward, Layer
    from flownpu.aie.designs.decode_layer.shape import LayerShape


# How much longer the delta rule's multiply-adds take than those of `host_products` (docs/model.md), 1.44e11 a second
# and core: 32 states of 128 x 128 took a thread 131 us a token, 1.2e10 a second (Zen 5, AVX-512, loaded machine).
_RECURRENCE = 12


@dataclass(frozen=True)
class NormOfRows:
    """Norms of rows, with an addition before or after.

    Attributes:
        operator: rms_norm, add_rms_norm, rms_norm_add, rms_norm_sum or add_layer_norm.
        rows: rows of x.
        columns: elements of a row.
        epsilon: of the norms.
        x_line: elements from one row of x to the next; 0: `columns`.
        y_line: elements from one row of y to the next; 0: `columns`.
        weight_line: elements from the weight of one norm to that of a second; 0: `columns`.
    """

    operator: str
    rows: int
    columns: int
    epsilon: float
    x_line: int = 0
    y_line: int = 0
    weight_line: int = 0

    def call(self, residual: str = "f32") -> HostCall:
        """The step; `residual`: the type of the residual stream before it, f32 or bf16."""
        rows, columns = self.rows, self.columns
        x_line, y_line = self.x_line or columns, self.y_line or columns
        weights = {"rms_norm_add": (self.weight_line or columns) + columns, "add_layer_norm": 2 * columns}
        moved, weight = rows * columns, weights.get(self.operator, columns)
        arguments = [_argument("x", "bf16", rows * x_line, reads=moved)]
        stream = [_argument("s", "f32", moved, writes=moved)] if self.operator != "rms_norm" else []
        if stream:
            arguments.append(_argument("residual", residual, moved, reads=moved))
        arguments.append(_argument("weight", "bf16", weight, reads=weight))
        arguments += [*stream, _argument("y", "bf16", rows * y_line, writes=moved)]
        parameters = (
            ("rows", rows), ("columns", columns), ("epsilon", float(self.epsilon)), ("x_line", x_line),
            ("y_line", y_line), ("weight_line", self.weight_line or columns),
        )  # fmt: skip
        return HostCall(self.operator, parameters, tuple(arguments))


@dataclass(frozen=True)
class Experts:
    """The host's steps in a layer whose feed-forward is a mixture of experts.

    Attributes:
        layer: the layer's number.
        feed_forward: its description.
        columns: elements of a row, D.
        epsilon: of norms.
    """

    layer: int
    feed_forward: FeedForward
    columns: int
    epsilon: float

    def compute(self, rows: int, *, x_line: int = 0, y_line: int = 0, normalised: bool = True) -> HostCall:
        """The step `experts`; lines are those of `NormOfRows`.

        Args:
            rows: rows of x.
            x_line: see `NormOfRows`.
            y_line: see `NormOfRows`.
            normalised: whether y is normalised.
        """
        given, columns, stream = self.feed_forward, self.columns, rows * self.columns
        x_line, y_line = x_line or columns, y_line or columns
        arguments = (
            _argument("x", "bf16", rows * x_line, reads=stream),
            _argument("s", "f32", stream, reads=stream, writes=stream),
            *[_argument("weight", "bf16", columns, reads=columns)] * normalised,
            _argument("y", "bf16", rows * y_line, writes=stream),
        )
        parameters = (
            *self._parameters, ("rows", rows), ("x_line", x_line), ("y_line", y_line), ("epsilon", float(self.epsilon)),
        )  # fmt: skip
        # Rows choose independently: each leaves the same share of the experts that no row before it chose.
        share = 1 - (1 - given.experts_per_token / given.experts) ** rows
        weights = 3 * given.size * columns  # of an expert
        constants = int(share * given.experts * weights) * BLOCK_BYTES // (BLOCK_ROWS * BLOCK_COLUMNS)
        return HostCall("experts", parameters, arguments, constants, rows * given.experts_per_token * weights)

    def route(self) -> HostCall:
        """The step `route` of one row."""
        given = self.feed_forward
        arguments = (
            _argument("x", "bf16", self.columns, reads=self.columns),
            _argument("chosen", "i32", given.experts_per_token, writes=given.experts_per_token),
            _argument("shares", "f32", given.experts_per_token, writes=given.experts_per_token),
        )
        return HostCall("route", self._parameters, arguments, constants=4 * given.experts * self.columns)

    def add(self, line: int) -> HostCall:
        """The step `add_experts` of one row; `line`: elements from one expert's answer to the next."""
        columns, count = self.columns, self.feed_forward.experts_per_token
        arguments = (
            _argument("answers", "bf16", count * line, reads=count * columns),
            _argument("shares", "f32", count, reads=count),
            _argument("s", "f32", columns, reads=columns, writes=columns),
            _argument("y", "bf16", columns, writes=columns),
        )
        return HostCall("add_experts", (("experts", count), ("columns", columns), ("line", line)), arguments)

    @property
    def _parameters(self) -> tuple[tuple[str, int | float], ...]:
        return ("layer", self.layer), ("experts", self.feed_forward.experts_per_token), ("columns", self.columns)


@dataclass(frozen=True)
class StateMixer:
    """The host's steps between the projections of a layer that keeps a state.

    Attributes:
        model: the decoder.
        layer: the layer's number.
        rows: rows of x.
        x_line: elements from one row of x to the next; 0: as many as it has.
        line: the same of the products.
    """

    model: Decoder
    layer: int
    rows: int
    x_line: int = 0
    line: int = 0

    def call(self) -> HostCall:
        """All of it: the host reads and writes the state."""
        constants, products, state = self._work
        products += self.rows * 3 * _RECURRENCE * state
        # In float32, read and written once: a prompt's rows go through the host's caches.
        return HostCall(
            "mixer", self._parameters, (self._x, self._projected, self._y), constants + 2 * 4 * state, products
        )

    def before_delta(self, token: int) -> HostCall:
        """Up to the delta rule, which the array applies; `token`: elements of a token's x in a head there."""
        constants, products, state = self._work
        heads = self._mixer.value_heads
        arguments = (
            self._x,
            self._projected,
            _argument("tokens", "bf16", self.rows * heads * token, writes=self.rows * heads * token),
            _argument("states", "bf16", state, writes=state),
        )
        parameters = *self._parameters, ("token", token), ("state", state), ("heads", heads)
        return HostCall("before_delta", parameters, arguments, constants + 4 * state, products)

    def after_delta(self) -> HostCall:
        """From there on."""
        _, _, state = self._work
        elements = self.rows * self.model.output_columns(self._layer)
        arguments = (
            self._projected,
            _argument("delta", "bf16", elements, reads=elements),
            _argument("states", "bf16", state, reads=state),
            self._y,
        )
        return HostCall("after_delta", (*self._parameters, ("state", state)), arguments, 4 * state)

    @property
    def _layer(self) -> Layer:
        return self.model.layers[self.layer]

    @property
    def _mixer(self) -> Any:
        return self._layer.mixer

    @property
    def _work(self) -> tuple[int, int, int]:
        """(bytes of constants, multiply-adds without those of the state, elements of the state)."""
        of = self._mixer
        if not isinstance(of, GatedDelta):
            return 0, 0, 0
        rates = 2 * of.value_heads * self.model.hidden  # a and b of each head, in f32
        return 4 * rates, self.rows * rates, of.value_heads * of.key_size * of.value_size

    @property
    def _sizes(self) -> tuple[int, int, int]:
        layer = self._layer
        return self.model.hidden, self.model.input_rows(layer), self.model.output_columns(layer)

    @property
    def _parameters(self) -> tuple[tuple[str, int | float], ...]:
        columns, projected, mixed = self._sizes
        return (
            ("layer", self.layer), ("rows", self.rows), ("columns", columns), ("projected", projected),
            ("mixed", mixed), ("x_line", self.x_line or columns), ("line", self.line or projected), ("y_line", mixed),
        )  # fmt: skip

    @property
    def _x(self) -> HostArgument:
        columns, _, _ = self._sizes
        return _argument("x", "bf16", self.rows * (self.x_line or columns), reads=self.rows * columns)

    @property
    def _projected(self) -> HostArgument:
        _, projected, _ = self._sizes
        return _argument("projected", "bf16", self.rows * (self.line or projected), reads=self.rows * projected)

    @property
    def _y(self) -> HostArgument:
        _, _, mixed = self._sizes
        return _argument("y", "bf16", self.rows * mixed, writes=self.rows * mixed)


def output_gate(shape: LayerShape, rows: int, line: int) -> HostCall:
    """The step that multiplies attention's output by its gate; `line`: elements from one row of QKV to the next."""
    columns = shape.heads * shape.d
    moved = rows * columns
    arguments = (
        _argument("gate", "bf16", rows * line, reads=moved),
        _argument("y", "bf16", moved, reads=moved, writes=moved),
    )
    parameters = ("rows", rows), ("columns", columns), ("first", shape.heads_size), ("line", line)
    return HostCall("output_gate", parameters, arguments)


def norm_rope(
    shape: LayerShape, tokens: int, context: int, *, line: int, table: int, tables: int, epsilon: float
) -> HostCall:
    """The step that normalises and turns the queries and keys of a chunk.

    Args:
        shape: the layer's sizes.
        tokens: rows of the chunk.
        context: positions of a layer's cache, and of a rotary table.
        line: elements from one row of QKV to the next.
        table: the rotary table that turns them.
        tables: how many rotary tables there are.
        epsilon: of the QK-norm.
    """
    d, heads, kv_heads = shape.d, shape.heads, shape.kv_heads
    queries, kept = tokens * heads * d, tokens * 2 * kv_heads * d
    weights, rows = sum(shape.qk_norm_sizes), 2 * kv_heads * shape.row_bytes
    norms = [_argument("norms", "bf16", weights, reads=weights)] * shape.qk_norm
    parameters = (
        ("tokens", tokens), ("heads", heads), ("kv_heads", kv_heads), ("head_size", d), ("context", context),
        ("line", line), ("table", table), ("tables", tables), ("qk_norm", shape.qk_norm + shape.norm_of_all_heads),
        ("epsilon", float(epsilon)), ("int8", int(shape.int8_cache)),
    )  # fmt: skip
    arguments = (
        _argument("qkv", "bf16", tokens * line, reads=queries + kept),
        _argument("rotary", "bf16", tables * context * d, reads=tokens * d),
        *norms,
        _argument("q", "bf16", queries, writes=queries),
        _argument("cache", "bf16", context * 2 * kv_heads * d, writes=kept),
        *[_argument("int8_rows", "u8", context * rows, writes=tokens * rows)] * shape.int8_cache,
    )
    return HostCall("norm_rope", parameters, arguments)


def _argument(name: str, dtype: str, elements: int, *, reads: int = 0, writes: int = 0) -> HostArgument:
    """An argument of `elements` elements, of which `reads` are read and `writes` written."""
    kind = Type((elements,), dtype)
    return HostArgument(HostBuffer(name, kind), reads * kind.item_bytes, writes * kind.item_bytes)
