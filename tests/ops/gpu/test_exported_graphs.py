# SPDX-License-Identifier: Apache-2.0
"""Decoders that are one node on the GPU beyond plain layers: sinks, biases, factors, and logits of all tokens; on each
API what exporters' graphs have as inputs: positions, tables."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
from transformers.models.llama import modeling_llama

from flownpu.ops import q4nx
from tests.decoding import float32_tolerance
from tests.end_to_end.test_numbers import logit_error
from tests.families.cells import rms
from tests.npu.decoders import (
    ATTENTION_BIAS,
    COS_CACHE,
    GivenNode,
    Session,
    npu,
    read_nodes,
    with_input,
    with_position_ids,
)
from tests.ops.device import testing

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("gpu_api")]

gpu = testing.gpu
# For what graphs become, and kernels that test_dialects.py compares on both.
ON_OPENCL = pytest.mark.parametrize("gpu_api", ["opencl"], indirect=True)
HEAD_SINK = 14
IDS = np.random.default_rng(5).integers(3, 250, 24)
STEPS = [(0, 20), (20, 21), (21, 24)]


@pytest.fixture(scope="module")
def device(gpu_api):
    """Neither products nor stored activations round."""
    return gpu.SessionDevice(half=False, vulkan=gpu_api == "vulkan")


def nodes_of(models, name="llama", **options):
    return read_nodes(models.converted(name, kv_dtype="fp32", **options))


def hidden_of(models, ids, name="llama"):
    with torch.no_grad():
        return models.checkpoint(name).reference.get_input_embeddings()(torch.from_numpy(ids)).numpy()


def run_all(session, hidden, steps, inputs=lambda _start, _stop: {}):
    past = session.past(300, np.float32)
    return [session.run(hidden[start:stop], stop, past, **inputs(start, stop))[0] for start, stop in steps]


def check(session, found, expected):
    """Float32's error, as in test_session.py; nothing else rounds."""
    sizes = session.attributes
    tolerance = float32_tolerance(expected, sizes["layers"], sizes["feed_forward.size"])
    assert tolerance < expected.std() / 1000
    assert np.abs(np.array(found) - expected).max() <= tolerance


@ON_OPENCL
def test_logits_with_sinks_equal_transformers(device, models, rng, monkeypatch):
    """GPT-OSS's attention in Llama's layers. A sink of -200 has no weight, a head whose sink is 40 gives nothing."""
    model, (nodes, outputs) = models.checkpoint("llama"), nodes_of(models)
    attentions = [node for node in with_input(nodes, HEAD_SINK, "", "") if node.op_type == "FlowQKVAttention"]
    sinks = rng.uniform(-1, 3, (len(attentions), attentions[0].attributes["num_heads"])).astype(np.float32)
    sinks[0, :2] = 40, -200
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", eager_attention_forward)
    for number, (node, of_layer) in enumerate(zip(attentions, sinks, strict=True)):
        node.inputs[HEAD_SINK] = [f"sinks.{number}", "float", list(of_layer.shape), of_layer]
        layer = model.reference.model.layers[number]
        monkeypatch.setattr(layer.self_attn, "sinks", torch.from_numpy(of_layer), raising=False)
    session = Session(device, nodes, outputs)
    found = run_all(session, hidden_of(models, IDS), STEPS)
    check(session, found, model.logits(IDS[None])[0, [stop - 1 for _, stop in STEPS]])


def logits_without_biases(reference, layers):
    """The logits at the ends of STEPS, where these layers have no bias of queries, keys and values."""
    with torch.no_grad():
        for layer in layers:
            attention = reference.model.layers[layer].self_attn
            for part in (attention.q_proj, attention.k_proj, attention.v_proj):
                part.bias.zero_()
        return reference(torch.from_numpy(IDS)[None]).logits[0, [stop - 1 for _, stop in STEPS]].numpy()


@ON_OPENCL
@pytest.mark.parametrize("rounds", [False, True])
def test_bias_of_some_layers_equals_transformers(rounds, gpu_api, models):
    """Layers without the bias that others have get zeros, in a chunk, which may be rounded to int8, and for a token."""
    reference, (nodes, outputs) = deepcopy(models.checkpoint("biases").reference), nodes_of(models, "biases")
    first = next(node for node in nodes if node.op_type == "Q4NXMatMul" and len(node.inputs) > 2)
    first.inputs[2] = ["", "", None, None]
    session = Session(gpu.SessionDevice(rounds=rounds, half=False, vulkan=gpu_api == "vulkan"), nodes, outputs)
    found = np.array(run_all(session, hidden_of(models, IDS, "biases"), STEPS))
    expected = logits_without_biases(reference, [0])
    if not rounds:
        return check(session, found, expected)
    layers = range(session.attributes["layers"])
    bound = 2 * logit_error("int8", len(layers), expected)
    assert rms(found, expected) < bound < rms(logits_without_biases(reference, layers), expected)
    return None


@ON_OPENCL
def test_logits_of_all_tokens_equal_transformers(device, models, rng):
    """A prompt of more than a chunk, and a token; logits of padding are zeros."""
    session, ids = Session(device, *nodes_of(models, logits="all")), rng.integers(3, 250, 259)
    hidden, expected = hidden_of(models, ids), models.checkpoint("llama").logits(ids[None])[0]
    check(session, np.concatenate(run_all(session, hidden, [(0, 258), (258, 259)])), expected)
    padded, _ = session.run(hidden[:4], 4, session.past(300, np.float32), length=2)
    check(session, padded[:2], expected[:2])
    assert not padded[2:].any()


