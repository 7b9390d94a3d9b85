# SPDX-License-Identifier: Apache-2.0
"""The trained small model in GenAI on the emulated NPU; layers in the full shape of a public model."""

import math
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flownpu.npu.artifacts import build_artifacts
from tests.decoding import DecoderSession, dispatches_of
from tests.end_to_end import replies
from tests.end_to_end.conftest import Tokens
from tests.end_to_end.emulated_operators import stems
from tests.end_to_end.replies import Reply, batch, generator_of, reply, rewound_and_fresh
from tests.npu.models import Models
from tests.npu.rounding import array_error

CONTEXT = 512
NEW_TOKENS = 32
CPU = {"device": "cpu", "activations": "bf16"}


@pytest.fixture(scope="module")
def emulated(
    converted: Callable[..., Path], open_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """The small model on device=emulate, by options of its conversion; artifacts for CONTEXT tokens."""
    folder = tmp_path_factory.mktemp("artifacts") / "emulate"
    build_artifacts(converted(), context=CONTEXT, output=folder)

    def model(provider_options: dict[str, str] | None = None, **options: Any) -> Any:
        given = {"device": "emulate", "artifacts": str(folder), **(provider_options or {})}
        return open_model(provider_options=given, **options)

    return model


@pytest.fixture(scope="module")
def long_prompt(held_out: Tokens) -> Tokens:
    """A prompt longer than the window of 64, which is read in a chunk of 256 tokens."""
    return held_out[:110]


def assert_same(ours: Reply, theirs: Reply, text: Tokens, reference: Any) -> bool:
    """As replies.assert_same. Both devices round, the array more; the gap of two logits has sqrt(2) times the error of
    one logit. Of NEW_TOKENS gaps the largest error is within 4 of these."""

    def bound(i: int) -> float:
        ids = np.array(text + theirs.tokens[:i])
        return 4 * math.sqrt(2) * array_error(reference, ids, [len(ids) - 1], prompt=True)

    return replies.assert_same(ours, theirs, bound)


def turns_of(model: Any, *prompts: Tokens, share: bool = True) -> list[Reply]:
    return replies.turns_of(model, *prompts, capacity=CONTEXT, count=NEW_TOKENS, past_present_share_buffer=share)


@pytest.mark.parametrize("share", [True, False])
def test_conversation_equals_cpu(
    share: bool, emulated: Callable[..., Any], open_model: Callable[..., Any], long_prompt: Tokens,
    prompts: list[Tokens], reference: Any,
) -> None:  # fmt: skip
    """A prompt beyond the window and 32 tokens, twice: the tokens of the CPU device with bf16 activations."""
    texts = long_prompt, prompts[0]
    ours, theirs = (turns_of(model, *texts, share=share) for model in (emulated(), open_model(provider_options=CPU)))
    before: Tokens = []
    for mine, its, prompt in zip(ours, theirs, texts, strict=True):
        if not assert_same(mine, its, before + prompt, reference):
            break
        before += prompt + its.tokens
    # The first turn's logits, as far as the texts are the same.
    same = next((i for i in range(NEW_TOKENS) if ours[0].tokens[i] != theirs[0].tokens[i]), NEW_TOKENS - 1) + 1
    found, expected = (np.array(replies[0].logits[:same]) for replies in (ours, theirs))
    ids = np.array(long_prompt + theirs[0].tokens[: same - 1])
    positions = range(len(long_prompt) - 1, len(ids))
    error = np.sqrt(np.square(found - expected).mean())
    assert error < 2 * array_error(reference, ids, positions, prompt=True) < expected.std() / 20


def test_window_sized_cache_gives_same_tokens(emulated: Callable[..., Any], long_prompt: Tokens) -> None:
    """The tokens equal those with a cache of all positions, because the array has the same caches."""
    (plain,), (windowed,) = (turns_of(emulated(sliding_window_cache=w), long_prompt) for w in (False, True))
    assert windowed.tokens == plain.tokens
    assert np.array(windowed.logits).tobytes() == np.array(plain.logits).tobytes()


def test_int8_cache_conversation_equals_cpu(
    emulated: Callable[..., Any], converted: Callable[..., Path], open_model: Callable[..., Any], long_prompt: Tokens,
    reference: Any, tmp_path: Path,
) -> None:  # fmt: skip
    """The CPU device with an int8 cache rounds the keys and values that a prompt sees, too."""
    with pytest.raises(RuntimeError, match=r"one for a model with attention\.int8_cache 0, where this model has 1"):
        emulated(kv_dtype="int8")
    build_artifacts(converted(kv_dtype="int8"), context=CONTEXT, output=tmp_path)
    (mine,) = turns_of(emulated({"artifacts": str(tmp_path)}, kv_dtype="int8"), long_prompt)
    (its,) = turns_of(open_model(provider_options=CPU, kv_dtype="int8"), long_prompt)
    assert_same(mine, its, long_prompt, reference)


def test_conversation_with_weights_of_eight_bits_and_four_equals_cpu(
    converted: Callable[..., Path], emulated: Callable[..., Any], open_model: Callable[..., Any], long_prompt: Tokens,
    reference: Any, tmp_path: Path,
) -> None:  # fmt: skip
    """8/8/4: attention and the LM head have 8 bits. The bound is that of rounding, which bits of weights do not change.

    Without artifacts for such weights, the model is refused.
    """
    with pytest.raises(RuntimeError, match=r"one for a model with .*eight_bits 0, where this model has"):
        emulated(weights="8/8/4")
    build_artifacts(converted(weights="8/8/4"), context=CONTEXT, output=tmp_path)
    (mine,) = turns_of(emulated({"artifacts": str(tmp_path)}, weights="8/8/4"), long_prompt)
    (its,) = turns_of(open_model(provider_options=CPU, weights="8/8/4"), long_prompt)
    assert_same(mine, its, long_prompt, reference)


def test_rewound_sequence_equals_fresh(
    emulated: Callable[..., Any], long_prompt: Tokens, prompts: list[Tokens]
) -> None:
    """Withdrawn tokens change nothing."""
    again, fresh = rewound_and_fresh(emulated(), long_prompt, 20, prompts[1], CONTEXT)
    # Only the cut of the prompt into chunks differs, which does not change rows.
    assert again.tokens == fresh.tokens


def test_batch_is_refused_or_runs_on_cpu(
    emulated: Callable[..., Any], open_model: Callable[..., Any], prompts: list[Tokens]
) -> None:
    sequences = [prompts[0][:6]] * 2
    with pytest.raises(RuntimeError, match=r"expected one sequence, got a batch of 2: .* on_unsupported to cpu"):
        batch(emulated(), sequences, 8)
    ours, theirs = emulated({"on_unsupported": "cpu", "activations": "bf16"}), open_model(provider_options=CPU)
    assert batch(ours, sequences, 8) == batch(theirs, sequences, 8)


def test_context_beyond_artifacts_is_refused_or_continues_on_cpu(
    emulated: Callable[..., Any], open_model: Callable[..., Any], held_out: Tokens, reference: Any
) -> None:
    """The CPU uses the array's keys and values."""
    prompt = held_out[: CONTEXT - 4]

    def run(model: Any) -> Reply:
        return reply(generator_of(model, CONTEXT + 8), prompt, 12)

    with pytest.raises(RuntimeError, match=f"expected at most {CONTEXT} tokens, .* got {CONTEXT + 1}: build them for"):
        generator_of(emulated(), CONTEXT + 8).append_tokens(np.array([held_out[: CONTEXT + 1]], np.int32))
    ours = run(emulated({"on_unsupported": "cpu", "activations": "bf16"}))
    assert_same(ours, run(open_model(provider_options=CPU)), prompt, reference)


# --- A full shape -----------------------------------------------------------------------------------------------------


# A prompt takes the weights of both layers at once; then QKV, attention, the output projection, and the feed-forward of
# the first layer, and QKV of the last. decode_layer computes its last token, and each of the two that follow.
DISPATCHES = {"dequant_engine": 1, "gemm": 4, "flow_qkv": 1, "decode_layer": 3}


def test_full_shape_layers_equal_reference(models: Models, ep_devices: list[Any], tmp_path: Path) -> None:
    """Two layers: a prompt beyond the window of 32 and two tokens, compared with transformers and the CPU device.

    Errors may be twice the expected rms, as in tests/npu/run/test_decoder_layers.py. The CPU device's error is taken to
    be that of a token on the array, though it rounds to bf16 less often; it is independent of the array's.
    """
    name = "gemma3-1b"
    shutil.copytree(models.converted(name), folder := tmp_path / "model")
    build_artifacts(folder, context=256)
    emulated = DecoderSession(folder, ep_devices[:1], {"device": "emulate"}, profile=tmp_path / "profile")
    on_cpu = DecoderSession(folder, ep_devices[:1], CPU)
    ids = np.random.default_rng(0).integers(3, 320, 52)
    steps = ((0, 50), (50, 51), (51, 52))
    found, beside = (
        np.array([decoder(ids[None, a:b], np.ones((1, b), np.int64))[0, 0] for a, b in steps])
        for decoder in (emulated, on_cpu)
    )
    assert Counter(stems(dispatches_of(emulated.session))) == DISPATCHES
    checkpoint, lasts = models.checkpoint(name), [stop - 1 for _, stop in steps]
    expected = checkpoint.logits(ids[None])[0, lasts]
    of_array, of_cpu = (array_error(checkpoint.reference, ids, lasts, prompt=prompt) for prompt in (True, False))
    for what, other, bound in (
        ("float32", expected, 2 * of_array),
        ("the CPU device", beside, 2 * math.hypot(of_array, of_cpu)),
    ):
        error = np.sqrt(np.square(found - other).mean())
        print(f"from {what}: {error / expected.std():.4f} of the logits' spread, at most {bound / expected.std():.4f}")
        assert error < bound < expected.std() / 5
