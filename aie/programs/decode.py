# SPDX-License-Identifier: Apache-2.0
"""The program of a token: all layers and the LM head, in a call or a few of the design `decode_layer`.

    state   bf16  what passes between the phases of a layer; it begins with the residual stream and the update that is
                  to be added to it, a line each: the token's embedding, and zeros
    logits  bf16  [vocabulary], and rows that fill its last blocks

Among the ways of attention that take the decoder, the one that the cost model predicts to be fastest is written. Where
there is none, and on npu1, the decoder is the host's: operator by operator a token would be some 260 changes of array,
0.7 s as predicted. An LM head that does not fit into a call beside a layer: lm_head.py; layers with experts:
decode_experts.py; layers that keep states: decode_states.py.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from flownpu.aie.cost.chips import CHIPS
from flownpu.aie.designs.decode_layer.design import WAYS, DecodeLayer
from flownpu.aie.programs.call import ArtifactCall, moving_call
from flownpu.aie.programs.call_family import CallSweep
from flownpu.aie.programs.cost import Prices
from flownpu.aie.programs.decode_experts import experts_program
from flownpu.aie.programs.decode_states import states_program
from flownpu.aie.programs.decoder_shape import DecoderBuffers
from flownpu.aie.programs.dispatches import MOST_SECONDS
from flownpu.aie.programs.lm_head import add_lm_head
from flownpu.aie.programs.program import BF16_BYTES, Program, ProgramWriter, View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.aie.iron.compat import Program as DesignProgram
    from flownpu.aie.programs.decoder_shape import DecoderShape

# Ways to compute a token: `decode_layer` with each way of attention; where the feed-forward is a mixture, the same with
# experts that the host computes.
HOST_EXPERTS = {f"{way}, experts by the host": way for way in WAYS}
DECODE_WAYS = (*WAYS, *HOST_EXPERTS)


class DecodeChoice(NamedTuple):
    """The program of a token, its way (one of `DECODE_WAYS`), and the reasons for refusing other ways."""

    program: Program
    way: str
    refused: list[str]


def decode_program(
    decoder: DecoderShape,
    target: str,
    context: int,
    ways: Sequence[str] = DECODE_WAYS,
    prices: Prices | None = None,
) -> DecodeChoice:
    """The program of one token, with caches of `context` positions, a multiple of a chunk (`FlowKV.keys`).

    Args:
        decoder: the decoder's sizes.
        target: npu1 or npu2.
        context: positions of a layer's cache.
        ways: the ways to choose from.
        prices: what to choose by; None: those of `kraken-350` (docs/model.md).

    Raises:
        ValueError: no way takes the decoder; says why for each.
    """
    prices = prices or Prices(CHIPS["kraken-350"])
    found, refused = dict[str, Program](), list[str]()
    for way in ways:
        if way in HOST_EXPERTS and not decoder.shape.experts:
            continue
        if way in WAYS and not decoder.has_plain_experts:
            refused.append(f"decode_layer, {way}: the array's experts have no biases and no other SwiGLU")
            continue
        try:
            design = DecodeLayer(decoder.shape, HOST_EXPERTS.get(way, way))
            if decoder.shape.experts:
                found[way] = experts_program(decoder, design, target, context, on_array=way not in HOST_EXPERTS)
            elif decoder.keeps_states:
                found[way] = states_program(decoder, design, target, context)
            else:
                found[way] = _layers_program(decoder, design, target, context, prices)
        except ValueError as error:
            refused.append(_refusal(way, error))
    if not found:
        raise ValueError("; ".join(refused))
    way = next(iter(found))
    if len(found) > 1:
        seconds = {way: prices.of(program, program.context - 1).total for way, program in found.items()}
        way = min(seconds, key=seconds.__getitem__)  # the fastest way for a token at the context's end
    return DecodeChoice(found[way], way, refused)


def _refusal(way: str, error: ValueError) -> str:
    # A broken limit has a line for every tile; the first line is enough.
    return f"decode_layer, {way}: {' '.join(str(error).splitlines()[:2])}"


def _layers_program(decoder: DecoderShape, design: DecodeLayer, target: str, context: int, prices: Prices) -> Program:
    if target != "npu2":
        raise ValueError(f"[decode_layer] expected npu2, got {target}")
    shape, buffers, layers = decoder.shape, DecoderBuffers(decoder, context), len(decoder.layers)
    with_head = design.takes_head(decoder.head, decoder.layers[-1].eight_bits)
    most, calls = layers, list[ArtifactCall]()
    while not calls:
        counts = design.calls(decoder.layers, decoder.head if with_head else None, most)
        firsts = [0, *accumulate(counts)]
        calls = [
            _call(decoder, design, context, first, end, decoder.head.rows * (with_head and end == layers))
            for first, end in pairwise(firsts)
        ]
        longest = max(prices.of_call(call, call.last).total for call in calls)
        if longest > MOST_SECONDS and most > 1:
            most, calls = max(1, int(max(counts) * MOST_SECONDS / longest)), []
    again = design.byte_arguments(context)
    writer = ProgramWriter(buffers.constants())
    for call, first, end in zip(calls, firsts, firsts[1:], strict=False):
        head = with_head and end == layers
        writer.step(
            call, f"layer {first}" if end == first + 1 else f"layers {first}-{end - 1}",
            buffers.weights(first), buffers.norm(first), "rotary", buffers.cache(first), "state",
            *[buffers.read_by_token(first)] * again, *["logits"] * head,
        )  # fmt: skip
    if shape.output_bias:
        writer.fill("state", design.state_size, design.one)
    if not with_head:
        update, hidden = (View("state", design.regions[name].offset * BF16_BYTES) for name in ("update", "hidden"))
        add_lm_head(decoder, context, writer, update, hidden)
    # The second row is the update, which is zero, because nothing is added to an embedding.
    given = writer.rows("state", 2, shape.hidden, shape.line)
    made = writer.rows("logits", 1, decoder.model.vocabulary, decoder.head.rows)
    return Program(
        "decode", decoder.attributes, 1, 1, context, buffers.layout, writer.buffers, given, made, tuple(writer.steps)
    )


def _call(
    decoder: DecoderShape, design: DecodeLayer, context: int, first: int, end: int, vocabulary: int
) -> ArtifactCall:
    """The layers first .. end - 1; with a vocabulary the LM head, too."""
    windows = decoder.windows[first:end]
    return moving_call(
        "decode_layer",
        decoder.array_of_layers(design.way),
        f"layers{first}-{end - 1}" + "-head" * bool(vocabulary),
        partial(_layers, decoder, design, context, first, end, vocabulary),
        "npu2", context, design.attention.keys, [CallSweep(0, 1, 1, window) for window in windows],
    )  # fmt: skip


def _layers(
    decoder: DecoderShape, design: DecodeLayer, context: int, first: int, end: int, vocabulary: int, position: int
) -> DesignProgram:
    return design.program(
        position, context, layers=decoder.layers[first:end], vocabulary=vocabulary,
        head_eight_bits=decoder.head.eight_bits, epsilon=decoder.model.epsilon, scale=decoder.attention.scale,
        tables=decoder.model.tables,
    )  # fmt: skip
