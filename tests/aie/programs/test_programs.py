# SPDX-License-Identifier: Apache-2.0
"""Programs as data: their changes of the array, the reads of steps, and the number of tokens that justifies a chunk."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from flownpu._native import EncoderShape
from flownpu.aie.cost.chips import CHIPS
from flownpu.aie.designs.decode_layer.shape import LayerShape
from flownpu.aie.designs.gemm import Gemm
from flownpu.aie.programs import decode, dispatches
from flownpu.aie.programs.chunks import with_fewest
from flownpu.aie.programs.cost import Prices
from flownpu.aie.programs.decode import decode_program
from flownpu.aie.programs.dispatches import with_short_dispatches
from flownpu.aie.programs.encode import encode_program
from flownpu.aie.programs.prefill import prefill_program
from flownpu.aie.programs.program import Role
from flownpu.npu.models import ENCODERS
from tests.aie.programs.decoders import decoder_of

CONTEXT, LAYERS = 1024, 9
GEMMA3_4B = LayerShape(2560, 8, 4, 256, 10240, "geglu", post_norms=True, qk_norm=True)
LLAMA31_8B = LayerShape(4096, 32, 8, 128, 14336, "swiglu")
SMALL = LayerShape(288, 4, 2, 32, 640, "swiglu", qk_norm=True)


def decoder(shape, layers=LAYERS):
    return decoder_of(shape, (0,) * layers, 320, CONTEXT)


@pytest.mark.parametrize(("shape", "together"), [(GEMMA3_4B, 4), (LLAMA31_8B, 2), (SMALL, 4)])
def test_layer_changes_array_four_times_at_most(shape, together):
    """Two for attention and back, and two to dequantise a group of layers: as many as have room together."""
    program = prefill_program(decoder(shape), "npu2", CONTEXT, 256, "bfp16")
    groups = -(-LAYERS // together)
    # The last layer ends with QKV: it has no attention. The change to the first array counts, too.
    assert len(program.arrays) == 2 * groups + 2 * (LAYERS - 1)
    assert len(program.arrays) / LAYERS <= 4
    assert {name.partition("-")[0] for name in program.arrays} == {"dequant_engine", "gemm", "flow_qkv"}
    assert len(set(program.arrays)) == 3
    # One dispatch for each group's weights; four of a layer: QKV, attention, output, the feed-forward; the last QKV.
    dispatches = [steps[0].call.array for steps in program.dispatches if steps[0].call.array != "host"]
    assert len(dispatches) == groups + 4 * (LAYERS - 1) + 1


def test_encoder_layer_changes_array_twice():
    of = ENCODERS["siglip"]
    longer, shorter = (encode_program(EncoderShape(**of.as_dict() | {"layers": layers}), "npu2") for layers in (5, 3))
    assert len(longer.arrays) - len(shorter.arrays) == 2 * (5 - 3)
    assert len(set(longer.arrays)) == 3


def test_products_read_weights_of_their_own_layer():
    """Follows the panels: an engine's output replaces overlapping ones, and a GEMM must find its own layer's."""
    program = prefill_program(decoder(SMALL), "npu2", CONTEXT, 256, "bfp16")
    held, products = {}, 0
    for step in program.steps:
        views = {view.buffer: (view.offset, buffer) for view, buffer in zip(step.views, step.call.buffers, strict=True)}
        if "panels" not in views:
            continue
        layer, (first, buffer) = step.label.partition(", ")[2], views["panels"]
        if step.call.operator == "dequant_engine":
            last = first + buffer.type.bytes
            held = {key: value for key, value in held.items() if key >= last or value[0] <= first}
            held[first] = last, layer
        else:
            products += 1
            last, of = held[first]
            assert of == layer
            assert first + buffer.type.bytes >= last
    assert products == 4 * (LAYERS - 1) + 1


def test_residual_and_embeddings_stay_on_host():
    program = prefill_program(decoder(SMALL), "npu2", CONTEXT, 256, "bfp16")
    roles = {buffer.name: buffer.role for buffer in program.buffers}
    assert {name for name, role in roles.items() if role is Role.HOST} == {"hidden", "residual"}


def test_attention_of_long_chunk_is_several_calls_of_one_dispatch():
    """The steps are the same call at later positions, each over separate rows."""
    program = prefill_program(decoder(SMALL), "npu2", CONTEXT, 512, "bfp16")
    (steps, *_) = [steps for steps in program.dispatches if steps[0].call.operator == "flow_qkv"]
    assert len({step.call for step in steps}) == 1
    part = 512 // len(steps)
    line = SMALL.heads * SMALL.d * 2
    assert [step.offset for step in steps] == list(range(0, 512, part))
    assert [step.views[0].offset for step in steps] == [step.offset * line for step in steps]
    assert steps[0].call.positions.count == CONTEXT - part + 1


# --- The driver's watchdog --------------------------------------------------------------------------------------------


def dispatch_seconds(program, prices):
    """Predicted seconds of each dispatch of an array at the context's end, where there is most to do."""
    last = program.context - program.tokens
    return [
        sum(prices.of_step(step, last + step.offset).total for step in steps)
        for steps in program.dispatches
        if steps[0].call.array != "host"
    ]


