# SPDX-License-Identifier: Apache-2.0
"""A decoder's layers on the emulated array, through the device: prompts, tokens, and changes of the past."""

import dataclasses
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from flownpu.aie.designs.decode_layer import design as decode_layer
from flownpu.aie.programs.decode import DECODE_WAYS, HOST_EXPERTS
from flownpu.npu.artifacts import build_artifacts
from flownpu.npu.layers import read_decoder
from flownpu.ops.definitions.int8_cache import SCALE_BYTES, dequantise_rows, quantise_rows
from tests.aie.host_kernels import assert_within
from tests.aie.words import read_family, words_of
from tests.npu.decoders import BFLOAT16, Session, npu, read_nodes
from tests.npu.rounding import array_error
from tests.npu.run.steps import CONTEXT, run_all, steps_of
from tests.ops.device import _argument

CHUNKS = "256 or 512"  # that fit the context
TURNS = 50, 51, 70, 71, 72, 73
TOKENS = 1, 2, 3
SLOW = pytest.mark.slow
MEGATILE = 1024  # columns of a GEMM's megatile, to which products are padded


# --- Numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "prompt", "stops", "ways"),
    [
        # A first prompt that fills no chunk, a token, a second prompt, tokens.
        ("trained", True, TURNS, DECODE_WAYS),
        # The other way of decoding.
        pytest.param("trained", True, TURNS, ("pairs",), marks=SLOW),
        # A chunk; another, and a rest that goes token by token, since a chunk would pass the context's end.
        pytest.param("gemma3_text", True, (222, 511, 512), DECODE_WAYS, marks=SLOW),
        # A chunk of the longer kind, whose attention is several calls of a dispatch.
        pytest.param("gemma3_text", True, (400,), DECODE_WAYS, marks=SLOW),
        # A layer without RoPE among those that have it.
        ("smollm3", True, (50, 51), DECODE_WAYS),
        # Biases of queries, keys and values, in a prompt and in every way of decoding.
        ("biases", True, TURNS, DECODE_WAYS[:1]),
        pytest.param("bias block", True, TURNS, DECODE_WAYS[:1], marks=SLOW),
        # A soft cap of scores; norms of all heads together, and behind each part.
        *((name, True, (50, 51), DECODE_WAYS[:1]) for name in ("gemma2", "olmo2")),
        # Experts of a prompt by the host; of a token on the array, with either way of attention, or by the host.
        *(("experts", True, (50, 51, 52), (way,)) for way in ("split", next(iter(HOST_EXPERTS)))),
        pytest.param("experts", False, TOKENS, ("pairs",), marks=SLOW),
        # A vocabulary that does not fill whole blocks, and a narrow model, whose prompt goes token by token.
        ("odd", True, TURNS, DECODE_WAYS),
        pytest.param("narrow", False, (7, 8), DECODE_WAYS, marks=SLOW),
    ],
)
def test_logits_are_near_transformers(rng, name, prompt, stops, ways, session_of, embed, models):
    """Compared with transformers, which computes in float32.

    The bound is twice an estimate of the errors' rms (tests/npu/rounding.py), which takes roundings for independent and
    evenly spread, though they are not quite. A wrong angle, scale or norm changes logits by about their own spread, at
    least three times the bound.
    """
    session, model = session_of(name, ways=ways), models.checkpoint(name)
    ids, steps = rng.integers(3, 300, stops[-1]), steps_of(*stops)
    found = run_all(session, embed(name, ids), steps)
    if cap := getattr(model.reference.config, "final_logit_softcapping", None):  # the graph's, behind the LM head
        found = cap * np.tanh(found / cap)
    lasts = [stop - 1 for stop in stops]
    expected = model.logits(ids[None])[0, lasts]
    error = np.sqrt(np.square(found - expected).mean())
    bound = 2 * array_error(model.reference, ids, lasts, prompt=prompt)
    assert error < bound < expected.std() / 3


def test_int8_cache_logits_are_near_transformers(rng, session_of, embed, models):
    """Token by token, so that all keys and values but a token's own are read in int8. The bound is as above."""
    ids = rng.integers(3, 300, 32)
    session = session_of("trained", kv_dtype="int8")
    past = session.past(CONTEXT, np.int8)
    found = run_all(session, embed("trained", ids), steps_of(*range(1, 33)), past)[16:]
    model = models.checkpoint("trained")
    expected = model.logits(ids[None])[0, 16:]
    error = np.sqrt(np.square(found - expected).mean())
    bound = 2 * array_error(model.reference, ids, range(16, 32), prompt=False, int8_cache=True)
    assert error < bound < expected.std() / 3


