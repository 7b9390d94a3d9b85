# SPDX-License-Identifier: Apache-2.0
"""The program of a token operator by operator, for decoders that no `decode_layer` takes; a dispatch for each step.

    rms_norm, then in each layer  fused_dqp (QKV) -> norm_rope -> flow_kv -> fused_dqp (output) -> residual
                                  -> fused_dqp (gate, up) -> fused_dqp (down) -> residual
    fused_dqp (LM head)
    residual                      with post-norms rms_norm_add, then rms_norm; without, add_rms_norm

Buffers are those of prefill.py, with one row. Those that fused_dqp reads, x, context and activated, are as long as the
longest of them. Beyond its own length each holds what other steps left, which must be finite; where their projections
have a bias, x and context have its 1 there.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import BLOCK_COLUMNS, ceil_div
from flownpu.aie.designs.flow_kv import FlowKV
from flownpu.aie.designs.fused_dqp import FusedDQP
from flownpu.aie.designs.norm_rope import NormRope
from flownpu.aie.designs.vector_operators import ResidualRMSNorm, RMSNorm
from flownpu.aie.programs.call import fixed_call, moving_call
from flownpu.aie.programs.call_family import CallSweep
from flownpu.aie.programs.decoder_shape import DecoderBuffers, bits_name
from flownpu.aie.programs.program import Program, ProgramWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.aie.designs.decode_layer.shape import Projection
    from flownpu.aie.iron.compat import Program as DesignProgram
    from flownpu.aie.programs.call import ArtifactCall
    from flownpu.aie.programs.decoder_shape import DecoderShape
    from flownpu.aie.programs.program import View


def operators_program(decoder: DecoderShape, target: str, context: int) -> Program:
    """The program of one token, with caches of `context` positions, a multiple of a chunk (`FlowKV.keys`).

    Raises:
        ValueError: a design does not take the sizes.
    """
    if decoder.shape.experts:
        raise ValueError("[fused_dqp] expected a dense feed-forward, got experts")
    if decoder.keeps_states or decoder.shape.output_gate:
        raise ValueError("[flow_kv] expected attention without a gate of its output in all layers")
    if decoder.shape.norm_of_all_heads or not decoder.shape.norms_before:
        raise ValueError("[norm_rope] expected norms of each head, and norms before attention and feed-forward")
    if decoder.shape.int8_cache:
        raise ValueError("[flow_kv] expected a KV cache in bf16, got one in int8: convert with --kv-dtype bf16")
    buffers = DecoderBuffers(decoder, context)
    writer = ProgramWriter(buffers.constants())
    steps = TokenSteps(decoder, target, context, writer)
    given = writer.rows("hidden", 1, decoder.shape.hidden)
    for layer in range(len(decoder.windows)):
        steps.layer(layer)
    steps.head("update", "residual")
    made = writer.rows("logits", 1, decoder.model.vocabulary)
    return Program(
        "decode", decoder.attributes, 1, 1, context, buffers.layout, writer.buffers, given, made, tuple(writer.steps)
    )


class TokenSteps:
    """Writes the steps of a decoder's layers, and of its LM head, for one token."""

    def __init__(self, decoder: DecoderShape, target: str, context: int, writer: ProgramWriter) -> None:
        self._decoder, self._shape, self._target, self._context = decoder, decoder.shape, target, context
        self._buffers, self._writer = DecoderBuffers(decoder, context), writer
        self._calls: dict[tuple[str, str], ArtifactCall] = {}
        self._where = ""
        self._buffers.fill_ones(writer)

    def layer(self, layer: int) -> None:
        """One layer: reads `hidden` (layer 0), or the layer before's `residual` and `update`; leaves these two."""
        self._where = f"layer {layer}"
        if layer == 0:
            self._norm("hidden", layer, self._shape.entry_norms - 1)
        else:
            self._add(layer, 0, "update", "residual", "hidden")
        qkv, output, gate_up, down = self._shape.of_bits(self._decoder.layers[layer].eight_bits)
        self._project(qkv, self._buffers.weights(layer, 0), "x", "qkv")
        self._attend(layer)
        self._project(output, self._buffers.weights(layer, 1), "context", "attended")
        self._add(layer, 1, "attended", "hidden", "residual")
        self._project(gate_up, self._buffers.weights(layer, 2), "x", "activated")
        self._project(down, self._buffers.weights(layer, 3), "activated", "update")

    def head(self, update: View | str, residual: View | str) -> None:
        """The last norms and the LM head, from the last layer's results."""
        self._where, layers = "the LM head", len(self._decoder.layers)
        self._add(layers, 0, update, residual, "hidden")
        self._project(self._decoder.head, self._buffers.weights(layers), "x", "logits")

    def _step(self, call: ArtifactCall, *views: View | str) -> None:
        # Equal calls of several layers are one call.
        self._writer.step(self._calls.setdefault((call.array, call.name), call), self._where, *views)

    # --- The residual stream ------------------------------------------------------------------------------------------

    def _add(self, layer: int, entry: int, update: View | str, before: View | str, after: str) -> None:
        """Adds after = before + update (normalised first, where there are post-norms) and x = norm(after)."""
        post_norms, first = self._shape.post_norms, entry * self._shape.entry_norms
        operator = "rms_norm_add" if post_norms else "add_rms_norm"
        design = ResidualRMSNorm(self._target, self._shape.hidden, post_norms)
        weight, made = self._buffers.norm(layer, first), [] if post_norms else ["x"]
        self._step(self._of_row(operator, design), update, before, weight, after, *made)
        if post_norms:
            self._norm(after, layer, first + 1)

    def _norm(self, source: str, layer: int, number: int) -> None:
        call = self._of_row("rms_norm", RMSNorm(self._target, self._shape.hidden))
        self._step(call, source, self._buffers.norm(layer, number), "x")

    def _of_row(self, operator: str, design: Any) -> ArtifactCall:
        make = partial(design.program, 1, self._decoder.model.epsilon)
        return self._fixed(operator, f"{operator}-n{self._shape.hidden}-1", "row", make)

    # --- Projections --------------------------------------------------------------------------------------------------

    def _project(self, projection: Projection, weight: View, source: str, product: str) -> None:
        m, k, gated = projection.rows, projection.columns, projection.gated
        others = [part for part in self._shape.projections if not part.gated]
        longest = max(part.columns for part in ([projection] if gated else others))
        epilogue = self._shape.activation if gated else "none"
        design = FusedDQP(self._target, _whole_blocks(longest), 32 if self._target == "npu2" else 16, epilogue)
        make = partial(design.program, m, k, interleaved=gated, planes=projection.planes)
        array, name = (
            f"fused_dqp-{design.k_max}-{design.tiles}-{epilogue}",
            f"m{m}-k{k}{bits_name(projection.eight_bits)}",
        )
        self._step(
            self._fixed("fused_dqp", array, name, make),
            weight, source, product,
        )  # fmt: skip

    # --- Attention ----------------------------------------------------------------------------------------------------

    def _attend(self, layer: int) -> None:
        """QK-norm and RoPE into q and the cache, then attention over it."""
        decoder, shape, cache = self._decoder, self._shape, self._buffers.cache(layer)
        table, window = decoder.layers[layer].table, decoder.windows[layer]
        design = NormRope(self._target, shape.heads, shape.kv_heads, shape.d, shape.qk_norm)
        turn = partial(
            design.program, 1, capacity=self._context, tables=decoder.model.tables, table=table,
            epsilon=decoder.model.epsilon,
        )  # fmt: skip
        norms = [self._buffers.qk_norm(layer)] * shape.qk_norm
        call = self._moving("norm_rope", "-qk" * shape.qk_norm, f"table{table}", turn)
        self._step(call, "qkv", "rotary", *norms, "q", cache)

        flow = FlowKV(
            self._target, shape.heads, shape.kv_heads, shape.d, softcap=shape.softcap, has_sinks=shape.has_sinks
        )

        def attend(position: int) -> DesignProgram:
            return flow.program(position + 1, self._context, window=window or None, scale=decoder.attention.scale)

        sweeps = [CallSweep(0, 1, 1, window)]
        call = self._moving("flow_kv", "", f"window{window}", attend, flow.keys, sweeps)
        self._step(call, "q", cache, "context", *self._buffers.sinks(layer))

    # --- Calls --------------------------------------------------------------------------------------------------------

    def _fixed(self, operator: str, array: str, name: str, make: Any) -> ArtifactCall:
        return fixed_call(operator, array, name, make, self._context)

    def _moving(
        self, operator: str, norms: str, name: str, make: Any, keys: int = 1, sweeps: Sequence[CallSweep] = ()
    ) -> ArtifactCall:
        array = f"{operator}-{self._decoder.name}{norms}-1"
        return moving_call(operator, array, f"token-{name}", make, self._target, self._context, keys, sweeps)


def _whole_blocks(columns: int) -> int:
    return ceil_div(columns, BLOCK_COLUMNS) * BLOCK_COLUMNS
