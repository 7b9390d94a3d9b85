# SPDX-License-Identifier: Apache-2.0
"""The program of a token: its way of decoding, its steps, and the reasons against the other ways."""

import re
from dataclasses import replace

import pytest

from flownpu.aie.designs.bias import bias_column
from flownpu.aie.designs.decode_layer import design as decode_layer
from flownpu.aie.designs.decode_layer.design import LayerShape
from flownpu.aie.programs.decode import decode_program
from flownpu.aie.programs.program import Role
from tests.aie.designs.decode_layer.shapes import SHAPES
from tests.aie.programs import decoders

CONTEXT = 3840  # whole chunks for every head size here
LAYERS, VOCABULARY = 4, 32064


def decoder_of(shape, layers=LAYERS, vocabulary=VOCABULARY):
    windows = tuple(512 * (layer % 2) for layer in range(layers))
    return decoders.decoder_of(shape, windows, vocabulary, CONTEXT)


@pytest.mark.parametrize("name", ["gemma3-1b", "gemma3-topics", "llama3.1-8b"])
def test_layers_of_models_have_split_keys(name):
    """All layers are one call, which has the cache twice, with room behind it for the last layer's last round."""
    choice = decode_program(decoder_of(SHAPES[name]), "npu2", CONTEXT)
    assert (choice.way, choice.refused) == ("split", [])
    (step,) = choice.program.steps
    views = dict(zip((buffer.name for buffer in step.call.buffers), step.views, strict=True))
    assert views["cache"] == views["cache_bytes"] == ("cache", 0)
    assert views["logits"] == ("logits", 0)
    position = 2 * SHAPES[name].position_size
    # Keys of a round: 14 tiles (one KV head: all 28) with an object each, of five positions (one head of 64: twenty).
    keys = {"gemma3-1b": 28 * 5, "gemma3-topics": 14 * 20}.get(name, 14 * 5)
    (cache,) = (buffer for buffer in choice.program.buffers if buffer.name == "cache")
    assert cache.bytes == (LAYERS * CONTEXT + -CONTEXT % keys) * position
    assert choice.program.cache.layer == CONTEXT * position


def test_token_reads_int8_behind_cache_in_bf16():
    """The rows in int8 are an argument twice, and the cache in bf16, which is written alone, once."""
    shape = replace(SHAPES["qwen3-0.6b"], int8_cache=True)
    choice = decode_program(decoder_of(shape), "npu2", CONTEXT)
    (step,) = choice.program.steps
    views = dict(zip((buffer.name for buffer in step.call.buffers), step.views, strict=True))
    in_bf16 = LAYERS * CONTEXT * 2 * shape.position_size
    assert views["cache"] == ("cache", 0)
    assert views["cache_bytes"] == views["int8_rows"] == ("cache", in_bf16)
    assert choice.program.cache.int8_rows == in_bf16
    (cache,) = (buffer for buffer in choice.program.buffers if buffer.name == "cache")
    # A round is 14 tiles with eight positions each; a row of 128 codes has 160 bytes.
    assert cache.bytes == in_bf16 + (LAYERS * CONTEXT + -CONTEXT % (14 * 8)) * shape.kv_heads * 2 * 160


@pytest.mark.parametrize(
    ("shape", "way", "said"),
    [
        (LayerShape(3072, 32, 32, 96, 8192, "swiglu"), "pairs", ["decode_layer, split: .* head size that divides 256"]),
        (LayerShape(1536, 12, 1, 128, 8960, "swiglu"), "pairs", ["decode_layer, split: .*8 query heads or fewer"]),
    ],
    ids=["heads of 96", "a group of 12"],
)
def test_layer_refused_by_one_design_is_taken_by_another(shape, way, said):
    choice = decode_program(decoder_of(shape), "npu2", CONTEXT)
    assert choice.way == way
    assert len(choice.refused) == len(said)
    for reason, pattern in zip(choice.refused, said, strict=True):
        assert re.search(pattern, reason)


def test_layer_refused_by_all_designs_names_each_reason():
    shape = LayerShape(6144, 48, 8, 128, 16384, "swiglu")
    designs = [rf"decode_layer, {way}: .* \[compute tile \(6, 2\)\] memory: need" for way in ("pairs", "split")]
    with pytest.raises(ValueError, match=".*; ".join(designs)):
        decode_program(decoder_of(shape), "npu2", CONTEXT)


