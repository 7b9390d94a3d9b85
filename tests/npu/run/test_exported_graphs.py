# SPDX-License-Identifier: Apache-2.0
"""Exporters' graphs: positions, masks and tables as inputs, logits of all tokens, parts of heads that turn."""

import numpy as np
import pytest

from flownpu.ops import q4nx
from tests.npu.decoders import (
    ATTENTION_BIAS,
    COS_CACHE,
    GivenNode,
    Session,
    npu,
    partition,
    read_nodes,
    with_input,
    with_position_ids,
)
from tests.npu.rounding import array_error
from tests.npu.run.steps import CONTEXT, run_all, steps_of
from tests.ops.device import _argument


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "trained", "biases"])
def test_logits_of_all_tokens_are_near_transformers(rng, name, session_of, embed, models):
    """The host computes a chunk's logits, the array those of the tokens after it; the bound is as above."""
    session, model, prompt = session_of(name, logits="all"), models.checkpoint(name), 258
    ids = rng.integers(3, 300, prompt + 1)
    hidden, past = embed(name, ids), session.past(CONTEXT)
    before = session.device.counts()["dispatches"]
    found = np.concatenate(
        [session.run(hidden[start:stop], stop, past)[0] for start, stop in steps_of(prompt, len(ids))]
    )
    assert session.device.counts()["dispatches"] - before < prompt / 4
    expected = model.logits(ids[None])[0]
    error = np.sqrt(np.square(found - expected).mean())
    bound = 2 * array_error(model.reference, ids, range(len(ids)), prompt=True)
    assert error < bound < expected.std() / 3


def test_logits_of_padding_are_zeros(rng, session_of, embed):
    session = session_of("llama", logits="all")
    hidden = embed("llama", rng.integers(3, 300, 4))
    alone, _ = session.run(hidden[:2], 2, session.past(CONTEXT))
    padded, _ = session.run(hidden, 4, session.past(CONTEXT), length=2)
    assert padded[:2].tobytes() == alone.tobytes()
    assert not padded[2:].any()


def test_chunks_without_logits_are_not_used_for_all_logits(models):
    """Artifacts of the same model with the last token's logits: its prompts go token by token."""
    device = npu.NpuDevice(str(models.artifacts("llama", CONTEXT)))
    session = Session(device, *read_nodes(models.converted("llama", logits="all")))
    assert session.lowered.summary.endswith("prompts token by token")


def test_position_ids_choose_rows_of_rotary_tables(rng, models, embed):
    """RoPE depends on differences alone, so rows that follow one another from any row on give the same numbers.

    They round in other ways: by 2^-9 of a cosine or sine, which is less than what else is rounded.
    """
    nodes, outputs = read_nodes(models.converted("llama"))
    device = npu.NpuDevice(str(models.artifacts("llama", CONTEXT)))
    counted, given = Session(device, nodes, outputs), Session(device, with_position_ids(nodes), outputs)
    ids, steps = rng.integers(3, 300, 7), steps_of(5, 6, 7)
    hidden = embed("llama", ids)
    expected = run_all(counted, hidden, steps)
    found = {}
    for shift in (0, 600, 0):
        past = given.past(CONTEXT)
        found[shift] = np.array([
            given.run(hidden[start:stop], stop, past, positions=range(start + shift, stop + shift))[0]
            for start, stop in steps
        ])  # fmt: skip
    assert found[0].tobytes() == expected.tobytes()
    assert found[600].tobytes() != expected.tobytes()
    error = np.sqrt(np.square(found[600] - expected).mean())
    assert error < 2 * array_error(models.checkpoint("llama").reference, ids, [4, 5, 6], prompt=False)
    # A row that does not follow the others turns a key by another angle: the same bound tells it.
    past = given.past(CONTEXT)
    given.run(hidden[:5], 5, past, positions=range(5))
    turned = given.run(hidden[5:6], 6, past, positions=[305])[0]
    assert np.sqrt(np.square(turned - expected[1]).mean()) > 4 * error


def test_unfit_position_ids_are_refused(models):
    nodes, outputs = read_nodes(models.converted("llama"))
    session = Session(npu.NpuDevice(str(models.artifacts("llama", CONTEXT))), with_position_ids(nodes), outputs)
    past, hidden = session.past(CONTEXT), np.zeros((4, session.attributes["hidden"]), np.float32)
    with pytest.raises(npu.Unsupported, match="position_ids that follow one another, got 1 after 1: give such, or set"):
        session.run(hidden, 4, past, positions=[0, 1, 1, 2])
    with pytest.raises(npu.Unsupported, match="at least the tokens before them, got 3 after 4 tokens: pad prompts on"):
        session.run(hidden[:1], 5, past, positions=[3])
    with pytest.raises(RuntimeError, match=r"expected positions below 1024, .* got 1024: shorten the context"):
        session.run(hidden[:1], 1, past, positions=[1024])
    with pytest.raises(RuntimeError, match=r"position_ids of shape \[1, 4\], got \[1,3\]"):
        session.run(hidden, 4, past, positions=[0, 1, 2])


