# SPDX-License-Identifier: Apache-2.0
"""The program of a token through layers with experts, over one array of the design `decode_layer`.

    in each layer  decode_layer (attention, up to the output projection) -> add_rms_norm, route (host)
                   -> decode_layer (the chosen experts, designs/decode_layer/experts.py) -> add_experts (host)
    decode_layer (LM head)

The host has the residual stream, in f32; the array reads it as `hidden`, and adds nothing to it (`update` stays zeros).
Or the host computes the experts, which `decode.py` takes where that is predicted to be faster:

    in each layer  decode_layer (attention, up to the output projection) -> add_rms_norm, experts (host)

    state    bf16  as in decode.py
    residual f32   the residual stream; host
    experts  u8    [layer][expert][gate and up | down]
    chosen, shares [experts of a token]: what `route` gives; host
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from flownpu.aie.programs.call import ArtifactCall, fixed_call, moving_call
from flownpu.aie.programs.call_family import CallSweep, Choices
from flownpu.aie.programs.decoder_shape import DecoderBuffers, bits_name
from flownpu.aie.programs.host import NormOfRows
from flownpu.aie.programs.lm_head import add_lm_head
from flownpu.aie.programs.program import BF16_BYTES, Buffer, Program, ProgramWriter, Role, View

if TYPE_CHECKING:
    from flownpu.aie.designs.decode_layer.call import CalledLayer
    from flownpu.aie.designs.decode_layer.design import DecodeLayer
    from flownpu.aie.iron.compat import Program as DesignProgram
    from flownpu.aie.programs.call import HostCall
    from flownpu.aie.programs.decoder_shape import DecoderShape


def experts_program(
    decoder: DecoderShape, design: DecodeLayer, target: str, context: int, *, on_array: bool
) -> Program:
    """The program of one token, with caches of `context` positions; `on_array`: whether the array computes the experts.

    Raises:
        ValueError: the design does not take the sizes.
    """
    if target != "npu2":
        raise ValueError(f"[decode_layer] expected npu2, got {target}")
    return _Token(decoder, design, context, on_array=on_array).program()


class _Token:
    """Writes the program."""

    def __init__(self, decoder: DecoderShape, design: DecodeLayer, context: int, *, on_array: bool) -> None:
        self._decoder, self._design, self._context, self._on_array = decoder, design, context, on_array
        self._buffers = DecoderBuffers(decoder, context)
        self._array = decoder.array_of_layers(design.way)
        constants = self._buffers.constants()
        if on_array:
            constants.append(Buffer("experts", Role.CONSTANT, decoder.experts_before(len(decoder.layers))))
        self._writer = ProgramWriter(constants)
        self._calls: dict[str, ArtifactCall] = {}

    def program(self) -> Program:
        decoder, shape, writer = self._decoder, self._decoder.shape, self._writer
        if shape.output_bias:
            writer.fill("state", self._design.state_size, self._design.one)
        layers = len(decoder.windows)
        for layer in range(layers):
            self._attend(layer)
            self._normalise(layer)
            (self._route if self._on_array else self._compute)(layer)
        if self._design.takes_head(decoder.head):
            head = fixed_call("decode_layer", self._array, "head", self._head, self._context)
            constants = self._buffers.weights(layers), self._buffers.norm(layers)
            writer.step(head, "the LM head", *constants, "state", "logits")
        else:
            add_lm_head(decoder, self._context, writer, self._region("update"), "state")
        # The second row is the update, which is and stays zero.
        given = writer.rows("state", 2, shape.hidden, shape.line)
        made = writer.rows("logits", 1, decoder.model.vocabulary, decoder.head.rows)
        return Program(
            "decode", decoder.attributes, 1, 1, self._context, self._buffers.layout, writer.buffers, given, made,
            tuple(writer.steps),
        )  # fmt: skip

    def _attend(self, layer: int) -> None:
        own, window = self._decoder.layers[layer], self._decoder.windows[layer]
        call = self._once(
            f"window{window}-table{own.table}{bits_name(own.eight_bits)}",
            lambda name: moving_call(
                "decode_layer", self._array, name, partial(self._layer, own), "npu2", self._context,
                self._design.attention.keys, [CallSweep(0, 1, 1, window)],
            ),
        )  # fmt: skip
        buffers = self._buffers
        again = [buffers.read_by_token(layer)] * self._design.byte_arguments(self._context)
        self._writer.step(
            call, f"layer {layer}", buffers.weights(layer), buffers.norm(layer), "rotary", buffers.cache(layer),
            "state", *again,
        )  # fmt: skip

    def _normalise(self, layer: int) -> None:
        """Add attention's result to the residual stream, and normalise the sum."""
        shape = self._decoder.shape
        call = NormOfRows("add_rms_norm", 1, shape.hidden, self._decoder.model.epsilon).call("f32" if layer else "bf16")
        before = "residual" if layer else "state"
        self._host(call, layer, self._region("attended"), before, self._buffers.norm(layer, 1), "residual", "normal")

    def _compute(self, layer: int) -> None:
        """The host's experts."""
        call = self._buffers.host_experts(layer).compute(1, normalised=False)
        self._host(call, layer, "normal", "residual", "state")

    def _route(self, layer: int) -> None:
        """The array's experts."""
        host, shape = self._buffers.host_experts(layer), self._decoder.shape
        eight_bits = self._decoder.layers[layer].eight_bits
        self._host(host.route(), layer, "normal", "chosen", "shares")
        choices = Choices.of(host.feed_forward.experts, shape.experts)
        call = self._once(
            f"experts{bits_name(eight_bits)}",
            lambda name: ArtifactCall(
                "decode_layer", self._array, name, choices, partial(self._experts, choices, eight_bits), moves=True
            ),
        )
        weights = View("experts", self._decoder.experts_before(layer))
        views = weights, self._buffers.norm(layer, 1), "state"
        self._writer.step(call, f"layer {layer}, experts", *views, choices="chosen")
        self._host(host.add(shape.line), layer, self._region("answers"), "shares", "residual", "state")

    def _host(self, call: HostCall, layer: int, *views: View | str) -> None:
        self._writer.step(call, f"layer {layer}", *views)

    def _region(self, name: str) -> View:
        return View("state", self._design.regions[name].offset * BF16_BYTES)

    # --- Calls --------------------------------------------------------------------------------------------------------

    def _once(self, name: str, make: Any) -> ArtifactCall:
        """Equal calls of several layers are one."""
        if name not in self._calls:
            self._calls[name] = make(name)
        return self._calls[name]

    def _layer(self, layer: CalledLayer, position: int) -> DesignProgram:
        model = self._decoder.model
        return self._design.program(
            position, self._context, layers=[layer], epsilon=model.epsilon, scale=self._decoder.attention.scale,
            tables=model.tables,
        )  # fmt: skip

    def _head(self) -> DesignProgram:
        head, epsilon = self._decoder.head, self._decoder.model.epsilon
        return self._design.program(
            0, self._context, layers=(), vocabulary=head.rows, head_eight_bits=head.eight_bits, epsilon=epsilon
        )

    def _experts(self, choices: Choices, eight_bits: int, sample: int) -> DesignProgram:
        epsilon = self._decoder.model.epsilon
        return self._design.of_experts(choices.chosen(sample), choices.experts, epsilon=epsilon, eight_bits=eight_bits)
