# SPDX-License-Identifier: Apache-2.0
"""Prefill on the array: chunks of a prompt through a model's layers, and the decode layer over the cache they leave.

The calls and their buffers are in tests/aie/prefill_layer.py, what must come out in tests/aie/prefill_model.py.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors import safe_open

from flownpu.aie.designs.decode_layer import DecodeLayer, Layer, LayerShape
from flownpu.npu_calls import DecoderCalls
from flownpu.npu_decoder import Decoder
from tests.aie.decode_layer_model import (
    EPSILON,
    Call,
    LayerWeights,
    case_of,
    checkpoint_layer,
    random_layer,
    rotary_table,
)
from tests.aie.emulation import emulator, plan_of
from tests.aie.host_kernels import BFLOAT16, assert_within, bf16, wide
from tests.aie.prefill_layer import Prefill, Step
from tests.aie.prefill_model import PrefillModel

if TYPE_CHECKING:
    from flownpu.aie.emulator import Emulator
    from flownpu.aie.plan import Plan

CHECKPOINT = Path(__file__).parents[1] / "fixtures" / "gemma3-topics"
CONTEXT = 256
GEMMA, QWEN = {"post_norms": True, "qk_norm": True}, {"qk_norm": True}
# The last layer makes keys and values only.
LAYERS = [Layer(64, 0), Layer(None, 1), Layer(40, 0)]


class Machine:
    """Host buffers, and the arrays that work on them."""

    def __init__(self, prefill: Prefill, weights: list[LayerWeights], rotary: np.ndarray) -> None:
        shape = prefill.shape
        self.prefill = prefill
        self.arrays: dict[Any, Emulator] = {}
        cache = (len(weights), CONTEXT, shape.kv_heads, 2, shape.d)
        self.buffers = {
            "weights": np.concatenate([layer.blocks() for layer in weights]),
            "vectors": np.concatenate([layer.vectors(shape) for layer in weights]),
            "rotary": rotary.reshape(-1),
            "cache": np.zeros(np.prod(cache), BFLOAT16),
        }
        # What is read before it is written, behind the last rows, only has to be finite.
        self.buffers |= {name: np.full(size, 3, BFLOAT16) for name, size in prefill.sizes.items()}
        self.cache = self.buffers["cache"].reshape(cache)

    def run(self, hidden: np.ndarray, position: int) -> list[tuple[int, str, np.ndarray]]:
        """A chunk whose embeddings are `hidden` [tokens, D].

        Returns:
            layer, buffer and contents [rows, ..] of what each step wrote but for the cache and the dequantised weights.
        """
        rows, found = self.prefill.tokens, []
        self.buffers["hidden"][:] = 0
        self.buffers["hidden"][: hidden.size] = hidden.reshape(-1)
        for step in self.prefill.steps(position):
            self.step(step)
            for view in step.arguments[-step.written :]:
                if view.buffer not in {"cache", "panels"}:
                    contents = self.buffers[view.buffer][: view.size].reshape(rows, -1).copy()
                    found.append((step.layer, view.buffer, contents))
        return found

    def step(self, step: Step) -> None:
        """One call."""
        plan = planned(step.design, step.sizes, step.options)
        if step.design not in self.arrays:
            self.arrays[step.design] = emulator(plan.array)
        array = self.arrays[step.design]
        arguments = [self.buffers[view.buffer][view.offset : view.offset + view.size] for view in step.arguments]
        assert [len(argument) for argument in arguments] == [b.type.elements for b in plan.sequence.buffers]
        array.run(plan.sequence, arguments)
        assert array.leftovers() == []


@cache
def planned(design: Any, sizes: tuple, options: tuple) -> Plan:
    """The plan of a call, which another test checks."""
    return plan_of(design.program(*sizes, **dict(options)), checked=False)


def trained(rng):
    """Three layers of the small trained model, its feed-forward of 480 filled up with rows of zeros."""
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


def untrained(shape):
    """Three layers of random weights."""
    return lambda rng: (shape, [random_layer(shape, rng) for _ in LAYERS], shape.d**-0.5)


MODELS = {
    "gemma3-topics": trained,
    "llama": untrained(LayerShape(384, 8, 2, 64, 576, "swiglu")),
    "qwen3": untrained(LayerShape(288, 8, 4, 32, 640, "swiglu", **QWEN)),
}


@contextmanager
def in_place(place):
    """Says of an error where it is."""
    try:
        yield
    except AssertionError as error:
        error.add_note(place)
        raise


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("tokens", "position"), [(64, 0), (256, 700)])
def test_calls_are_those_of_the_artifacts(rng, name, tokens, position):
    """Every one is in a folder that `flownpu build` makes, and no other; all of them pass the checker."""
    shape, _, scale = MODELS[name](rng)
    prefill = Prefill(shape, LAYERS, tokens, 1024, 2, EPSILON, scale)
    windows, tables = zip(*((layer.window or 0, layer.table) for layer in LAYERS), strict=True)
    decoder = Decoder(shape, EPSILON, scale, windows, tables, vocabulary=4096, positions=1024)
    built = [call.plan(position) for call in DecoderCalls(decoder, "npu2", 1024).prefill(tokens)]
    calls = {(step.design, step.sizes, step.options) for step in prefill.steps(position)}
    # The last layer does not attend, and no other has its window.
    last = prefill.flow_qkv(len(LAYERS) - 1, position)
    calls.add((last.design, last.sizes, last.options))
    plans = [planned(*call) for call in calls]
    assert len(plans) == len(built)
    for plan in plans:
        assert any((plan.array, plan.sequence) == (other.array, other.sequence) for other in built)


@pytest.mark.parametrize(
    ("name", "turns"),
    [("gemma3-topics", (64, 37)), ("gemma3-topics", (50, 64)), ("llama", (50, 64)), ("qwen3", (64, 37))],
)
def test_chunks_and_a_token(rng, name, turns):
    """A prompt of two chunks of 64, the second not full, or two prompts, of which the first does not fill a chunk.

    What every step writes; the cache; and a token that goes on from there by the decode layer.
    """
    shape, weights, scale = MODELS[name](rng)
    rotary = np.stack([rotary_table(CONTEXT, shape.d, base) for base in (1e4, 1e6)])
    machine = Machine(Prefill(shape, LAYERS, 64, CONTEXT, 2, EPSILON, scale), weights, rotary)
    model = PrefillModel(shape, LAYERS, weights, rotary, scale, rng)
    position = 0
    for tokens in turns:
        hidden = bf16(rng.normal(size=(tokens, shape.hidden)) * 3)
        found = machine.run(hidden, position)
        for (*written, contents), (layer, buffer, expected, tolerance) in zip(
            found, model.prefill(hidden, position), strict=False
        ):
            assert written == [layer, buffer]
            with in_place(f"{buffer} of layer {layer}, tokens {position} and on"):
                assert_within(contents[:tokens], expected, tolerance)
        position += tokens
        assert_within(machine.cache[:, :position], *model.outcome(0, position))
        assert np.isfinite(wide(machine.cache)).all()

    token = bf16(rng.normal(size=shape.hidden) * 3)
    call = Call(
        DecodeLayer(shape), weights, LAYERS, position, token, np.zeros_like(token), machine.cache.copy(), rotary, scale
    )
    found = case_of(call, rng).check()
    *_, (_, _, expected, tolerance) = model.prefill(token[None], position)
    assert_within(call.outcome(found)["update"], expected[0], tolerance[0])