def test_int8_past_has_rows_of_bf16_and_goes_on_at_another_device(rng, session_of, embed):
    """The prompt's keys and values are those of a bf16 cache, rounded; a token reads nothing but the rows in int8.

    A code may be the second nearest by 127e-4 of a step (aie/kernels/int8_rows.cc).
    """
    ids = rng.integers(3, 300, 204)
    hidden, session = embed("trained", ids), session_of("trained", kv_dtype="int8")
    pasts = {np.int8: session.past(CONTEXT, np.int8), BFLOAT16: session.past(CONTEXT)}
    for dtype, of_prompt in ((np.int8, session), (BFLOAT16, session_of("trained"))):
        run_all(of_prompt, hidden, [(0, 201)], pasts[dtype])
        of_prompt.device.restore([_argument(tensor) for tensor in pasts[dtype]])
    for rows, numbers in zip(pasts[np.int8], pasts[BFLOAT16], strict=True):
        found, expected = rows[:, :, :200], numbers[:, :, :200].astype(np.float32)
        scales = quantise_rows(expected)[..., -SCALE_BYTES:].copy().view(np.float32)
        assert_within(dequantise_rows(found), expected, (0.5 + 127e-4) * scales)
        assert rows[:, :, 200, :-SCALE_BYTES].any(), "the last token's, which the array wrote"
    other = session_of("trained", kv_dtype="int8", new=True)
    steps = [(201, 202), (202, 203), (203, 204)]
    here, there = (
        run_all(one, hidden, steps, [tensor.copy() for tensor in pasts[np.int8]]) for one in (session, other)
    )
    assert here.tobytes() == there.tobytes()


def test_short_prompt_gives_bits_of_single_tokens(rng, session_of, embed):
    """Short prompts go token by token, so their bits do not depend on the split into calls."""
    session = session_of("llama")
    hidden = embed("llama", rng.integers(3, 300, 12))
    one = run_all(session, hidden, steps_of(*range(1, 13)))
    some = run_all(session, hidden, steps_of(5, 6, 12))
    assert some.tobytes() == one[[4, 5, 11]].tobytes()


VARIANT_STEPS = steps_of(40, 41, 50, 51)


@pytest.fixture(scope="module")
def plain(session_of, embed):
    """Hidden states of a text, and the logits of its steps where nothing is varied."""
    hidden = embed("gemma3_text", np.random.default_rng(7).integers(3, 300, VARIANT_STEPS[-1][1]))
    return hidden, run_all(session_of("gemma3_text"), hidden, VARIANT_STEPS)


