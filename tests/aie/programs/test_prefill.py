# SPDX-License-Identifier: Apache-2.0
"""Prefill on the array: chunks of a prompt through a model's layers, and the decode layer over the cache they leave.

The program is the one that `flownpu build` writes (aie/programs/prefill.py); the expected numbers come from
flownpu/selftest/reference/prompt.py.
"""

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from flownpu.aie.designs.decode_layer.design import CalledLayer, DecodeLayer, LayerShape
from flownpu.aie.designs.decode_layer.shape import Projection
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.programs.prefill import prefill_program
from flownpu.aie.programs.program import Role
from flownpu.ops import q4nx
from flownpu.selftest.reference.layer import LayerInputs, random_layer, rotary_table
from flownpu.selftest.reference.prompt import PrefillModel
from tests.aie.designs.decode_layer.cases import case_of, checkpoint_layer
from tests.aie.designs.decode_layer.shapes import OLMO
from tests.aie.host_kernels import BFLOAT16, assert_within, bf16, wide
from tests.aie.programs.decoders import decoder_of
from tests.aie.programs.machine import Machine

CHECKPOINT = Path(__file__).parents[2] / "fixtures" / "gemma3-topics"
CONTEXT = 256
# A chunk has fewer tokens than a megatile of GEMM has rows, so products also have the rows behind them.
CHUNK, PADDED = 64, 256
HOST_WRITES = {"x", "q", "residual"}  # these have CHUNK rows; attention's output has whole blocks of tokens
GEMMA = {"post_norms": True, "qk_norm": True}
# The last layer makes keys and values only.
LAYERS = [CalledLayer(64, 0), CalledLayer(None, 1), CalledLayer(40, 0)]