@pytest.fixture
def few_seconds(monkeypatch):
    """Sets the most seconds of a dispatch to a fraction of what they are."""

    def set_seconds(seconds):
        for module in (decode, dispatches):
            monkeypatch.setattr(module, "MOST_SECONDS", seconds)
        return seconds

    assert dispatches.MOST_SECONDS == 2.0 / 4  # a quarter of the shortest watchdog, Linux 7's
    return set_seconds


def test_token_of_deep_model_goes_in_short_dispatches(few_seconds):
    """Layers have room in one call for all their weights: calls are made shorter, and then dispatches."""
    deep, prices = decoder(SMALL, 6), Prices(CHIPS["kraken-350"])
    (whole,) = dispatch_seconds(decode_program(deep, "npu2", CONTEXT, ["split"], prices).program, prices)
    most = few_seconds(whole / 2.2)
    token = decode_program(deep, "npu2", CONTEXT, ["split"], Prices(CHIPS["kraken-350"])).program
    program = with_short_dispatches(token, prices := Prices(CHIPS["kraken-350"]))
    seconds = dispatch_seconds(program, prices)
    assert len(seconds) >= 3
    # A call's own dispatch and instructions are not in the price by which calls are made shorter.
    assert max(seconds) <= most + prices.values["dispatch"] + 5e-6
    # Neighbouring dispatches would take too long together.
    assert all(one + next_one > most for one, next_one in pairwise(seconds))
    layers = [re.findall(r"\d+", step.label) for step in program.steps]
    assert layers[0][0] == "0"
    assert [int(first) for first, *_ in layers[1:]] == [int(last) + 1 for *_, last in layers[:-1]]
    assert layers[-1][-1] == "5"


def test_attention_of_long_chunk_is_split_into_short_dispatches(few_seconds):
    prices = Prices(CHIPS["kraken-350"])
    whole = prefill_program(decoder(SMALL, 2), "npu2", CONTEXT, 512, "bfp16")
    attention = max(dispatch_seconds(whole, prices))
    most = few_seconds(attention / 1.5)
    program = with_short_dispatches(whole, prices)
    assert max(dispatch_seconds(program, prices)) <= most
    assert program.arrays == whole.arrays
    assert [step.views for step in program.steps] == [step.views for step in whole.steps]


# --- From how many tokens on a chunk is worth its time ----------------------------------------------------------------


def priced(times):
    """For each program, by its tokens, the fewest tokens that are worth its time; `times`: its seconds."""
    token = decode_program(decoder(SMALL, 1), "npu2", CONTEXT).program
    programs = [replace(token, kind="prefill" if tokens > 1 else "decode", tokens=tokens) for tokens in times]
    return {each.tokens: each.fewest for each in with_fewest(programs, lambda program: times[program.tokens])}


def test_chunk_lengths_begin_where_they_save_time():
    # 10 tokens one by one take as long as a chunk of 256; that chunk and 8 tokens as long as one of 512.
    assert priced({1: 1.0, 256: 10.0}) == {1: 1, 256: 10}
    assert priced({1: 1.0, 256: 10.0, 512: 18.0}) == {1: 1, 256: 10, 512: 264}
    # A chunk of 512, one of 256 and three tokens take as long as one of 1024.
    assert priced({512: 14.0, 1: 1.0, 256: 10.0, 1024: 27.0}) == {1: 1, 256: 10, 512: 260, 1024: 771}
    # A chunk of 256 is never worth its time.
    assert priced({1: 1.0, 256: 300.0, 512: 400.0}) == {1: 1, 512: 400}


def test_decoder_products_share_one_array():
    """The array's tiles are the fastest ones for the products with the epilogue."""
    program = prefill_program(decoder(GEMMA3_4B), "npu2", CONTEXT, 256, "bfp16")
    design = Gemm("npu2", "bfp16", "geglu")
    (array,) = {step.call.last_plan.array for step in program.steps if step.call.operator == "gemm"}
    assert array == design.program(256, 256, design.width).resolve_program("gemm").array