@pytest.mark.parametrize(
    "variant",
    [{"kv_dtype": "fp32"}, {"kv_dtype": "fp16"}, {"sliding_window_cache": True}, {"share": False}],
    ids=lambda variant: next(iter(variant)) + str(next(iter(variant.values()))),
)
def test_tensor_type_and_capacity_change_nothing(variant, session_of, plain):
    hidden, expected = plain
    share = variant.get("share", True)
    options = {key: value for key, value in variant.items() if key != "share"}
    session = session_of("gemma3_text", **options)
    past = session.past(
        0 if not share else CONTEXT, {"fp32": np.float32, "fp16": np.float16}.get(variant.get("kv_dtype"), BFLOAT16)
    )
    if "sliding_window_cache" in options:
        capacity = max(session.attributes["attention.window"]) + 3
        past = [
            tensor[:, :, :capacity].copy() if session.attributes["attention.window_sized_cache"][place // 2] else tensor
            for place, tensor in enumerate(past)
        ]
    found = []
    for start, stop in VARIANT_STEPS:
        logits, past = session.run(hidden[start:stop], stop, past, share=share)
        found.append(logits)
    assert np.array(found).tobytes() == expected.tobytes()


def test_right_padded_prompt_gives_same_bits(rng, session_of, embed):
    session = session_of("llama")
    hidden = embed("llama", rng.integers(3, 300, 8))
    expected = run_all(session, hidden, steps_of(5, 6))
    past = session.past(CONTEXT)
    first, _ = session.run(hidden[:8], 8, past, length=5)
    second, _ = session.run(hidden[5:6], 6, past)
    assert np.array([first, second]).tobytes() == expected.tobytes()


# --- What callers do with the past ------------------------------------------------------------------------------------


def test_rewound_and_branched_sequences_equal_fresh(rng, session_of, embed):
    session = session_of("llama")
    ids = rng.integers(3, 300, 24)
    hidden, other = embed("llama", ids), embed("llama", ids[::-1].copy())
    expected = run_all(session, hidden, steps_of(20, 21, 22, 23, 24))

    past = session.past(CONTEXT)
    run_all(session, hidden, steps_of(20), past)
    kept = [tensor.copy() for tensor in past]
    session.run(other[:2], 22, past)
    back, _ = session.run(hidden[20:21], 21, past)  # overwrites what another run left
    branch, _ = session.run(hidden[20:21], 21, kept)
    assert back.tobytes() == branch.tobytes() == expected[1].tobytes()
    for tensors in (past, kept):
        again = run_all(session, hidden, [(21, 22), (22, 23), (23, 24)], tensors)
        assert again.tobytes() == expected[2:].tobytes()


def test_restored_past_goes_on_at_another_device(rng, session_of, embed):
    session, hidden = session_of("qwen3"), embed("qwen3", rng.integers(3, 300, 43))
    past = session.past(CONTEXT)
    run_all(session, hidden, steps_of(40), past)
    restored = [tensor.copy() for tensor in past]
    session.device.restore([_argument(tensor) for tensor in restored])
    assert all(np.abs(tensor[:, :, :40].astype(np.float32)).min(-1).max() > 0 for tensor in restored)
    assert not any(tensor[:, :, 40:].any() for tensor in restored)
    expected = run_all(session, hidden, [(40, 41), (41, 42), (42, 43)], past)
    elsewhere = session_of("qwen3", new=True)
    assert run_all(elsewhere, hidden, [(40, 41), (41, 42), (42, 43)], restored).tobytes() == expected.tobytes()
    with pytest.raises(RuntimeError, match="stands for a KV cache that is gone"):
        elsewhere.device.restore([_argument(tensor) for tensor in past])


def test_simultaneous_conversations_equal_single_ones(rng, session_of, embed):
    """Four conversations, two in each of two sessions over one array, have the same bits as alone."""
    texts = [embed("llama", rng.integers(3, 300, 12)) for _ in range(4)]
    steps = steps_of(*range(1, 13))
    alone = [run_all(session_of("llama"), hidden, steps) for hidden in texts]
    sessions = [session_of("llama"), session_of("llama", new=True)] * 2
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda pair: run_all(pair[0], pair[1], steps), zip(sessions, texts, strict=True)))
    assert np.array(together).tobytes() == np.array(alone).tobytes()


# --- What is moved ----------------------------------------------------------------------------------------------------


def counted(session, run):
    before = session.device.counts()
    run()
    after = session.device.counts()
    return {key: after[key] - before[key] for key in before}


def test_token_and_prompt_have_expected_dispatches_and_bytes(rng, session_of, embed):
    """For a token two lines go to the array and logits come back; for a prompt its embeddings go there as well."""
    session, hidden = session_of("gemma3_text"), embed("gemma3_text", rng.integers(3, 300, 260))
    past, layers = session.past(CONTEXT), session.attributes["layers"]
    run_all(session, hidden, steps_of(1), past)  # makes the cache and sends the words that all positions share
    line, vocabulary = 512, session.attributes["vocabulary"]
    lines, logits = 2 * 2 * line, 2 * vocabulary
    token = counted(session, lambda: session.run(hidden[1:2], 2, past))
    assert token | {"word_bytes": 0} == {
        "dispatches": 1, "calls": 1, "bytes_to_device": lines, "bytes_to_host": logits, "word_bytes": 0,
        "buffer_bytes": 0,
    }  # fmt: skip
    assert 0 < token["word_bytes"] < 100 * layers * 8
    prompt = counted(session, lambda: session.run(hidden[2:258], 258, past))
    # One for the weights of all layers; four for each layer but the last (QKV, attention, output, feed-forward) and one
    # for the last (QKV); then the last token.
    assert prompt["dispatches"] == 1 + 4 * (layers - 1) + 1 + 1
    # For all tokens but the last, the host sends normalised rows, queries, keys and values, and reads products, and no
    # more: embeddings and the residual stream never leave it. Zeros follow the keys up to a multiple of 8 positions.
    of = session.attributes
    heads, kv_heads, d = (of[f"attention.{size}"] for size in ("heads", "kv_heads", "head_size"))
    queries, both = heads * d, 2 * kv_heads * d
    tokens, kept = 255, 264 - 2
    x = tokens * of["hidden"] * 2
    of_heads = (tokens * queries + kept * both) * 2
    assert prompt["bytes_to_device"] == x * (1 + 2 * (layers - 1)) + layers * of_heads + lines
    product = tokens * MEGATILE * 2
    assert prompt["bytes_to_host"] == product * (layers + 2 * (layers - 1)) + logits
    assert prompt["buffer_bytes"] == 0


