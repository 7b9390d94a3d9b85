# SPDX-License-Identifier: Apache-2.0
"""An int8 KV cache in ORT GenAI: whatever that does to it, the tokens are those of ONNX Runtime's CPU provider, which
computes the definition of the same file; and what the rounding costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime_genai as og
import pytest

from tests.end_to_end.conftest import Tokens, logits_of
from tests.end_to_end.test_numbers import log_softmax
from tests.end_to_end.test_same_tokens import assert_same, batch, generate, generator_of, reply

if TYPE_CHECKING:
    from collections.abc import Callable

INT8 = {"kv_dtype": "int8"}


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("isa", ["auto", "avx2", "generic"])
def test_beyond_the_window(share: bool, isa: str, open_model: Callable[..., Any], held_out: Tokens) -> None:
    prompt = held_out[:230]
    ours = generate(open_model(provider_options={"cpu_isa": isa}, **INT8), prompt, past_present_share_buffer=share)
    assert_same(ours, generate(open_model("cpu", **INT8), prompt))


def test_a_window_sized_cache(open_model: Callable[..., Any], held_out: Tokens) -> None:
    prompt = held_out[:230]
    ours = generate(open_model(sliding_window_cache=True, **INT8), prompt, chunk_size=50)
    assert_same(ours, generate(open_model("cpu", **INT8), prompt))


@pytest.mark.parametrize("share", [True, False])
def test_a_second_turn_after_a_rewind(
    share: bool, open_model: Callable[..., Any], held_out: Tokens, prompts: list[Tokens]
) -> None:
    replies = []
    for model in (open_model(**INT8), open_model("cpu", **INT8)):
        generator = generator_of(model, 400, past_present_share_buffer=share)
        reply(generator, held_out[:150], 20)
        generator.rewind_to(100)
        replies.append(reply(generator, prompts[0], 20))
    assert_same(*replies)


def test_a_ragged_batch(open_model: Callable[..., Any], held_out: Tokens) -> None:
    """Each row has the tokens that it has alone, in the same arithmetic."""
    model = open_model(provider_options={"activations": "bf16"}, **INT8)
    sequences = [held_out[:150], held_out[300:340], held_out[500:507]]
    for sequence, tokens in zip(sequences, batch(model, sequences), strict=True):
        alone = generate(model, sequence)
        ours = type(alone)(tokens, alone.logits)
        assert_same(ours, alone)


def test_beams(open_model: Callable[..., Any], prompts: list[Tokens]) -> None:
    """Beams reorder the cache's rows between steps."""
    found = []
    for model in (open_model(**INT8), open_model("cpu", **INT8)):
        parameters = og.GeneratorParams(model)
        parameters.set_search_options(do_sample=False, num_beams=3, max_length=len(prompts[2]) + 24)
        generator = og.Generator(model, parameters)
        generator.append_tokens(np.array([prompts[2]], np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        found.append(generator.get_sequence(0).tolist())
    assert found[0] == found[1]


def test_distributions(open_model: Callable[..., Any], held_out: Tokens, reference: Any) -> None:
    """KL divergence of next-token distributions from float32 arithmetic with the same weights, in decode steps' cache.

    benchmarks/accuracy.py measures it on more tokens; what is allowed is a tenth of what tests/end_to_end/test_numbers.py
    allows for all roundings.
    """
    tokens = held_out[:512]
    model = open_model(provider_options={"activations": "bf16"}, logits="all", **INT8)
    generator = og.Generator(model, og.GeneratorParams(model))
    generator.append_tokens(np.array([tokens], np.int32))
    ours = log_softmax(generator.get_output("logits")[0].astype(np.float64))
    theirs = log_softmax(logits_of(reference, tokens))
    divergence = float((np.exp(theirs) * (theirs - ours)).sum(-1).mean())
    print(f"KL {divergence:.1e}")
    assert divergence <= 1e-4
