# SPDX-License-Identifier: Apache-2.0
"""A decoder's layers as one node on a device of each API: numbers, commands, transfers and refusals."""

import numpy as np
import pytest
import torch

from flownpu.ops import q4nx
from tests.decoding import float32_tolerance
from tests.npu.decoders import GivenNode, Session, partition, read_nodes
from tests.ops.device import _argument, testing

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("pocl")]

gpu = testing.gpu


def sessions(models, **options):
    """Makes sessions of models with caches and products in float32, so that neither rounds; each is made once."""
    made = {}

    def session(name, *, new=False):
        if new or name not in made:
            nodes = read_nodes(models.converted(name, kv_dtype="fp32"))
            made[name] = Session(gpu.SessionDevice(half=False, **options), *nodes)
        return made[name]

    return session


@pytest.fixture(scope="module")
def opened(models, pocl):
    del pocl
    return sessions(models)


@pytest.fixture(scope="module")
def opened_in_turn(models, gpu_api):
    return sessions(models, vulkan=gpu_api == "vulkan")


def hidden_of(models, name, ids):
    with torch.no_grad():
        return models.checkpoint(name).reference.get_input_embeddings()(torch.from_numpy(ids)).numpy()


def logits_of(models, name, ids):
    with torch.no_grad():
        return models.checkpoint(name).reference(torch.from_numpy(ids)[None]).logits[0].numpy()


def run_all(session, hidden, stops, capacity):
    """Logits of the last token of each step, and the last presents; capacity 0: caches that grow."""
    past, found, begin = session.past(capacity, np.float32), [], 0
    for end in stops:
        logits, past = session.run(hidden[begin:end], end, past, share=capacity > 0)
        found.append(logits)
        begin = end
    return np.array(found), past


# A cache that grows (capacity 0) or is shared, both for the model that has layers with windows and layers without.
@pytest.mark.parametrize(
    ("name", "capacity", "gpu_api"),
    [
        ("trained", 0, "opencl"),
        ("trained", 80, "opencl"),
        ("llama", 0, "opencl"),
        ("experts", 0, "opencl"),
        ("trained", 80, "vulkan"),
        ("experts", 0, "vulkan"),
    ],
    indirect=["gpu_api"],
)
def test_logits_equal_transformers(name, capacity, models, opened_in_turn):
    """A prompt beyond all windows, two tokens, a second prompt and a token; test_exported_graphs.py has chunks."""
    session = opened_in_turn(name)
    sizes = session.attributes
    ids = np.random.default_rng(5).integers(3, 250, 76)
    stops = [66, 67, 68, 75, 76]
    found, _ = run_all(session, hidden_of(models, name, ids), stops, capacity)
    expected = logits_of(models, name, ids)[np.array(stops) - 1]
    tolerance = float32_tolerance(expected, sizes["layers"], sizes["feed_forward.size"])
    assert np.abs(found[:, : expected.shape[1]] - expected).max() <= tolerance


@pytest.mark.parametrize(("name", "tokens", "of_layer"), [("trained", 1, 5), ("trained", 12, 5), ("experts", 3, 9)])
def test_token_is_one_list_of_commands(name, tokens, of_layer, models, opened_in_turn, gpu_api):
    """A hidden state goes in, logits come out; nothing is allocated or compiled, and nothing else is moved.

    Four products and attention are a layer's kernels, and a norm and the LM head follow. With experts there are a norm,
    the router, the choice and the sum of answers, too, and of the weights of experts the host sees none. Each kernel
    needs what the one before it wrote. Vulkan's commands are recorded once; what differs from token to token are their
    arguments.
    """
    session = opened_in_turn(name)
    sizes = session.attributes
    hidden = hidden_of(models, name, np.arange(3, 63))
    _, past = run_all(session, hidden[:7], [6, 7], 64)
    before = session.device.counts()
    for end in range(8, 8 + tokens):
        _, past = session.run(hidden[end - 1 : end], end, past)
    spent = {name: count - before[name] for name, count in session.device.counts().items()}
    kernels = of_layer * sizes["layers"] + 2
    replayed = gpu_api == "vulkan"
    assert spent == {
        "dispatches": tokens * kernels,
        "submissions": tokens * replayed,
        "recordings": 0,
        "barriers": tokens * kernels * replayed,
        "allocations": 0,
        "bytes_to_device": tokens * 4 * sizes["hidden"],
        "bytes_to_host": tokens * 4 * sizes["vocabulary"],
        "compiled": 0,
        "from_cache": 0,
    }


def test_growing_cache_moves_seldom(models, opened):
    """The cache grows by half: 39 tokens after 10 make it move 4 times (10, 15, 22, 33, 49), not 39 times."""
    session = opened("llama", new=True)
    hidden = hidden_of(models, "llama", np.arange(3, 52))
    _, past = run_all(session, hidden[:10], [10], 0)
    before = session.device.counts()["allocations"]
    for end in range(11, 50):
        _, past = session.run(hidden[end - 1 : end], end, past, share=False)
    moves = (session.device.counts()["allocations"] - before) / (2 * session.attributes["layers"])
    assert moves == 4