@SLOW
def test_lm_head_as_own_call_is_within_rounding(rng, monkeypatch, tmp_path, models, session_of, embed):
    """If a call has no room for a layer and the head: the same roundings, except for the last norm."""
    hidden = embed("trained", rng.integers(3, 300, 3))
    expected = run_all(session_of("trained"), hidden, steps_of(1, 2, 3))
    monkeypatch.setattr(
        decode_layer, "_WEIGHTS_MAXIMUM", read_decoder(models.converted("trained")).shape.weight_bytes()
    )
    build_artifacts(models.converted("trained"), context=CONTEXT, output=tmp_path / "artifacts")
    session = Session(npu.NpuDevice(str(tmp_path / "artifacts")), *read_nodes(models.converted("trained")))
    found = run_all(session, hidden, steps_of(1, 2, 3))
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.05 * expected.std())
    assert "in 4 dispatches a token" in session.lowered.summary


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pairs", "split"])
def test_token_is_one_dispatch(rng, way, session_of, embed):
    session, hidden = session_of("trained", ways=(way,)), embed("trained", rng.integers(3, 300, 2))
    past = session.past(CONTEXT)
    run_all(session, hidden, steps_of(1), past)
    assert counted(session, lambda: session.run(hidden[1:2], 2, past))["dispatches"] == 1


def test_sessions_give_back_their_buffers(session_of, embed, models, rng):
    """Sessions free the buffers that they made, while another session keeps the array loaded."""
    keeper, nodes = session_of("llama"), read_nodes(models.converted("llama"))
    hidden = embed("llama", rng.integers(3, 300, 2))
    before = keeper.device.counts()["buffer_bytes"]
    for _ in range(20):
        session = Session(npu.NpuDevice(str(models.artifacts("llama", CONTEXT))), *nodes)
        run_all(session, hidden, steps_of(1, 2))
        assert keeper.device.counts()["buffer_bytes"] > before
        del session
        assert keeper.device.counts()["buffer_bytes"] == before


# --- What is refused --------------------------------------------------------------------------------------------------


def test_batch_and_long_context_are_refused(session_of):
    session = session_of("llama")
    past = session.past(CONTEXT)
    hidden = np.zeros((CONTEXT + 1, session.attributes["hidden"]), np.float32)
    with pytest.raises(npu.Unsupported, match=rf"expected at most {CONTEXT} tokens, .* got {CONTEXT + 1}: build them"):
        session.run(hidden, CONTEXT + 1, past)
    rows = np.zeros((2, 1, session.attributes["hidden"]), np.float32)
    one = np.array(1, np.int32), np.array([0, 0], np.int32)
    with pytest.raises(npu.Unsupported, match="expected one sequence, got a batch of 2"):
        session.step.infer([_argument(array) for array in (rows, *one, *past)], 1 + len(past))
    with pytest.raises(RuntimeError, match=r"expected positions below 1024, .* got 1024: shorten the context"):
        session.run(hidden[:1], 1025, past)


