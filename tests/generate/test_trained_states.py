# SPDX-License-Identifier: Apache-2.0
"""The small trained models whose layers have states, in GenAI's loop, through turns and rewinds, on held-out text."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flownpu.generate.cached_sequence import CachedSequence
from flownpu.generate.language_model import LanguageModel, Sampling
from flownpu.generate.speculative.model import Speculation
from tests.convert.running import RoundedProducts
from tests.decoding import DecoderSession
from tests.end_to_end.test_numbers import log_softmax, perplexity
from tests.fixtures.training import q4nx_model
from tests.generate.conftest import steady

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES = ("qwen3.5-topics", "lfm2-topics")
GREEDY = Sampling(temperature=0)


@functools.cache
def reference(name: str) -> Any:
    """transformers' model with the weights that Q4NX makes of the fixture's, in float32."""
    model = AutoModelForCausalLM.from_pretrained(FIXTURES / name, dtype=torch.float32, attn_implementation="eager")
    return q4nx_model(model)


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(tokens[None].astype(np.int64))).logits[0].double().numpy()  # type: ignore[no-any-return]


@functools.cache
def held_out(name: str) -> np.ndarray:
    tokens = AutoTokenizer.from_pretrained(FIXTURES / name).encode((FIXTURES / name / "held_out.txt").read_text())
    return np.array(tokens[:1024], np.int32)


@pytest.mark.parametrize("name", NAMES)
def test_turns_and_rewinds_continue_as_transformers(name: str, converted: Callable[..., Path]) -> None:
    check_turns_and_rewinds(name, converted(name, kv_dtype="fp32"), 200, 40, activations="bf16")


def check_turns_and_rewinds(name: str, folder: Path, length: int, count: int, **options: str) -> None:
    """A first turn, a second behind its reply, and one that goes back into the second prompt; `count` tokens in each.

    The first prompt has `length` tokens, the second half as many.

    The chosen token is the reference's likeliest, or their logits are as close as rounding makes it likely: the gap of
    two logits has sqrt(2) times the error of one, and of some hundred gaps the largest is within 4 sigma.
    """
    model = LanguageModel(folder, options=options)
    cached = CachedSequence(model, 1024, GREEDY)
    text = held_out(name)

    def answer(prompt: np.ndarray) -> np.ndarray:
        generator, new, _ = cached.resume(prompt, ())
        model.append(generator, new)
        for _ in range(count):
            generator.generate_next_token()
        sequence = np.array(generator.get_sequence(0))
        expected = logits_of(reference(name), sequence)[len(prompt) - 1 : -1]
        with RoundedProducts("bf16"):
            rounded = logits_of(reference(name), sequence)[len(prompt) - 1 : -1]
        gaps = expected.max(-1) - np.take_along_axis(expected, sequence[len(prompt) :, None], -1)[:, 0]
        sigma = np.sqrt(np.square(rounded - expected).mean())
        assert gaps.max() <= 4 * np.sqrt(2) * sigma
        return sequence

    both = length * 3 // 2
    first = answer(text[:length])
    second = answer(np.concatenate([first, text[length:both]]))
    answer(np.concatenate([second[:both], text[400:420]]))


@pytest.mark.parametrize("name", NAMES)
def test_distributions_on_held_out_text_are_within_bound(
    name: str, converted: Callable[..., Path], ep_devices: list[onnxruntime.OrtEpDevice]
) -> None:
    """int8, the default, is held to a bound, too: these families need no other default."""
    folder = converted(name, kv_dtype="fp32", logits="all")
    text = held_out(name)
    exact = logits_of(reference(name), text)
    p = log_softmax(exact)
    for activations in ("bf16", "int8"):
        decoder = DecoderSession(folder, ep_devices[:1], {"activations": activations})
        ours = decoder(text[None].astype(np.int64))[0].astype(np.float64)
        divergence = float((np.exp(p) * (p - log_softmax(ours))).sum(-1).mean())
        print(f"{activations}: KL {divergence:.2e}, perplexity {perplexity(ours, text):.2f}")
        assert divergence <= 1e-3


def test_trained_head_makes_more_than_a_token_a_step_of_the_same_text(converted: Callable[..., Path]) -> None:
    """With the head's candidates a step makes 1.3 tokens or more: 1 for the step, and those that are kept."""
    folder = converted("qwen3.5-topics", kv_dtype="fp32")
    text, found = held_out("qwen3.5-topics"), []
    for speculation in (None, Speculation(lookup=False, head=True)):
        model = LanguageModel(folder, options={"activations": "bf16"}, speculation=speculation)
        if speculation is not None:
            steady(model)
        generator = model.generator(512, GREEDY)
        model.append(generator, text[:200])
        for _ in range(120):
            generator.generate_next_token()
        found.append(list(generator.get_sequence(0)))
    assert found[0] == found[1]
    made = 1 + generator.tally.kept / generator.tally.steps
    print(f"{generator.tally}: {made:.2f} tokens a step")
    assert made > 1.3
