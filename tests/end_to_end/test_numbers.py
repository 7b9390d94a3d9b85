# SPDX-License-Identifier: Apache-2.0
"""The trained small model on our provider gives transformers' results with the same weights."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import onnxruntime_genai as og
import pytest

from tests.end_to_end.conftest import Tokens, logits_of

ACTIVATIONS = ("bf16", "int8")
# The rms error of rounding what a product multiplies, relative to its rms, if values are normal; the error is uniform
# over a step. bf16: a step is 2^-7 of the value's power of two, whose rms is 0.74 of the values'. int8: a
# step is 1/127 of the largest of 32 activations (in rms 2.39), and where weights have 8 bits, of the largest of 256
# (3.07), and of weights 1/255 of the range of 256 (5.68). Measured on products: 1.7e-3, and 5.4e-3 and 9.4e-3 with
# 4-bit and with 8-bit codes.
ROUNDING = {"bf16": 0.74 * 2.0**-7 / math.sqrt(12), "int8": math.hypot(3.07 / 127, 5.68 / 255) / math.sqrt(12)}


def logit_error(activations: str, layers: int, logits: np.ndarray) -> float:
    """The rms error of a logit that rounding causes.

    Attention and feed-forward round the inputs of two products each, and attention rounds queries, keys, its weights
    and values to bf16. Each rounding is an independent relative error of what is added to the residual stream. If all
    that is added, and the embedding, are equally large, each is 1 / (2 layers + 1) of the stream's variance. The LM
    head rounds once more, and turns a relative error of the hidden state into the same of the logits' spread.
    """
    share = 4 * layers / (2 * layers + 1)
    variance = (share + 1) * ROUNDING[activations] ** 2 + share * ROUNDING["bf16"] ** 2
    return math.sqrt(variance) * float(logits.std(-1).mean())


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_greedy_tokens_differ_within_expectation(
    activations: str, open_model: Callable[..., Any], prompts: list[Tokens], reference: Any
) -> None:
    """256 tokens after each of 5 prompts are the reference's likeliest, unless its two likeliest are too close.

    The gap of two logits has sqrt(2) times the error of one; of 1280 gaps the largest error is within 4 sigma.
    """
    model = open_model(provider_options={"activations": activations})
    differing, expected = 0, 0.0
    for prompt in prompts:
        parameters = og.GeneratorParams(model)
        parameters.set_search_options(do_sample=False, max_length=len(prompt) + 256, min_length=len(prompt) + 256)
        generator = og.Generator(model, parameters)
        generator.append_tokens(np.array([prompt], np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        sequence = generator.get_sequence(0).tolist()
        logits = logits_of(reference, sequence)[len(prompt) - 1 : -1]
        # min_length keeps the end-of-sequence tokens away.
        logits[:, list(reference.generation_config.eos_token_id)] = -np.inf
        chosen = np.take_along_axis(logits, np.array(sequence[len(prompt) :])[:, None], axis=-1)[:, 0]
        gaps = logits.max(-1) - chosen
        finite = np.where(np.isfinite(logits), logits, 0)
        sigma = math.sqrt(2) * logit_error(activations, reference.config.num_hidden_layers, finite)
        assert gaps.max() <= 4 * sigma
        differing += int((gaps > 0).sum())
        second, first = np.sort(logits, axis=-1)[:, -2:].T
        expected += sum(0.5 * math.erfc(gap / sigma / math.sqrt(2)) for gap in first - second)
    # A normal error of that sigma swaps the two likeliest tokens with the probability above. The number of swaps is
    # within 4 standard deviations of the sum (each at most its root), and within 1 for a sum near 0.
    print(f"{activations}: {differing} of {256 * len(prompts)} tokens differ, {expected:.1f} expected")
    assert differing <= expected + 4 * math.sqrt(expected) + 1


def our_logits(folder: Path, tokens: Tokens, activations: str, devices: list[Any]) -> np.ndarray:
    """Logits [tokens, vocabulary] of one prefill in a plain InferenceSession, every node ours."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.add_provider_for_devices(devices[:1], {"activations": activations})
    session = onnxruntime.InferenceSession(folder / "model.onnx", options)
    feeds = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, len(tokens)), np.int64)}
    for value in session.get_inputs():
        if value.name.startswith("past_key_values."):
            feeds[value.name] = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
    return session.run(["logits"], feeds)[0][0].astype(np.float64)  # type: ignore[no-any-return]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))  # type: ignore[no-any-return]


def perplexity(logits: np.ndarray, tokens: Tokens) -> float:
    return float(np.exp(-np.take_along_axis(log_softmax(logits[:-1]), np.array(tokens[1:])[:, None], -1).mean()))


def test_distributions_on_held_out_text_are_within_bound(
    converted: Callable[..., Path], held_out: Tokens, reference: Any, original: Any, ep_devices: list[Any]
) -> None:
    """KL divergence of next-token distributions, and the perplexity that 4-bit weights cost."""
    assert len(held_out) == 2048
    folder = converted(logits="all", kv_dtype="fp32")
    p, exact = log_softmax(logits_of(reference, held_out)), perplexity(logits_of(original, held_out), held_out)
    for activations in ACTIVATIONS:
        ours = our_logits(folder, held_out, activations, ep_devices)
        divergence = float((np.exp(p) * (p - log_softmax(ours))).sum(-1).mean())
        print(f"{activations}: KL {divergence:.2e}")
        assert divergence <= 1e-3
        quantised = perplexity(ours, held_out)
        print(f"perplexity {exact:.2f} with bf16 weights, {quantised:.2f} with Q4NX and {activations} activations")
        assert quantised <= 1.03 * exact


def test_int8_cache_distributions_are_within_bound(
    open_model: Callable[..., Any], held_out: Tokens, reference: Any
) -> None:
    """A tenth of what all roundings may cost is allowed."""
    tokens = held_out[:512]
    model = open_model(provider_options={"activations": "bf16"}, logits="all", kv_dtype="int8")
    generator = og.Generator(model, og.GeneratorParams(model))
    generator.append_tokens(np.array([tokens], np.int32))
    ours = log_softmax(generator.get_output("logits")[0].astype(np.float64))
    theirs = log_softmax(logits_of(reference, tokens))
    divergence = float((np.exp(theirs) * (theirs - ours)).sum(-1).mean())
    print(f"KL {divergence:.1e}")
    assert divergence <= 1e-4