def test_unfit_inputs_are_refused(session_of):
    session = session_of("gemma3_text", sliding_window_cache=True)
    past = session.past(CONTEXT)
    hidden = np.zeros((4, session.attributes["hidden"]), np.float32)
    for message, run in {
        r"hidden states of shape \[batch, tokens, 288\], got \[1,4,144\]": lambda: session.run(hidden[:, ::2], 4, past),
        r"seqlens_k \+ 1 between 4 and total_sequence_length = 5, got 6": lambda: session.run(
            hidden, 5, past, length=6
        ),
        # The length that the graph computes from a mask that begins with 0, for a first prompt and for a step.
        r"between 4 and .* = 4, got -1: does attention_mask begin with 0\? Pad prompts on the right": lambda: (
            session.run(hidden, 4, past, length=-1)
        ),
        r"between 1 and .* = 5, got -1: does attention_mask begin with 0\? Pad prompts on the right": lambda: (
            session.run(hidden[:1], 5, past, length=-1)
        ),
        r"a past of shape \[1,2,\?,32\] for layer 0, got \[1,2,512,16\]": lambda: session.run(
            hidden, 4, [tensor[..., ::2].copy() for tensor in past]
        ),
        "window-sized KV cache of at least 8 positions for layer 0, got 5": lambda: session.run(
            hidden, 4, [tensor[:, :, :5].copy() for tensor in past]
        ),
    }.items():
        with pytest.raises(RuntimeError, match=message):
            run()


def test_compatibility_names_device_layout_and_artifacts(session_of, models):
    device = session_of("llama").device
    lowered = session_of("llama").lowered
    assert lowered.summary == "3 layers and the LM head in 1 dispatch a token, prompts in chunks of " + CHUNKS
    again = device.lower_again(lowered)
    assert [node.op_type for node in again.nodes] == [node.op_type for node in lowered.nodes]
    assert again.summary == lowered.summary
    assert device.description.startswith("emulate (npu2, emulated; host: cpu (")
    assert device.unsupported(session_of("llama").node) == ""
    # Multiply-adds of a token, by hand: QKV, output, gate, up and down of each layer, and the LM head.
    assert session_of("llama").step.multiply_adds() == 288 * (3 * (256 + 128 + 3 * 608) + 320)
    identity = npu.Artifacts(str(models.artifacts("llama", CONTEXT))).identity
    layout = "decoder layers 5, encoder layers 1, operators 1"
    assert device.compatibility("") == f"emulate, {layout}, artifacts {identity}"


# --- Failures ---------------------------------------------------------------------------------------------------------


def with_a_fault(artifacts, folder):
    """Artifacts whose decode call moves keys past the end of the cache, except at the first position."""
    shutil.copytree(artifacts, folder)
    (file,) = folder.glob("calls/decode_layer*/*.words")
    before = zlib.crc32(file.read_bytes())
    name, identity, family = read_family(words_of(file))
    classes = [
        dataclasses.replace(
            each,
            patches=tuple(p._replace(coefficient=p.coefficient * 10**6) if p.feature == 0 else p for p in each.patches),
        )
        for each in family.classes
    ]
    dataclasses.replace(family, classes=tuple(classes)).flatten(name, identity).tofile(file)
    index = words_of(folder / "index.words").copy()
    index[index == before] = zlib.crc32(file.read_bytes())
    index[3] = zlib.crc32(index[4:].tobytes())
    index.tofile(folder / "index.words")
    return folder


def test_failed_dispatch_names_layers_and_position(rng, models, embed, tmp_path):
    """The error names operator, layers and position; later runs fail at once with it; the past can be restored."""
    folder = with_a_fault(models.artifacts("llama", CONTEXT), tmp_path / "artifacts")
    device = npu.NpuDevice(str(folder))
    nodes = read_nodes(models.converted("llama"))
    session, neighbour = Session(device, *nodes), Session(npu.NpuDevice(str(folder)), *nodes)
    hidden, past = embed("llama", rng.integers(3, 300, 3)), session.past(CONTEXT)
    session.run(hidden[:1], 1, past)
    failed = r"\[FlowNPU\] decode_layer, layers 0-2, position 1: "
    with pytest.raises(npu.DeviceFailed, match=failed):
        session.run(hidden[1:2], 2, past)
    dispatches = device.counts()["dispatches"]
    for other, tensors in ((session, past), (neighbour, neighbour.past(CONTEXT))):
        with pytest.raises(npu.DeviceFailed, match=failed):
            other.run(hidden[:1], 1, tensors)
    assert device.counts()["dispatches"] == dispatches
    device.restore([_argument(tensor) for tensor in past])
    assert all(np.abs(tensor[:, :, 0].astype(np.float32)).max(-1).min() > 0 for tensor in past)
    assert not any(tensor[:, :, 1:].any() for tensor in past)
    # A new session opens the device anew.
    Session(npu.NpuDevice(str(folder)), *nodes).run(hidden[:1], 1, session.past(CONTEXT))