def test_attention_bias_that_masks_later_keys_changes_nothing(rng, models, embed, session_of):
    nodes, outputs = read_nodes(models.converted("llama"))
    device = npu.NpuDevice(str(models.artifacts("llama", CONTEXT)))
    session = Session(device, with_input(nodes, ATTENTION_BIAS, "bias", "float"), outputs)
    hidden, steps = embed("llama", rng.integers(3, 300, 6)), steps_of(5, 6)
    causal = np.triu(np.full((6, 6), -np.inf, np.float32), 1)
    past = session.past(CONTEXT)
    found = [
        session.run(hidden[start:stop], stop, past, bias=causal[None, None, start:stop, :stop].copy())[0]
        for start, stop in steps
    ]
    assert np.array(found).tobytes() == run_all(session_of("llama"), hidden, steps).tobytes()
    padded = causal[None, None, :5, :5].copy()
    padded[..., 3, 1] = -np.inf
    with pytest.raises(npu.Unsupported, match="got -inf for the token at position 3 and the key at 1: give texts wit"):
        session.run(hidden[:5], 5, past, bias=padded)
    with pytest.raises(RuntimeError, match=r"attention_bias of shape \[batch, heads, 5, 5 or more\], got \[1,1,5,4\]"):
        session.run(hidden[:5], 5, past, bias=padded[..., :4].copy())


def test_masks_of_windows_change_nothing(rng, models, embed, session_of):
    """Gemma 3 as optimum exports it: layers with a window have a mask that hides what the window does."""
    nodes, outputs = read_nodes(models.converted("gemma3_text"))
    for node in with_input(nodes, ATTENTION_BIAS, "whole", "float"):
        if node.attributes.get("local_window_size", 0) > 0:
            node.inputs[ATTENTION_BIAS][0] = "sliding"
    session = Session(npu.NpuDevice(str(models.artifacts("gemma3_text", CONTEXT))), nodes, outputs)
    window = max(session.attributes["attention.window"])
    hidden, steps = embed("gemma3_text", rng.integers(3, 300, 11)), steps_of(10, 11)
    whole = np.triu(np.full((11, 11), -np.inf, np.float32), 1)
    sliding = whole + np.tril(np.full((11, 11), -np.inf, np.float32), -window)
    past = session.past(CONTEXT)
    masks = [mask[None, None] for mask in (sliding, whole)]
    found = [
        session.run(hidden[start:stop], stop, past, bias=[mask[..., start:stop, :stop].copy() for mask in masks])[0]
        for start, stop in steps
    ]
    assert np.array(found).tobytes() == run_all(session_of("gemma3_text"), hidden, steps).tobytes()
    narrow = sliding[None, None, :10, :10].copy()
    narrow[..., 9, 9 - window + 1] = -np.inf
    with pytest.raises(
        npu.Unsupported, match=rf"0 for the last {window} keys .* position 9 and the key at {10 - window}:"
    ):
        session.run(hidden[:10], 10, past, bias=[narrow, whole[None, None, :10, :10].copy()])


def test_part_of_heads_turns_in_graphs_order(rng, models, embed):
    """The keys of the first layer, compared with RoPE of the first 16 of 32 elements in float64.

    A key is rounded to bf16 after the norm, the product and RoPE, each by at most 2^-9 of itself; of the 288 roundings
    of the norm's result 2^-9 / sqrt(3) of the key remain, so 4 x 2^-9 of the largest element is more than all of them.
    """
    nodes, outputs = read_nodes(models.converted("llama"))
    attentions = [node for node in nodes if node.op_type == "FlowQKVAttention"]
    for node in attentions:
        for table in node.inputs[COS_CACHE : COS_CACHE + 2]:
            table[2:] = [[table[2][0], 8], np.ascontiguousarray(table[3][:, :8])]
    session = Session(npu.NpuDevice(str(models.artifacts("llama", CONTEXT))), nodes, outputs)
    hidden, past = embed("llama", rng.integers(3, 300, 3)), session.past(CONTEXT, np.float32)
    run_all(session, hidden, steps_of(2, 3), past)
    session.device.restore([_argument(tensor) for tensor in past])

    norm = next(node for node in nodes if node.op_type == "SimplifiedLayerNormalization")
    product = next(node for node in nodes if node.op_type == "Q4NXMatMul")
    weight = q4nx.dequantize(product.inputs[1][3], product.attributes["M"], product.attributes["K"])
    x = hidden.astype(np.float64)
    x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + norm.attributes["epsilon"]) * norm.inputs[1][3]
    d, heads, kv_heads = (session.attributes[f"attention.{of}"] for of in ("head_size", "heads", "kv_heads"))
    keys = (x @ weight.astype(np.float64).T)[:, heads * d : (heads + kv_heads) * d].reshape(3, kv_heads, d)
    cos, sin = (attentions[0].inputs[at][3][:3, None].astype(np.float64) for at in (COS_CACHE, COS_CACHE + 1))
    first, second, rest = np.split(keys, [8, 16], axis=-1)
    expected = np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)
    np.testing.assert_allclose(
        past[0][0, :, :3].transpose(1, 0, 2), expected, rtol=0, atol=4 * 2.0**-9 * np.abs(expected).max()
    )
    # A session goes on from such tensors as from its own memory.
    again = session.run(hidden[2:], 3, [tensor.copy() for tensor in past])[0]
    assert again.tobytes() == session.run(hidden[2:], 3, past)[0].tobytes()


