# SPDX-License-Identifier: Apache-2.0
"""The program of a token through layers of which some keep a state, over one array of the design `decode_layer`.

The host computes the mixers of these layers between two calls of the array; whole layers with attention are in a call.

    decode_layer (up to the first projection of the first such layer)
    for each such layer   add_rms_norm (host), mixer (host)
                          -> decode_layer (from its output projection to the next one's first projection, or to the
                          LM head)

    state      bf16      as in decode.py; `mixed` has what the host reads, `context` what it gives
    stream, x  f32, bf16 the host's residual stream [D] in such a layer, and its norm, which mixers may read; host
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from flownpu.aie.designs.decode_layer.call import AFTER_STATE, BEFORE_STATE, CalledLayer
from flownpu.aie.programs.call import moving_call
from flownpu.aie.programs.call_family import CallSweep
from flownpu.aie.programs.decoder_shape import DecoderBuffers, bits_name
from flownpu.aie.programs.host import NormOfRows, StateMixer
from flownpu.aie.programs.lm_head import add_lm_head
from flownpu.aie.programs.program import BF16_BYTES, Program, ProgramWriter, View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.aie.designs.decode_layer.design import DecodeLayer
    from flownpu.aie.iron.compat import Program as DesignProgram
    from flownpu.aie.programs.call import ArtifactCall
    from flownpu.aie.programs.decoder_shape import DecoderShape


def states_program(decoder: DecoderShape, design: DecodeLayer, target: str, context: int) -> Program:
    """The program of one token, with caches of `context` positions.

    Raises:
        ValueError: the design does not take the sizes.
    """
    if target != "npu2":
        raise ValueError(f"[decode_layer] expected npu2, got {target}")
    return _Token(decoder, design, context).program()


class _Token:
    """Writes the program."""

    def __init__(self, decoder: DecoderShape, design: DecodeLayer, context: int) -> None:
        self._decoder, self._design, self._context = decoder, design, context
        self._buffers = DecoderBuffers(decoder, context)
        self._writer = ProgramWriter(self._buffers.constants())
        self._calls: dict[str, ArtifactCall] = {}

    def program(self) -> Program:
        decoder, shape, writer = self._decoder, self._decoder.shape, self._writer
        states = [number for number, layer in enumerate(decoder.layers) if layer.keeps_state]
        last = decoder.layers[-1]
        with_head = self._design.takes_head(decoder.head, last.eight_bits)
        first, parts = 0, list[CalledLayer]()
        for number, layer in enumerate(decoder.layers):
            if number not in states:
                parts.append(layer)
                continue
            self._call(first, [*parts, decoder.part(number, BEFORE_STATE)])
            self._mix(number)
            first, parts = number, [decoder.part(number, AFTER_STATE)]
        self._call(first, parts, head=with_head)
        if not with_head:
            add_lm_head(decoder, self._context, writer, self._region("update"), self._region("hidden"))
        # The second row is the update, which is zero, because nothing is added to an embedding.
        given = writer.rows("state", 2, shape.hidden, shape.line)
        made = writer.rows("logits", 1, decoder.model.vocabulary, decoder.head.rows)
        return Program(
            "decode", decoder.attributes, 1, 1, self._context, self._buffers.layout, writer.buffers, given, made,
            tuple(writer.steps),
        )  # fmt: skip

    def _call(self, first: int, parts: Sequence[CalledLayer], *, head: bool = False) -> None:
        """A call of parts of the layers from `first` on; equal calls of several layers are one."""
        names = [part.part.partition(" ")[0] or f"window{part.window or 0}-table{part.table}" for part in parts]
        bits = [bits_name(part.eight_bits) for part in parts]
        name = "+".join(map("".join, zip(names, bits, strict=True))) + "-head" * head
        if name not in self._calls:
            sweeps = [CallSweep(0, 1, 1, part.window or 0) for part in parts if not part.part]
            self._calls[name] = moving_call(
                "decode_layer", self._decoder.array_of_layers(self._design.way), name,
                partial(self._layers, tuple(parts), head), "npu2", self._context, self._design.attention.keys, sweeps,
            )  # fmt: skip
        buffers = self._buffers
        cached = [number for number, part in enumerate(parts, first) if not part.part]
        of_cache, again = list[View | str](), list[View | str]()
        if cached:
            of_cache = ["rotary", buffers.cache(cached[0])]
            again = [buffers.read_by_token(cached[0])] * self._design.byte_arguments(self._context)
        self._writer.step(
            self._calls[name], f"layers {first}-{first + len(parts) - 1}",
            buffers.weights(first, int(parts[0].part == AFTER_STATE)), buffers.norm(first), *of_cache, "state",
            *again, *["logits"] * head,
        )  # fmt: skip

    def _layers(self, parts: Sequence[CalledLayer], head: bool, position: int) -> DesignProgram:
        decoder = self._decoder
        return self._design.program(
            position, self._context, layers=parts, vocabulary=decoder.head.rows * head,
            head_eight_bits=decoder.head.eight_bits, epsilon=decoder.model.epsilon, scale=decoder.attention.scale,
            tables=decoder.model.tables,
        )  # fmt: skip

    def _mix(self, layer: int) -> None:
        """The host's steps of a layer that keeps a state."""
        model, where = self._decoder.model, f"layer {layer}"
        norm = NormOfRows("add_rms_norm", 1, model.hidden, model.epsilon)
        weight = self._buffers.norm(layer)
        views = self._region("update"), self._region("hidden"), weight, "stream", "x"
        self._writer.step(norm.call("bf16"), where, *views)
        call = StateMixer(model, layer, 1).call()
        self._writer.step(call, where, "x", self._region("mixed"), self._region("context"))

    def _region(self, name: str) -> View:
        return View("state", self._design.regions[name].offset * BF16_BYTES)
