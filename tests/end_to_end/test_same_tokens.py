# SPDX-License-Identifier: Apache-2.0
"""Under every operation of GenAI on a conversation and its cache, the tokens are those of ORT's CPU provider."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import onnxruntime_genai as og
import pytest

from tests.end_to_end import replies
from tests.end_to_end.conftest import Tokens
from tests.end_to_end.replies import Reply, batch, generator_of, reply, turns_of
from tests.end_to_end.test_numbers import logit_error

NEW_TOKENS = 48


def generate(model: Any, prompt: Tokens, **options: Any) -> Reply:
    return reply(generator_of(model, len(prompt) + NEW_TOKENS, **options), prompt, NEW_TOKENS)


def assert_same(ours: Reply, theirs: Reply) -> bool:
    """As replies.assert_same. Theirs computes with float32 activations and ours rounds them to int8 (the default), so
    the bound is that of the gap of two logits (4 sigma, see test_numbers)."""
    return replies.assert_same(
        ours, theirs, lambda i: 4 * math.sqrt(2) * logit_error("int8", 6, theirs.logits[i][None])
    )


@pytest.fixture(scope="module")
def long_prompt(held_out: Tokens) -> Tokens:
    """A prompt more than three times as long as the window of 64."""
    return held_out[:230]


@pytest.fixture(scope="module")
def expected(open_model: Callable[..., Any], long_prompt: Tokens) -> Reply:
    return generate(open_model("cpu"), long_prompt)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("chunk_size", [0, 1, 50, 100])
def test_prompt_beyond_window_in_chunks_equals_reference(
    share: bool, chunk_size: int, open_model: Callable[..., Any], long_prompt: Tokens, expected: Reply
) -> None:
    ours = generate(open_model(), long_prompt, past_present_share_buffer=share, chunk_size=chunk_size)
    assert_same(ours, expected)


@pytest.mark.parametrize("chunk_size", [0, 50])
def test_window_sized_cache_equals_reference(
    chunk_size: int, open_model: Callable[..., Any], long_prompt: Tokens, expected: Reply
) -> None:
    ours = generate(open_model(sliding_window_cache=True), long_prompt, chunk_size=chunk_size)
    assert_same(ours, expected)


@pytest.mark.parametrize("kv_dtype", ["fp16", "fp32"])
def test_kv_cache_types_equal_reference(
    kv_dtype: str, open_model: Callable[..., Any], long_prompt: Tokens, expected: Reply
) -> None:
    assert_same(generate(open_model(kv_dtype=kv_dtype), long_prompt), expected)


@pytest.fixture(scope="module")
def expected_int8(open_model: Callable[..., Any], long_prompt: Tokens) -> Reply:
    return generate(open_model("cpu", kv_dtype="int8"), long_prompt)


WINDOW_SIZED = {"sliding_window_cache": True}


@pytest.mark.parametrize(("isa", "options"), [("auto", {}), ("auto", WINDOW_SIZED), ("avx2", {}), ("generic", {})])
def test_int8_cache_equals_reference(
    isa: str, options: dict[str, bool], open_model: Callable[..., Any], long_prompt: Tokens, expected_int8: Reply
) -> None:
    ours = generate(open_model(provider_options={"cpu_isa": isa}, kv_dtype="int8", **options), long_prompt)
    assert_same(ours, expected_int8)


@pytest.mark.parametrize("isa", ["avx2", "generic"])
def test_instruction_sets_equal_reference(
    isa: str, open_model: Callable[..., Any], long_prompt: Tokens, expected: Reply
) -> None:
    assert_same(generate(open_model(provider_options={"cpu_isa": isa}), long_prompt), expected)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_second_turn_equals_reference(kv_dtype: str, open_model: Callable[..., Any], prompts: list[Tokens]) -> None:
    turns = partial(turns_of, capacity=400, count=20)
    theirs = turns(open_model("cpu", kv_dtype=kv_dtype), *prompts[:2])
    for share in (True, False):
        ours = turns(open_model(kv_dtype=kv_dtype), *prompts[:2], past_present_share_buffer=share)
        for our, their in zip(ours, theirs, strict=True):
            if not assert_same(our, their):
                break


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_rewound_sequence_equals_reference(
    kv_dtype: str, open_model: Callable[..., Any], long_prompt: Tokens, prompts: list[Tokens]
) -> None:
    def rewound(model: Any, **options: bool) -> Reply:
        generator = generator_of(model, 400, **options)
        reply(generator, long_prompt, 20)
        generator.rewind_to(100)
        return reply(generator, prompts[0], 20)

    theirs = rewound(open_model("cpu", kv_dtype=kv_dtype))
    for share in (True, False):
        assert_same(rewound(open_model(kv_dtype=kv_dtype), past_present_share_buffer=share), theirs)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_batch_of_different_lengths_equals_reference(
    kv_dtype: str, open_model: Callable[..., Any], held_out: Tokens
) -> None:
    """Each row of a batch continues as ONNX Runtime's CPU provider continues it alone."""
    sequences = [held_out[:150], held_out[300:340], held_out[500:507]]
    theirs = [generate(open_model("cpu", kv_dtype=kv_dtype), sequence) for sequence in sequences]
    for share in (True, False):
        ours = batch(open_model(kv_dtype=kv_dtype), sequences, NEW_TOKENS, past_present_share_buffer=share)
        for tokens, their in zip(ours, theirs, strict=True):
            assert_same(Reply(tokens, []), their)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_beams_equal_reference(kv_dtype: str, open_model: Callable[..., Any], prompts: list[Tokens]) -> None:
    """Beams reorder the cache's rows between steps."""
    found = []
    for model in (open_model(kv_dtype=kv_dtype), open_model("cpu", kv_dtype=kv_dtype)):
        parameters = og.GeneratorParams(model)
        parameters.set_search_options(do_sample=False, num_beams=3, max_length=len(prompts[2]) + 24)
        generator = og.Generator(model, parameters)
        generator.append_tokens(np.array([prompts[2]], np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        found.append(generator.get_sequence(0).tolist())
    assert found[0] == found[1]


def test_concurrent_runs_equal_sequential_ones(open_model: Callable[..., Any], prompts: list[Tokens]) -> None:
    """The same bits as in sequential runs: runs share nothing but weights."""
    model = open_model()
    alone = [generate(model, prompt).tokens for prompt in prompts[:4]]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda prompt: generate(model, prompt).tokens, prompts[:4]))
    assert together == alone