def test_given_tables_may_change_between_calls(rng, models, embed):
    """LongRoPE as ORT GenAI's builder writes it; compared with both tables in one constant, chosen by position_ids."""
    nodes, outputs = read_nodes(models.converted("llama"))
    tables = [next(node for node in nodes if node.op_type == "FlowQKVAttention").inputs[at][3] for at in (7, 8)]
    first, second = [table[:24].copy() for table in tables], [table[300:].copy() for table in tables]
    device = npu.NpuDevice(str(models.artifacts("llama", CONTEXT)))
    constant = Session(device, with_position_ids(nodes), outputs)
    hidden, past = embed("llama", rng.integers(3, 300, 6)), constant.past(CONTEXT)
    expected = [
        constant.run(hidden[start:stop], stop, past, positions=range(start + shift, stop + shift))[0]
        for (start, stop), shift in zip(steps_of(4, 5, 6), (0, 300, 300), strict=True)
    ]
    nodes, outputs = read_nodes(models.converted("llama"))
    for at, name in ((COS_CACHE, "cos"), (COS_CACHE + 1, "sin")):
        nodes = with_input(nodes, at, name, "float")
    given = Session(device, nodes, outputs)
    past = given.past(CONTEXT)
    found = [
        given.run(hidden[start:stop], stop, past, tables=each)[0]
        for (start, stop), each in zip(steps_of(4, 5, 6), (first, second, second), strict=True)
    ]
    assert np.array(found).tobytes() == np.array(expected).tobytes()
    with pytest.raises(RuntimeError, match=r"expected positions below 24, .* got 24: shorten the context"):
        given.run(hidden[:1], 25, past, tables=first)
    with pytest.raises(RuntimeError, match=r"cos_cache and sin_cache of shape \[positions, 16\], got \[24,8\] and"):
        given.run(hidden[:1], 7, past, tables=[table[:, :8].copy() for table in first])


def test_factor_of_updates_is_in_packed_weights(models):
    """Granite's residual_multiplier: 0.22 is in the scales and minima of the two projections that update the stream."""
    nodes, outputs = read_nodes(models.converted("llama"))
    plain = npu.lower_layers(partition(nodes), outputs)
    scaled = []
    for node in nodes:
        scaled.append(node)
        if node.name.endswith(("o_proj", "down_proj")):
            product, result = node.outputs[0], [f"{node.name}/unscaled", *node.outputs[0][1:]]
            node.outputs = [result]
            number = ["multiplier", "float", [], np.array(0.22, np.float32)]
            scaled.append(GivenNode(f"{node.name}/scaled", "Mul", "", {}, [number, result], [product]))
    found = npu.lower_layers(partition(scaled), outputs)
    of = [next(node for node in lowered.nodes if node.op_type == "DecoderLayers") for lowered in (plain, found)]
    before, after = (np.frombuffer(node.packed("weights"), np.uint8) for node in of)
    sizes = of[0].attributes
    hidden, attended = sizes["hidden"], sizes["attention.heads"] * sizes["attention.head_size"]
    rows = hidden // 32
    qkv = (attended + 2 * sizes["attention.kv_heads"] * sizes["attention.head_size"]) // 32 * 2 * 5120
    shape = rows, -(-attended // 256), 5120
    part = slice(qkv, qkv + int(np.prod(shape)))
    assert after[:qkv].tobytes() == before[:qkv].tobytes()
    weights = [q4nx.unpack(of[part].reshape(shape), hidden, attended) for of in (before, after)]
    assert np.array_equal(weights[0].codes, weights[1].codes)
    for name in ("scale", "minimum"):
        numbers = [getattr(weight, name).astype(np.float64) for weight in weights]
        # The product is rounded to bf16, by at most half of 2^-7 of itself.
        np.testing.assert_allclose(numbers[1], 0.22 * numbers[0], rtol=2.0**-8)