ATTENTION = ["decode_layer", "add_rms_norm"]


@pytest.mark.parametrize(
    ("shape", "way", "experts"),
    [
        # Qwen3-30B-A3B's: 24 MB of chosen weights.
        (
            LayerShape(2048, 32, 4, 128, 768, "swiglu", qk_norm=True, experts=8),
            "split",
            ["route", "decode_layer", "add_experts"],
        ),
        # 0.4 MB, which the host reads in a third of a dispatch.
        (LayerShape(256, 4, 2, 64, 128, "swiglu", experts=2), "split, experts by the host", ["experts"]),
    ],
    ids=["large", "small"],
)
def test_experts_are_computed_where_that_is_predicted_faster(shape, way, experts):
    choice = decode_program(decoder_of(shape, layers=2), "npu2", CONTEXT)
    assert (choice.way, choice.refused) == (way, [])
    steps = choice.program.steps
    assert [step.call.operator for step in steps] == [*ATTENTION, *experts, *ATTENTION, *experts, "decode_layer"]
    # Only the host knows the choice, and one call serves all layers.
    assert {(step.call.name, step.choices) for step in steps if step.choices} == (
        {("experts", "chosen")} if "route" in experts else set()
    )
    constants = {buffer.name for buffer in choice.program.buffers if buffer.role is Role.CONSTANT}
    assert ("experts" in constants) == ("route" in experts)


def test_experts_with_int8_cache_have_steps_of_bf16_cache():
    """The LM head alone reads no cache, so that it stays on the layers' array."""
    shape = LayerShape(2048, 32, 4, 128, 768, "swiglu", qk_norm=True, experts=8)
    programs = [
        decode_program(decoder_of(one, layers=2), "npu2", CONTEXT, ways=("split",)).program
        for one in (shape, replace(shape, int8_cache=True))
    ]
    in_bf16, in_int8 = ([step.call.operator for step in program.steps] for program in programs)
    assert in_int8 == in_bf16
    assert in_int8[-1] == "decode_layer"


def test_experts_beyond_offset_limit_are_the_hosts():
    shape = LayerShape(4096, 32, 8, 128, 14336, "swiglu", experts=2)  # 32 experts of 110 MB
    choice = decode_program(decoder_of(shape, layers=1), "npu2", CONTEXT)
    assert choice.way.endswith("experts by the host")
    assert any("expected at most 2147483648 bytes of experts, got" in reason for reason in choice.refused)


@pytest.mark.parametrize("experts", [0, 2])
def test_npu1_has_no_decode_layers(experts):
    shape = LayerShape(256, 4, 2, 64, 128, "swiglu", experts=experts)
    with pytest.raises(ValueError, match=r"decode_layer, split: .* expected npu2, got npu1"):
        decode_program(decoder_of(shape, layers=1), "npu1", CONTEXT)


def test_lm_head_beyond_offset_limit_becomes_separate_call(monkeypatch):
    shape = decoder_of(SHAPES["gemma3-topics"]).shape
    monkeypatch.setattr(decode_layer, "_WEIGHTS_MAXIMUM", 2 * shape.weight_bytes())
    choice = decode_program(decoder_of(shape), "npu2", CONTEXT)
    assert choice.way == "split"
    steps = [step.call.operator for step in choice.program.steps]
    assert steps == ["decode_layer", "decode_layer", "rms_norm_add", "rms_norm", "fused_dqp"]
    monkeypatch.setattr(decode_layer, "_WEIGHTS_MAXIMUM", 100_000)
    with pytest.raises(ValueError, match="a layer in 100000 bytes"):
        decode_program(decoder_of(shape), "npu2", CONTEXT, ways=("split",))


@pytest.mark.parametrize("bias", [False, True])
def test_lm_head_alone_fills_x_of_biased_decoder_with_1(monkeypatch, bias):
    """Without programs of chunks, which fill the same buffer, nothing else would write the buffer."""
    shape = replace(SHAPES["llama3.2-1b"], qkv_bias=bias)
    monkeypatch.setattr(decode_layer, "_WEIGHTS_MAXIMUM", 2 * shape.weight_bytes())
    program = decode_program(decoder_of(shape), "npu2", CONTEXT).program
    (x,) = (buffer for buffer in program.buffers if buffer.name == "x")
    assert (x.line, x.one) == ((shape.line, bias_column(shape.hidden)) if bias else (0, 0))