def test_rewound_and_branched_sequences_equal_fresh(models, opened):
    """A run from a past that another run continued is a branch, and leaves that run's cache; a rewind is in place."""
    session = opened("llama")
    ids = np.random.default_rng(1).integers(3, 250, 31)
    hidden = hidden_of(models, "llama", ids)
    past = session.past(0, np.float32)
    _, past = session.run(hidden[:20], 20, past, share=False)
    straight, first = session.run(hidden[20:30], 30, past, share=False)
    alone, _ = session.run(hidden[30:31], 31, first, share=False)
    session.run(hidden[5:15], 30, past, share=False)  # a branch of other tokens
    beside_it, _ = session.run(hidden[30:31], 31, first, share=False)
    np.testing.assert_array_equal(beside_it, alone)
    branched, _ = session.run(hidden[20:30], 30, past, share=False)
    np.testing.assert_array_equal(straight, branched)
    shared = session.past(40, np.float32)
    session.run(hidden[:30], 30, shared)
    session.run(hidden[5:12], 17, shared)  # other tokens in their place
    session.run(hidden[10:20], 20, shared)
    again, _ = session.run(hidden[20:30], 30, shared)
    np.testing.assert_allclose(again, straight, rtol=0, atol=float32_tolerance(straight, 3, 608))


def test_cache_goes_on_at_another_device(models, opened):
    """Tickets are replaced by the keys and values that they stand for, in tensors that any device reads."""
    session = opened("llama")
    hidden = hidden_of(models, "llama", np.arange(3, 33))
    _, past = session.run(hidden[:20], 20, session.past(32, np.float32))
    kept = [part.copy() for part in past]
    session.device.restore([_argument(part) for part in kept])
    assert all(np.abs(part[:, :, :20]).min() > 0 and not part[:, :, 20:].any() for part in kept)
    expected, _ = session.run(hidden[20:30], 30, past)
    # For another session these are plain keys and values.
    found, _ = opened("llama", new=True).run(hidden[20:30], 30, kept)
    np.testing.assert_array_equal(found, expected)


def test_context_without_room_is_refused_with_numbers(models, opened):
    session = opened("trained")
    hidden = hidden_of(models, "trained", np.arange(3, 5))
    past = session.past(4, np.float32)
    heads, size = session.attributes["attention.kv_heads"], session.attributes["attention.head_size"]
    positions = 2**31 // (4 * heads * size) + 1  # a byte more than indices reach; the memory is never touched
    past[0] = np.zeros((1, heads, positions, size), np.float32)
    before = session.device.counts()
    message = rf"expected a KV cache that fits .*, got {positions} positions of .* there is room for \d+ positions"
    with pytest.raises(testing.npu.Unsupported, match=message):
        session.run(hidden, 2, past)
    assert session.device.counts() == before


def test_unsupported_decoder_becomes_operators_with_reason(models):
    nodes, outputs = read_nodes(models.converted("experts"))
    for node in nodes:
        if node.op_type == "FlowQKVAttention":
            node.attributes["rotary_interleaved"] = 1
    lowered = gpu.SessionDevice().lower(partition(nodes), outputs=outputs)
    assert lowered.summary.startswith("operators by themselves, since ")
    assert "expected rotary_interleaved = 0" in lowered.summary
    domains = {node.op_type: node.domain for node in lowered.nodes}
    assert domains["Q4NXMoE"] == "ai.flownpu.gpu:ai.flownpu"


def test_paged_decoder_with_other_logits_becomes_operators_with_reason(models):
    nodes, outputs = read_nodes(models.converted("llama", paged=True))
    ends = next(node for node in nodes if node.op_type == "Slice")
    ends.inputs[1][3][:] = 0  # the first tokens' predecessors, too
    lowered = gpu.SessionDevice().lower(partition(nodes), outputs=outputs)
    assert "expected it to select each sequence's last token" in lowered.summary
    assert "PagedAttention" in {node.op_type for node in lowered.nodes}  # the host's


@pytest.mark.parametrize("layout", [q4nx.NARROW, q4nx.EIGHT_BITS, q4nx.TABLE], ids=str)
def test_product_alone_is_taken_in_every_layout(layout):
    blocks = np.zeros((2, 2, layout.block_bytes), np.uint8)
    inputs = [["x", "float", [3, 64], None], ["w", "uint8", list(blocks.shape), blocks]]
    node = GivenNode("p", "Q4NXMatMul", "ai.flownpu", {"M": 64, "K": 64}, inputs, [["y", "float", [3, 64], None]])
    lowered = gpu.SessionDevice().lower(partition([node]), outputs=["y"])
    assert not lowered.on_host


def test_unknown_device_is_left_with_reason(models):
    nodes, outputs = read_nodes(models.converted("llama"))
    lowered = gpu.SessionDevice(opencl_device="Radeon 999").lower(partition(nodes), outputs=outputs)
    assert "expected opencl_device to be a part of one of" in lowered.on_host[0][2]
