# SPDX-License-Identifier: Apache-2.0
"""The program of a chunk of a prompt: its tokens through all layers, operator by operator.

    rms_norm (host), then for some layers at a time
        dequant_engine, the weights of these layers; in each layer
            gemm (QKV) -> norm_rope (host) -> flow_qkv (-> output_gate, host) -> gemm (output)
            -> residual and norm (host) -> gemm (gate, up), gemm (down) -> residual and norm of the next layer (host)
        in a layer that keeps a state, gemm -> mixer (host) -> gemm (output) in their place, where the mixer of a gated
        delta rule may be before_delta (host) -> gated_delta -> after_delta (host)

Each design is an array of its own, and a change of array costs more than any of the host's steps: each layer has two,
to attention and back, and each group of up to four layers that are dequantised together has two more, three if some of
its weights have 8 bits and some 4. One array computes all products (designs/gemm.py).

**Buffers of a chunk**, bf16 but for the residual stream; for all layers the same:

    hidden     [tokens][D]            the embeddings; host
    residual   [tokens][D] f32        the residual stream; host
    x          [tokens][x line]       the stream, normalised (or as it is, where a layer's parts have no norm before
                                      them: then the first is `hidden`): A of QKV, and of gate and up
    qkv        [tokens][line]         products of H + 2 G heads, and of an output's gate
    mixed      [tokens][line]         products before a state
    tokens, states, delta             what the array's delta rule reads and makes (designs/gated_delta.py)
    q          [tokens][H][d]         queries, normalised and turned; keys and values go to the cache
    context    [tokens][line]         attention's output [H][d], or what a state gives: A of the output projection
    attended   [tokens][line]         its product
    activated  [tokens][I]            act(gate) * up: A of down
    update     [tokens][line]         its product
    panels     dequantised weights (B) of the layers of a group

A product with fewer columns than a megatile is filled up to a megatile's columns (its line is as long) by whatever lies
behind its weights; nobody reads the extra columns. A GEMM reads K, padded to 256, elements of each row of A, however
long A's rows are (`Gemm.program`'s `line`): x, context and activated therefore go on behind their last row by the
elements that it lacks, which only have to be finite. With a bias of QKV, a column of its weight (designs/bias.py), a
line of x is K as padded, with a 1 behind its D elements that no step touches; without a bias, it is D. The same holds
of context and the output projection. The host's steps
skip the rows of a chunk that hold no token: there arrays multiply what earlier runs left, which is finite, and nobody
reads the results. Such rows have no keys: the cache is written for tokens only, and zeros follow them
(ops/npu/artifacts/program_record.h says why).

**The last layer** has to give only keys and values: a prompt's last token goes by the decode program, which has the LM
head, and needs nothing of the tokens before it but the cache. So the last layer ends with `norm_rope`, or with its
mixer. If the model gives logits of all tokens, it is like the others, and ends with the last norm, whose rows the host
multiplies by the LM head (ops/npu/run/decoder_layers.cc):

    normalised [tokens][D]            made; host

**The tokens of a block** see one another in both directions, as an image's do. A program of the kind `block` is for
exactly the block's tokens: its attention lets each of them see all keys up to the last one, as far back as a layer's
window goes. Everything else, the arrays included, is as in the kind `prefill`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import TILES, ceil_div
from flownpu.aie.designs.dequant_engine import DequantEngine
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.designs.gemm import Gemm
from flownpu.aie.programs.call import ArtifactCall, fixed_call, moving_call
from flownpu.aie.programs.call_family import CallSweep
from flownpu.aie.programs.decoder_shape import DecoderBuffers
from flownpu.aie.programs.host import NormOfRows, StateMixer, norm_rope, output_gate
from flownpu.aie.programs.program import BF16_BYTES, Program, ProgramWriter, View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.aie.designs.decode_layer.call import CalledLayer
    from flownpu.aie.designs.decode_layer.shape import Projection
    from flownpu.aie.programs.call import HostCall
    from flownpu.aie.programs.cost import Prices
    from flownpu.aie.programs.decoder_shape import DecoderShape

# Layers that are dequantised together. n of them need 2 + 2 / n changes of array each, so more than a few save little.
_MOST_LAYERS = 4
# The most bytes of dequantised weights of a group: as much again as a small model.
_MOST_BYTES = 1 << 29
# Tokens of a call of attention; a chunk's calls are one dispatch. They are whole rounds of the array (block x columns /
# KV heads is 128 or a divisor of it in the models there are), between which attention waits anyway.
_ATTENDED = 128


def prefill_program(
    decoder: DecoderShape,
    target: str,
    context: int,
    tokens: int,
    weights: str = "bf16",
    *,
    block: bool = False,
    calls: dict[tuple[str, str], ArtifactCall] | None = None,
    prices: Prices | None = None,
) -> Program:
    """The program of a chunk of `tokens` tokens, with caches of `context` positions; chunks.py sets its `fewest`.

    Args:
        decoder: the decoder's sizes.
        target: npu1 or npu2.
        context: positions of a layer's cache.
        tokens: rows of the chunk.
        weights: the type of the weights that GEMM multiplies by, bf16 or bfp16.
        block: whether the tokens are a block, which see one another.
        calls: calls of the decoder's other chunks with this context, by array and name, which this one uses rather than
            make them again; its own are added.
        prices: by which a gated delta rule goes to the array or to the host; None: to the host.

    Raises:
        ValueError: a design does not take the sizes, or the cache has fewer positions than the chunk tokens.
    """
    if tokens > context:
        raise ValueError(f"expected a context of {tokens} or more, got {context}")
    made = partial(_Chunk, decoder, target, context, tokens, weights, block, {} if calls is None else calls)
    programs = [made().program()]
    if prices is None or not decoder.has_delta_rule:
        return programs[0]
    with suppress(ValueError):  # the array has no place for the heads
        programs.append(made(delta_on_array=True).program())
    return fastest(programs, prices)


def fastest(programs: Sequence[Program], prices: Prices) -> Program:
    """The program that is predicted to take the least time for a prompt's first chunk."""
    return min(programs, key=lambda program: prices.of(program, 0).total)


