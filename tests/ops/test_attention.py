# SPDX-License-Identifier: Apache-2.0
"""Attention's table of cases on every engine: definitions in stock ONNX Runtime, float64 reference, CPU, functions."""

from itertools import cycle
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers import Gemma3TextConfig
from transformers.models.gemma3 import modeling_gemma3

from flownpu import ops
from flownpu.ops.contracts import input_names
from flownpu.ops.definitions import flow_kv_attention, flow_qkv_attention
from tests.ops.attention_turns import HEADS, TURNS, D, G, H, Turn
from tests.ops.device import ISAS, Node
from tests.ops.stock_onnxruntime import model_of, node, run, value, with_functions

# Calls of the CPU's operator by name: between them they have every input, and every type of cache.
EAGER = (
    *("first prompt, ragged, rotary", "one token, bias", "one token, position ids", "norm, separate"),
    *("no cache, no lengths", "bfloat16, ragged", "float16, one token", "sink, window and bias"),
    "blocks, softcap and bias",
)
ONE_TOKEN = {name: turn for name, turn in TURNS.items() if turn.new == 1}


def attend(
    turn: Turn, operator: Any = flow_qkv_attention, *, layers: int = 1, optimised: bool = True
) -> list[np.ndarray]:
    """The outputs of the last of `layers` nodes, which all compute the same."""
    feeds = turn.feeds()
    known = {name: value(name, array) for name, array in feeds.items()}
    for name in known.keys() & {"past_key", "past_value"}:
        known[name].shape = ir.Shape(["batch", G, "past", D])
    inputs = [known.get(name) for name in input_names("FlowQKVAttention")]
    nodes = [node(operator.NAME, inputs, outputs=3, **HEADS, **turn.attributes) for _ in range(layers)]
    for n in nodes:
        for output, dtype in zip(n.outputs, (np.float32, turn.dtype, turn.dtype), strict=True):
            output.dtype = ir.DataType.from_numpy(np.dtype(dtype))
    return run(with_functions(model_of(nodes, list(known.values()))), feeds, optimised=optimised)[-3:]


@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
def test_attention_definition_equals_equation(turn: Turn) -> None:
    turn.check(attend(turn))


@pytest.mark.parametrize("turn", ONE_TOKEN.values(), ids=ONE_TOKEN)
def test_attention_definition_of_one_token_equals_equation(turn: Turn) -> None:
    turn.check(attend(turn, flow_kv_attention))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
def test_cpu_attention_equals_definition(turn: Turn, isa: str) -> None:
    feeds = turn.feeds()
    inputs = [feeds.get(name) for name in input_names("FlowQKVAttention")]
    cache = {np.dtype(np.float32): "float"}.get(np.dtype(turn.dtype), np.dtype(turn.dtype).name)
    keywords: dict[str, Any] = {"outputs": ("float", cache, cache), "options": {"cpu_isa": isa, "threads": "2"}}
    for op_type in ("FlowQKVAttention", "FlowKVAttention")[: 1 + (turn.new == 1)]:
        turn.check(Node(op_type, inputs, **keywords, **HEADS, **turn.attributes)(*inputs), pairs=isa == "avx512")


@pytest.mark.parametrize("name", EAGER)
def test_eager_attention_equals_definition(name: str) -> None:
    turn = TURNS[name]
    function = ops.flow_kv_attention if turn.new == 1 else ops.flow_qkv_attention
    turn.check(function(**turn.feeds(), **HEADS, **turn.attributes), pairs="avx512" in ISAS)


@pytest.mark.opencl
@pytest.mark.usefixtures("pocl")
@pytest.mark.parametrize(
    "name",
    ["first prompt, ragged, rotary", "prompt in parts, window", "one token, growing", "norm", "bfloat16, one token"],
)
def test_gpu_attention_equals_definition(name: str) -> None:
    turn = TURNS[name]
    function = ops.flow_kv_attention if turn.new == 1 else ops.flow_qkv_attention
    turn.check(function(**turn.feeds(), **HEADS, **turn.attributes, device="gpu"))


@pytest.mark.parametrize("name", ["first prompt", "prompt in parts", "one token, growing"])
def test_growing_cache_of_unoptimised_graph_equals_definition(name: str) -> None:
    # ONNX Runtime may confuse past's capacity with present's, and put the second node's present into the first one's
    # past.
    TURNS[name].check(attend(TURNS[name], layers=2, optimised=False))


@pytest.mark.parametrize(("turn", "chunk"), list(zip(TURNS.values(), cycle([1, 3, 64]), strict=False)), ids=TURNS)
def test_attention_reference_equals_equation(turn: Turn, chunk: int) -> None:
    outputs = flow_qkv_attention.reference(**turn.feeds(), **HEADS, **turn.attributes, chunk=chunk)
    turn.check(list(outputs), is_exact=True)


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
def test_blocks_are_masked_as_transformers_masks_pictures(layer_type: str) -> None:
    """Two pictures of 9 tokens, longer than the window of 5; transformers' masks, its softmax here in float64."""
    types = torch.tensor([[0, 0, *[1] * 9, 0, *[1] * 9, 0]])
    tokens = types.shape[1]
    config = Gemma3TextConfig(
        sliding_window=5, layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2
    )
    config._attn_implementation = "eager"
    blocks = modeling_gemma3.get_block_sequence_ids_for_mask(types, torch.device("cpu"))
    masks = modeling_gemma3.create_masks_for_vision_model(
        config, torch.zeros(1, tokens, 8), None, None, torch.arange(tokens)[None], blocks
    )
    turn = Turn(
        (tokens,),
        tokens,
        attributes={"local_window_size": 5 if layer_type == "sliding_attention" else -1},
        past=False,
        blocks=tuple(tuple(row) for row in (blocks + 1).tolist()),
    )
    mask = masks[layer_type].double().numpy()[0, 0]
    q, k, v = (torch.from_numpy(x)[0].transpose(0, 1) for x in turn.prepared())
    k, v = (x.repeat_interleave(H // G, dim=0) for x in (k, v))
    expected = (torch.softmax(q @ k.mT * D**-0.5 + torch.from_numpy(mask), dim=-1) @ v).transpose(0, 1)
    output, *_ = flow_qkv_attention.reference(**turn.feeds(), **HEADS, **turn.attributes)
    np.testing.assert_allclose(output[0], expected.reshape(tokens, -1).numpy(), rtol=0, atol=1e-12)


def test_flow_kv_attention_of_two_tokens_is_refused() -> None:
    with pytest.raises(Exception, match="Split"):
        attend(TURNS["prompt in parts"], flow_kv_attention)
    with pytest.raises(ValueError, match="one new token"):
        flow_kv_attention.reference(**TURNS["prompt in parts"].feeds(), **HEADS)