def test_position_ids_choose_rows_of_rotary_tables(device, models):
    """RoPE depends on differences alone: rows that follow one another from any row on give nearly the same numbers."""
    counted, given = (
        Session(device, each(nodes_of(models)[0]), nodes_of(models)[1]) for each in (list, with_position_ids)
    )
    hidden = hidden_of(models, IDS)
    expected = np.array(run_all(counted, hidden, STEPS))
    found = {
        shift: np.array(
            run_all(given, hidden, STEPS, lambda start, stop, by=shift: {"positions": range(start + by, stop + by)})
        )
        for shift in (0, 600)
    }
    assert found[0].tobytes() == expected.tobytes()
    assert found[600].tobytes() != expected.tobytes()
    # An angle of up to 624 radians is off by 2^-15 in float32, half its last place, before the table has its cosine.
    assert np.abs(found[600] - expected).max() < expected.std() * 2.0**-12
    past = given.past(300, np.float32)
    given.run(hidden[:5], 5, past, positions=range(5))
    turned = given.run(hidden[5:6], 6, past, positions=[305])[0]
    apart = run_all(counted, hidden, [(0, 5), (5, 6)])[1]
    assert np.abs(turned - apart).max() > 10 * np.abs(found[600] - expected).max()
    with pytest.raises(npu.Unsupported, match="position_ids that follow one another, got 1 after 1: give such, or set"):
        given.run(hidden[:4], 4, past, positions=[0, 1, 1, 2])


@ON_OPENCL
def test_attention_bias_that_masks_later_keys_changes_nothing(device, models):
    nodes, outputs = nodes_of(models)
    plain = run_all(Session(device, nodes, outputs), hidden_of(models, IDS), STEPS)
    masked = Session(device, with_input(nodes_of(models)[0], ATTENTION_BIAS, "bias", "float"), outputs)
    causal = np.triu(np.full((len(IDS), len(IDS)), -np.inf, np.float32), 1)[None, None]
    found = run_all(
        masked, hidden_of(models, IDS), STEPS, lambda start, stop: {"bias": causal[..., start:stop, :stop].copy()}
    )
    assert np.array(found).tobytes() == np.array(plain).tobytes()
    padded = causal[..., :5, :5].copy()
    padded[..., 3, 1] = -np.inf
    with pytest.raises(npu.Unsupported, match="got -inf for the token at position 3 and the key at 1: give texts wit"):
        masked.run(hidden_of(models, IDS[:5]), 5, masked.past(8, np.float32), bias=padded)


def test_given_tables_may_change_between_calls(device, models):
    """LongRoPE as ORT GenAI's builder writes it; compared with both tables in one constant, chosen by position_ids."""
    nodes, outputs = nodes_of(models)
    tables = [next(node for node in nodes if node.op_type == "FlowQKVAttention").inputs[at][3] for at in (7, 8)]
    first, second = [table[:24].copy() for table in tables], [table[300:].copy() for table in tables]
    shifts = dict(zip(STEPS, (0, 300, 300), strict=True))
    constant, hidden = Session(device, with_position_ids(nodes), outputs), hidden_of(models, IDS)
    expected = run_all(
        constant, hidden, STEPS,
        lambda start, stop: {"positions": range(start + shifts[start, stop], stop + shifts[start, stop])},
    )  # fmt: skip
    nodes, _ = nodes_of(models)
    for at, name in ((COS_CACHE, "cos"), (COS_CACHE + 1, "sin")):
        nodes = with_input(nodes, at, name, "float")
    given = Session(device, nodes, outputs)
    found = run_all(given, hidden, STEPS, lambda start, stop: {"tables": second if shifts[start, stop] else first})
    assert np.array(found).tobytes() == np.array(expected).tobytes()


@ON_OPENCL
def test_factor_of_updates_equals_scaled_weights(device, models):
    """Granite's residual_multiplier; powers of two, so that the same factor in scales and minima rounds nothing."""
    (plain, outputs), (others, _) = nodes_of(models), nodes_of(models)
    scaled = []
    for node, other in zip(plain, others, strict=True):
        scaled.append(node)
        factor = {"o_proj": 0.25, "down_proj": 0.5}.get(node.name.rpartition(".")[2].rpartition("/")[2])
        if factor is None:
            continue
        product, result = node.outputs[0], [f"{node.name}/unscaled", *node.outputs[0][1:]]
        node.outputs = [result]
        number = [f"{node.name}/factor", "float", [], np.array(factor, np.float32)]
        scaled.append(GivenNode(f"{node.name}/scaled", "Mul", "", {}, [number, result], [product]))
        name, kind, shape, blocks = other.inputs[1]
        codes, scale, minimum = q4nx.unpack(blocks, other.attributes["M"], other.attributes["K"])
        layout = q4nx.layout_of(blocks)
        blocks = q4nx.pack(codes, scale * scale.dtype.type(factor), minimum * minimum.dtype.type(factor), layout)
        other.inputs[1] = [name, kind, shape, blocks]
    assert len(scaled) > len(plain)
    hidden = hidden_of(models, IDS)
    found, expected = (np.array(run_all(Session(device, nodes, outputs), hidden, STEPS)) for nodes in (scaled, others))
    assert found.tobytes() == expected.tobytes()
