# SPDX-License-Identifier: Apache-2.0
"""The trained small model in GenAI on device=gpu, on an OpenCL device that is a CPU, writes the cpu device's tokens."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.end_to_end import replies
from tests.end_to_end.conftest import Tokens
from tests.end_to_end.replies import Reply, batch, generator_of, rewound_and_fresh
from tests.end_to_end.test_numbers import logit_error

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("pocl")]

CAPACITY = 400
NEW_TOKENS = 8
GPU = {"device": "gpu"}
CPU = {"device": "cpu"}


def assert_same(ours: Reply, theirs: Reply, factor: float = 1.0) -> bool:
    """As replies.assert_same. Both devices round a prompt's activations to int8, independently of each other: a logit
    of each has the error of int8, their difference sqrt(2) times that, the gap of two logits twice that. The largest of
    all gaps is within 4 sigma. `factor`: by how much other roundings make the error larger."""
    return replies.assert_same(ours, theirs, lambda i: 4 * 2 * factor * logit_error("int8", 6, theirs.logits[i][None]))


def turns_of(model: Any, *prompts: Tokens, **options: Any) -> list[Reply]:
    return replies.turns_of(model, *prompts, capacity=CAPACITY, count=NEW_TOKENS, **options)


@pytest.fixture(scope="module")
def long_prompt(held_out: Tokens) -> Tokens:
    """A prompt longer than the window of 64; test_vulkan.py has some that are longer than a chunk of 256."""
    return held_out[:80]


# GenAI has window-sized caches in shared buffers only; test_rewound_sequence_equals_fresh shares plain ones.
@pytest.mark.parametrize(("share", "window_sized"), [(True, True), (False, False)])
def test_conversation_equals_cpu(
    share: bool, window_sized: bool, open_model: Callable[..., Any], long_prompt: Tokens, prompts: list[Tokens]
) -> None:
    texts = long_prompt, prompts[0]
    ours, theirs = (
        turns_of(
            open_model(provider_options=options, sliding_window_cache=window_sized),
            *texts,
            past_present_share_buffer=share,
        )
        for options in (GPU, CPU)
    )
    for mine, its in zip(ours, theirs, strict=True):
        if not assert_same(mine, its):
            break


def test_int8_cache_equals_cpu(open_model: Callable[..., Any], long_prompt: Tokens, prompts: list[Tokens]) -> None:
    """Tokens are the CPU's. Keys and values are rounded to int8 as products' activations are, by the largest of a row
    or group: there are less than twice as many roundings, and so sqrt(2) times the error."""
    ours, theirs = (
        turns_of(open_model(provider_options=options, kv_dtype="int8"), long_prompt, prompts[0])
        for options in (GPU, CPU)
    )
    for mine, its in zip(ours, theirs, strict=True):
        if not assert_same(mine, its, math.sqrt(2)):
            break


def test_attention_of_8_bits_equals_cpu(
    open_model: Callable[..., Any], long_prompt: Tokens, prompts: list[Tokens]
) -> None:
    ours, theirs = (
        turns_of(open_model(provider_options=options, weights="8/4/4"), long_prompt, prompts[0])
        for options in (GPU, CPU)
    )
    for mine, its in zip(ours, theirs, strict=True):
        if not assert_same(mine, its):
            break


def test_rewound_sequence_equals_fresh(
    open_model: Callable[..., Any], long_prompt: Tokens, prompts: list[Tokens]
) -> None:
    """Withdrawn tokens change nothing."""
    again, fresh = rewound_and_fresh(open_model(provider_options=GPU), long_prompt, 30, prompts[1], CAPACITY)
    # Only the cut of the prompt into chunks differs, which does not change rows.
    assert again.tokens == fresh.tokens
    np.testing.assert_array_equal(again.logits, fresh.logits)


def test_batch_equals_single_sequences(open_model: Callable[..., Any], long_prompt: Tokens) -> None:
    """Each of three texts gets the tokens that it gets alone; products round several rows, and do not round one row."""
    model = open_model(provider_options=GPU | {"activations": "bf16"})
    sequences = [long_prompt[start : start + 12] for start in (0, 20, 50)]
    together = batch(model, sequences, 4)
    assert together == [batch(model, [sequence], 4)[0] for sequence in sequences]


def test_beams_equal_cpu(open_model: Callable[..., Any], prompts: list[Tokens]) -> None:
    """Beams exchange rows of the cache from token to token, with their tickets."""
    found = []
    for options in (GPU, CPU):
        model = open_model(provider_options=options | {"activations": "bf16"}, kv_dtype="fp32")
        generator = generator_of(model, len(prompts[0]) + 8, num_beams=3, past_present_share_buffer=False)
        generator.append_tokens(np.array([prompts[0]], np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        found.append(generator.get_sequence(0).tolist())
    assert found[0] == found[1]


def test_placement_names_gpu(open_model: Callable[..., Any], tmp_path: Path) -> None:
    report = tmp_path / "placement.json"
    open_model(provider_options=GPU | {"placement": str(report)})
    placement = json.loads(report.read_text())
    assert placement["why"] == "device=gpu"
    assert "Portable Computing Language" in placement["device"]
    assert any("6 layers and the LM head in 32 kernels a token" in line for line in placement["lowered"]), placement


def test_logits_of_all_tokens_equal_cpu(open_model: Callable[..., Any], prompts: list[Tokens]) -> None:
    gpu, cpu = (
        turns_of(open_model(provider_options=options, logits="all", kv_dtype="fp32"), prompts[0])[0]
        for options in (GPU, CPU)
    )
    assert_same(gpu, cpu)
    assert math.isfinite(gpu.logits[0].max())
