# SPDX-License-Identifier: Apache-2.0
"""The program of a token: all layers and the LM head, in a call or a few of `decode_layer` (designs/decode_layer.py).

state   bf16  what passes between the phases of a layer; it begins with the residual stream and the update that is
to be added to it, a line each: the token's embedding, and zeros
logits  bf16  [vocabulary]
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from flownpu.aie.call_family import CallSweep
from flownpu.aie.designs.decode_layer import DecodeLayer, Layer
from flownpu.aie.programs.call import moving_call
from flownpu.aie.programs.decoder import DecoderBuffers
from flownpu.aie.programs.program import Program, ProgramWriter

if TYPE_CHECKING:
    from flownpu.aie.iron_compat import Program as DesignProgram
    from flownpu.aie.programs.call import ArtifactCall
    from flownpu.aie.programs.decoder import Decoder

__all__ = ["decode_program"]


def decode_program(decoder: Decoder, target: str, context: int) -> Program:
    """The program of one token, with caches of `context` positions, a multiple of a chunk.

    Raises:
        ValueError: the target is not npu2, or a layer and the LM head are more than a call takes.
    """
    if target != "npu2":
        raise ValueError(f"[decode_layer] expected npu2, got {target}")
    shape, buffers = decoder.shape, DecoderBuffers(decoder, context)
    writer, first = ProgramWriter(buffers.constants()), 0
    for count in DecodeLayer(shape).calls(len(decoder.windows), decoder.vocabulary):
        end = first + count
        last = end == len(decoder.windows)
        layers = f"layer {first}" if count == 1 else f"layers {first}-{end - 1}"
        writer.step(
            _call(decoder, context, first, end, decoder.vocabulary * last), layers,
            buffers.weights(first), buffers.norm(first), "rotary", buffers.cache(first), "state", *["logits"] * last,
        )  # fmt: skip
        first = end
    # The second row is the update: nothing is to be added to an embedding.
    given = writer.rows("state", 2, shape.hidden, shape.line)
    made = writer.rows("logits", 1, decoder.vocabulary)
    return Program(
        "decode", decoder.attributes, 1, 1, context, buffers.layout, writer.buffers, given, made, tuple(writer.steps)
    )


def _call(decoder: Decoder, context: int, first: int, end: int, vocabulary: int) -> ArtifactCall:
    """The layers first .. end - 1; with a vocabulary the LM head, too."""
    shape, norms = decoder.shape, "-post" * decoder.shape.post_norms + "-qk" * decoder.shape.qk_norm
    windows = decoder.windows[first:end]
    return moving_call(
        "decode_layer",
        f"decode_layer-{shape.hidden}-{shape.feed_forward}-{decoder.name}-{shape.activation}{norms}",
        f"layers{first}-{end - 1}" + "-head" * bool(vocabulary),
        partial(_layers, decoder, context, first, end, vocabulary),
        "npu2", context, shape.keys, [CallSweep(0, 1, 1, window) for window in windows],
    )  # fmt: skip


def _layers(decoder: Decoder, context: int, first: int, end: int, vocabulary: int, position: int) -> DesignProgram:
    kinds = zip(decoder.windows[first:end], decoder.tables[first:end], strict=True)
    layers = [Layer(window or None, table) for window, table in kinds]
    return DecodeLayer(decoder.shape).program(
        position, context, layers=layers, vocabulary=vocabulary, epsilon=decoder.epsilon, scale=decoder.scale,
        tables=decoder.table_count,
    )  # fmt: skip
