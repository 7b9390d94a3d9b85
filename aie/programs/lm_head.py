# SPDX-License-Identifier: Apache-2.0
"""The LM head of a token where no call of `decode_layer` has it: the last norms and the product, a call each.

    residual     with post-norms rms_norm_add, then rms_norm; without, add_rms_norm
    fused_dqp    logits

x, which fused_dqp reads, is as long as the longest of its operands; beyond a row it holds what other steps left, which
must be finite.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from flownpu.aie.designs.common import BLOCK_COLUMNS, ceil_div
from flownpu.aie.designs.fused_dqp import FusedDQP
from flownpu.aie.designs.vector_operators import ResidualRMSNorm, RMSNorm
from flownpu.aie.programs.call import fixed_call
from flownpu.aie.programs.decoder_shape import DecoderBuffers, bits_name

if TYPE_CHECKING:
    from flownpu.aie.programs.decoder_shape import DecoderShape
    from flownpu.aie.programs.program import ProgramWriter, View

_TARGET, _TILES, _WHERE = "npu2", 32, "the LM head"


def add_lm_head(
    decoder: DecoderShape, context: int, writer: ProgramWriter, update: View | str, residual: View | str
) -> None:
    """Writes the steps from the last layer's results, two rows of hidden states, to `logits`."""
    buffers, shape, layers = DecoderBuffers(decoder, context), decoder.shape, len(decoder.layers)
    buffers.fill_ones(writer)

    def norm(operator: str, design: RMSNorm | ResidualRMSNorm, *views: View | str) -> None:
        make = partial(design.program, 1, decoder.model.epsilon)
        call = fixed_call(operator, f"{operator}-n{shape.hidden}-1", "row", make, context)
        writer.step(call, _WHERE, *views)

    added = ResidualRMSNorm(_TARGET, shape.hidden, shape.post_norms)
    if shape.post_norms:
        norm("rms_norm_add", added, update, residual, buffers.norm(layers, 0), "hidden")
        norm("rms_norm", RMSNorm(_TARGET, shape.hidden), "hidden", buffers.norm(layers, 1), "x")
    else:
        norm("add_rms_norm", added, update, residual, buffers.norm(layers, 0), "hidden", "x")

    head = decoder.head
    longest = max(part.columns for part in shape.projections if not part.gated)
    design = FusedDQP(_TARGET, ceil_div(longest, BLOCK_COLUMNS) * BLOCK_COLUMNS, _TILES)
    make = partial(design.program, head.rows, head.columns, planes=head.planes)
    array, name = (
        f"fused_dqp-{design.k_max}-{_TILES}-none",
        f"m{head.rows}-k{head.columns}{bits_name(head.eight_bits)}",
    )
    writer.step(fixed_call("fused_dqp", array, name, make, context), _WHERE, buffers.weights(layers), "x", "logits")