@dataclass
class _Chunk:
    decoder: DecoderShape
    target: str
    context: int
    tokens: int
    weights: str
    block: bool
    calls: dict[tuple[str, str], ArtifactCall]
    delta_on_array: bool = False
    layer: int = 0

    def __post_init__(self) -> None:
        shape = self.shape = self.decoder.shape
        self.all_logits = self.decoder.model.all_logits
        self.buffers = DecoderBuffers(self.decoder, self.context)
        self.writer = ProgramWriter(self.buffers.constants())
        self.gemm = Gemm(self.target, self.weights, shape.activation)
        self.x_line = shape.line if shape.qkv_bias else shape.hidden
        self.lines = {"x": self.x_line} | ({"context": self.buffers.context_line} if shape.output_bias else {})
        self.buffers.fill_ones(self.writer)
        # The beginning of each projection's weights in a layer's part of `panels`, and the end of that part.
        self.panels = {}
        for keeps_state in {layer.keeps_state for layer in self.decoder.layers}:
            parts = shape.own_projections(keeps_state=keeps_state)
            sizes = [self._engine(part).buffers[1].type.bytes for part in parts]
            self.panels[keeps_state] = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
        self.panels_of_layer = max(places[-1] for places in self.panels.values())
        self.group = max(1, min(_MOST_LAYERS, _MOST_BYTES // self.panels_of_layer))

    def program(self) -> Program:
        given = self.writer.rows("hidden", self.tokens, self.shape.hidden)
        if self.shape.norms_before:
            self._step(self._norm("rms_norm").call(), "hidden", self.buffers.norm(0, self.shape.entry_norms - 1), "x")
        last = len(self.decoder.layers) - 1
        for self.layer in range(last + 1):
            if self.layer % self.group == 0:
                self._dequantise(last)
            ends = self.layer == last and not self.all_logits
            if self.own.keeps_state:
                self._multiply(0, "x", "mixed")
                self._mix()
            else:
                self._multiply(0, "x" if self.layer or self.shape.norms_before else "hidden", "qkv")
                self._norm_rope()
            if ends:
                break
            if not self.own.keeps_state:
                self._flow_qkv()
            self._multiply(1, "context", "attended")
            self._add("attended", self.buffers.norm(self.layer, self.shape.entry_norms))
            if self.shape.experts:
                self._experts("normalised" if self.layer == last else "x")
                continue
            self._multiply(2, "x", "activated")
            self._multiply(3, "activated", "update")
            self._add("update", self.buffers.norm(self.layer + 1), "normalised" if self.layer == last else "x")
        made = self.writer.rows("normalised", self.tokens, self.shape.hidden, self.x_line) if self.all_logits else None
        return Program(
            "block" if self.block else "prefill", self.decoder.attributes, self.tokens,
            self.tokens if self.block else 1, self.context, self.buffers.layout, self.writer.buffers, given, made,
            tuple(self.writer.steps),
        )  # fmt: skip

    @property
    def own(self) -> CalledLayer:
        """The layer that is written."""
        return self.decoder.layers[self.layer]

    def _once(self, call: ArtifactCall) -> ArtifactCall:
        """An equal call of another layer or chunk, if there is one, so that its plan is recorded and checked once."""
        return self.calls.setdefault((call.array, call.name), call)

    def _step(self, call: ArtifactCall | HostCall, *views: View | str, offset: int = 0) -> None:
        if isinstance(call, ArtifactCall):
            call = self._once(call)
        self.writer.step(call, f"layer {self.layer}", *views, offset=offset)

    # --- The residual stream: the host's ------------------------------------------------------------------------------

    def _add(self, update: str, weight: View, normalised: str = "x") -> None:
        """Add the update to the stream, normalised first where there are post-norms, and normalise the sum."""
        first = self.layer == 0 and update == "attended"
        operator = "rms_norm_add" if self.shape.post_norms else "add_rms_norm"
        if not self.shape.norms_before and normalised == "x":
            operator = "rms_norm_sum"
        norm = self._norm(operator, self._line(self.shape.hidden))
        before = "hidden" if first else "residual"
        self._step(norm.call("bf16" if first else "f32"), update, before, weight, "residual", normalised)

    def _experts(self, normalised: str) -> None:
        """The host's experts, and the norm of the next layer."""
        call = self.buffers.host_experts(self.layer).compute(self.tokens, x_line=self.x_line, y_line=self.x_line)
        self._step(call, "x", "residual", self.buffers.norm(self.layer + 1), normalised)

    def _norm(self, operator: str, x_line: int = 0) -> NormOfRows:
        shape = self.shape
        return NormOfRows(
            operator, self.tokens, shape.hidden, self.decoder.model.epsilon, x_line=x_line, y_line=self.x_line,
            weight_line=shape.line,
        )  # fmt: skip

    # --- Projections --------------------------------------------------------------------------------------------------

    def _engine(self, projection: Projection) -> ArtifactCall:
        """The call that dequantises a projection."""
        engine = DequantEngine(self.target, self.weights, projection.planes)
        n, k, gated = projection.rows, projection.columns, projection.gated
        make: Any = partial(engine.program, n, k, gated=gated, interleaved=gated)
        return self._once(fixed_call("dequant_engine", engine.name, f"m{n}-k{k}{'-gated' * gated}", make, self.context))

    def _dequantise(self, last: int) -> None:
        """Dequantise the weights of this layer's group; of a last layer without logits, only those of QKV.

        Those of 8 bits, which have an array of their own, come after the others.
        """
        layers = range(self.layer, min(self.layer + self.group, last + 1))
        for eight_bits in (False, True):
            for layer in layers:
                of = self.decoder.layers[layer]
                parts = self.shape.own_projections(of.eight_bits, keeps_state=of.keeps_state)
                for number, part in enumerate(parts if layer < last or self.all_logits else parts[:1]):
                    if part.eight_bits == eight_bits:
                        views = self.buffers.weights(layer, number), self._panels(layer, number)
                        self.writer.step(self._engine(part), f"layer {layer}", *views)

    def _panels(self, layer: int, number: int) -> View:
        places = self.panels[self.decoder.layers[layer].keeps_state]
        return View("panels", layer % self.group * self.panels_of_layer + places[number])

    def _line(self, n: int) -> int:
        """Columns that a product of n columns without gating has: at least a megatile's."""
        return max(n, self.gemm.plain().width)

    def _multiply(self, number: int, source: str, product: str) -> None:
        gemm, projection = self.gemm, self.shape.of_bits(0, keeps_state=self.own.keeps_state)[number]
        k, gated = projection.columns, projection.gated
        n = projection.rows if gated else self._line(projection.rows)
        line = self.lines.get(source, k)
        array = f"gemm-{self.weights}-{gemm.epilogue}-{gemm.m}x{gemm.n}-{gemm.e_y}x{gemm.e_x}"
        make = partial(gemm.program, self.tokens, k, n, line=line, plain=not gated)
        name = f"m{self.tokens}-k{k}{f'-{line}' * (line != k)}-n{n}{'-gated' * gated}"
        call = fixed_call("gemm", array, name, make, self.context)
        self._step(call, source, self._panels(self.layer, number), product)

    # --- Attention ----------------------------------------------------------------------------------------------------

    def _norm_rope(self) -> None:
        """The host's step: rotated queries go into a separate buffer, rotated keys and values into the cache."""
        decoder, shape = self.decoder, self.shape
        call = norm_rope(
            shape, self.tokens, self.context, line=self._line(shape.projections[0].rows),
            table=self.own.table, tables=decoder.model.tables,
            epsilon=decoder.model.epsilon,
        )  # fmt: skip
        norms = [self.buffers.qk_norm(self.layer)] * shape.qk_norm
        int8_rows = [self.buffers.read_by_token(self.layer)] * shape.int8_cache
        self._step(call, "qkv", "rotary", *norms, "q", self.buffers.cache(self.layer), *int8_rows)

    def _flow_qkv(self) -> None:
        """Attend part by part: the words of a call for all positions grow with its tokens squared (call_family.py)."""
        shape, window = self.shape, self.own.window or 0
        flow = FlowQKV(
            self.target, shape.heads, shape.kv_heads, shape.d, softcap=shape.softcap, has_sinks=shape.has_sinks
        )
        item = TILES * flow.queries
        # In a block all queries see keys up to the last token's, so a block is one part.
        part = self.tokens if self.block else min(ceil_div(_ATTENDED, item) * item, self.tokens)
        line = shape.heads * shape.d
        o_line = self.lines.get("context", line)
        for start in range(0, self.tokens, part):
            tokens = min(part, self.tokens - start)
            attend = partial(
                flow.program, tokens, capacity=self.context, window=window or None, causal=not self.block,
                scale=self.decoder.attention.scale, o_line=o_line,
            )  # fmt: skip
            sweeps = [
                CallSweep(top, tokens - top if self.block else item, tokens, window) for top in range(0, tokens, item)
            ]
            call = moving_call(
                "flow_qkv", f"flow_qkv-{self.decoder.name}", f"tokens{tokens}-window{window}{'-block' * self.block}",
                attend, self.target, self.context - tokens + 1, flow.keys, sweeps,
            )  # fmt: skip
            q, context = (View(name, start * n * BF16_BYTES) for name, n in (("q", line), ("context", o_line)))
            sinks = self.buffers.sinks(self.layer)
            self._step(call, q, self.buffers.cache(self.layer), context, *sinks, offset=start)
        if shape.output_gate:
            qkv = self._line(shape.projections[0].rows)
            self._step(output_gate(shape, self.tokens, qkv), "qkv", "context")

    # --- States -------------------------------------------------------------------------------------------------------

    def _mix(self) -> None:
        """The step between the projections of a layer that keeps a state, by the host, or a part of it by the array."""
        rows = self.shape.state_projections[0].rows
        host = StateMixer(self.decoder.model, self.layer, self.tokens, x_line=self.x_line, line=self._line(rows))
        if not self.delta_on_array:
            self._step(host.call(), "x", "mixed", "context")
            return
        design = self.decoder.delta_design(self.target)
        name = f"gated_delta-h{design.heads}-{design.dk}x{design.dv}"
        make = partial(design.program, self.tokens)
        self._step(host.before_delta(design.line), "x", "mixed", "tokens", "states")
        call = fixed_call("gated_delta", name, f"tokens{self.tokens}", make, self.context)
        self._step(call, "tokens", "states", "delta", "states")
        self._step(host.after_delta(), "mixed", "delta", "states", "context")