def trained(rng):
    """Three layers of the small trained model, its feed-forward of 480 padded to 512 by zeros."""
    del rng
    config = json.loads((CHECKPOINT / "config.json").read_text())
    real = LayerShape(256, 4, 2, 64, 480, "geglu", **GEMMA)
    with safe_open(CHECKPOINT / "model.safetensors", "np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    weights = [checkpoint_layer(real, tensors, index) for index in range(len(LAYERS))]
    for layer in weights:
        halves = np.split(layer.gate_up, 2)
        layer.gate_up = np.concatenate([np.pad(half, ((0, 1), (0, 0), (0, 0))) for half in halves])
    return replace(real, feed_forward=512), weights, config["query_pre_attn_scalar"] ** -0.5


def untrained(shape, eight_bits=(0, 0, 0)):
    """Three layers of random weights; `eight_bits`: which of them have 8 bits, see `LayerShape.of_bits`."""
    return lambda rng: (shape, [random_layer(shape, rng, which) for which in eight_bits], shape.d**-0.5)


def eight_bits_of(weights):
    """The same of a layer's weights, told by their blocks."""
    parts = weights.qkv, weights.output, weights.gate_up, weights.down
    return sum((q4nx.layout_of(part).bits == 8) << place for place, part in enumerate(parts))


MODELS = {
    "gemma3-topics": trained,
    "qwen3 with biases": untrained(LayerShape(384, 8, 2, 64, 576, "swiglu", qk_norm=True, output_bias=True)),
    # QKV and down of 8 bits, as in some layers of GGUF's Q4_K_M; none; attention's.
    "gemma2": untrained(LayerShape(288, 8, 4, 32, 640, "geglu", post_norms=True, softcap=2.0), (0b1001, 0, 0b0011)),
    "gpt-oss": untrained(LayerShape(288, 8, 4, 32, 640, "swiglu", has_sinks=True)),
    "olmo2": untrained(LayerShape(288, 8, 4, 32, 640, "swiglu", **OLMO)),
}


def machine_of(program, shape, weights, rotary):
    """A machine with the constants of a model.

    Scratch buffers start finite, because memory behind their last rows is read before it is written.
    """
    given = {
        "weights": np.concatenate(
            [*(layer.blocks() for layer in weights), np.zeros(Projection(128, shape.hidden).bytes, np.uint8)]
        ),
        "vectors": np.concatenate(
            [*(layer.vectors(shape) for layer in weights), np.zeros(shape.entry_norms * shape.line, BFLOAT16)]
        ),
        "rotary": rotary,
    }
    scratch = {
        buffer.name: np.full(buffer.bytes // 2, 3, BFLOAT16)
        for buffer in program.buffers
        if buffer.role is Role.SCRATCH
    }
    for buffer in program.buffers:
        if buffer.line:
            scratch[buffer.name][:] = 0
            scratch[buffer.name][buffer.one :: buffer.line] = 1
    return Machine([program], given | scratch)


def written(steps):
    """Label, buffer and flat contents of what each step wrote, except the cache and the dequantised weights."""
    for step, arguments in steps:
        names = [view.buffer for view in step.views]
        count = 2 if step.call.operator in {"add_rms_norm", "rms_norm_add", "rms_norm_sum"} else 1
        for name, contents in list(zip(names, arguments.values(), strict=True))[-count - (names[-1] == "cache") :]:
            if name not in {"cache", "panels"}:
                yield step.label, name, contents


@contextmanager
def in_place(place):
    """Adds the place to an assertion's error."""
    try:
        yield
    except AssertionError as error:
        error.add_note(place)
        raise


@pytest.mark.parametrize(
    ("name", "kind", "turns"),
    [
        ("gemma3-topics", "bfp16", (64, 37)),
        ("qwen3 with biases", "bf16", (50, 64)),
        ("gemma2", "bf16", (64, 37)),
        ("olmo2", "bfp16", (50, 64)),
    ],
)
def test_prefill_has_expected_chunks_and_token(rng, name, kind, turns):
    """Compares the results of every step, the cache, and a token that the decode layer computes from there.

    `turns`: a prompt in two chunks of 64, the second not full, or two prompts, the first of which does not fill its
    chunk.
    """
    shape, weights, scale = MODELS[name](rng)
    rotary = np.stack([rotary_table(CONTEXT, shape.d, base) for base in (1e4, 1e6)])
    layers = [replace(layer, eight_bits=eight_bits_of(of)) for layer, of in zip(LAYERS, weights, strict=True)]
    windows, tables, which = zip(*((at.window or 0, at.table, at.eight_bits) for at in layers), strict=True)
    decoder = decoder_of(shape, windows, 128, CONTEXT, tables, scale, which)
    program = prefill_program(decoder, "npu2", CONTEXT, CHUNK, kind)
    attended = FlowQKV("npu2", shape.heads, shape.kv_heads, shape.d).padded(CHUNK)
    machine = machine_of(program, shape, weights, rotary)
    kept = machine.buffers["cache"].view(BFLOAT16).reshape(len(LAYERS), CONTEXT, shape.kv_heads, 2, shape.d)
    model = PrefillModel(shape, LAYERS, weights, rotary, scale, rng)
    position = 0
    for tokens in turns:
        hidden = bf16(rng.normal(size=(tokens, shape.hidden)) * 3)
        expected = model.prefill(hidden, position)
        for label, buffer, contents in written(machine.run(program, hidden, position)):
            layer, name, numbers, tolerance = next(expected)
            with in_place(f"{buffer} of {label}, tokens {position} and on"):
                assert (layer, name) == (int(label.rpartition(" ")[2]), buffer)
                rows = CHUNK if name in HOST_WRITES else attended if name == "context" else PADDED
                assert_within(contents.reshape(rows, -1)[:tokens, : numbers.shape[1]], numbers, tolerance)
        # The program ends with the last layer's keys and values; the reference goes on.
        assert next(expected)[:2] == (len(LAYERS) - 1, "context")
        list(expected)
        position += tokens
        assert_within(kept[:, :position], *model.outcome(0, position))
        assert np.isfinite(wide(kept)).all()

    token = bf16(rng.normal(size=shape.hidden) * 3)
    call = LayerInputs(
        DecodeLayer(shape), weights, layers, position, token, np.zeros_like(token), kept.copy(), rotary, scale
    )
    found = case_of(call, rng).check()
    *_, (_, _, numbers, tolerance) = model.prefill(token[None], position, bf16_stream=True)
    assert_within(call.outcome(found)["update"], numbers[0], tolerance[0])
