# SPDX-License-Identifier: Apache-2.0
"""The trained small model in GenAI on device=gpu, on an OpenCL device that is a CPU: the cpu device's tokens."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.end_to_end.test_numbers import logit_error
from tests.end_to_end.test_same_tokens import Reply, generator_of, reply

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.end_to_end.conftest import Tokens

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("pocl")]

CAPACITY = 400
NEW_TOKENS = 24
GPU = {"device": "gpu"}
CPU = {"device": "cpu"}


def assert_same(ours: Reply, theirs: Reply) -> bool:
    """Whether all tokens are the same. The first that differs was chosen between two logits too close to tell.

    Both devices round a prompt's activations to int8, independently of each other: a logit of each has the error of
    int8, their difference sqrt(2) times that, a gap of two logits twice. Of all gaps the largest is within 4 sigma.
    """
    for i, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)):
        if a != b:
            logits = theirs.logits[i]
            assert logits[b] - logits[a] <= 4 * 2 * logit_error("int8", 6, logits[None]), f"token {i}: {a} for {b}"
            return False
    return True


def turns_of(model: Any, *prompts: Tokens, **options: Any) -> list[Reply]:
    generator = generator_of(model, CAPACITY, **options)
    return [reply(generator, prompt, NEW_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def long_prompt(held_out: Tokens) -> Tokens:
    """Three times the window of 64, and more than a chunk of 256."""
    return held_out[:270]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("window_sized", [True, False])
def test_two_turns(
    share: bool, window_sized: bool, open_model: Callable[..., Any], long_prompt: Tokens, prompts: list[Tokens]
) -> None:
    if window_sized and not share:
        pytest.skip("GenAI has window-sized caches in shared buffers only")
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


def test_a_rewind(open_model: Callable[..., Any], long_prompt: Tokens, prompts: list[Tokens]) -> None:
    """What was said before and taken back changes nothing."""
    model = open_model(provider_options=GPU)
    generator = generator_of(model, CAPACITY)
    reply(generator, long_prompt, 4)
    generator.rewind_to(100)
    again = reply(generator, prompts[1], 8)
    generator = generator_of(model, CAPACITY)
    generator.append_tokens(np.array([long_prompt[:100]], np.int32))
    generator.get_logits()
    fresh = reply(generator, prompts[1], 8)
    # The same but for the prompt's cut into chunks, which a row does not depend on.
    assert again.tokens == fresh.tokens
    np.testing.assert_array_equal(again.logits, fresh.logits)


def batch(model: Any, sequences: list[Tokens], count: int, **options: Any) -> list[Tokens]:
    generator = generator_of(model, len(sequences[0]) + count, batch_size=len(sequences), **options)
    generator.append_tokens(np.array(sequences, np.int32))
    for _ in range(count):
        generator.generate_next_token()
    return [generator.get_sequence(i).tolist() for i in range(len(sequences))]


def test_a_batch_is_its_sequences(open_model: Callable[..., Any], long_prompt: Tokens) -> None:
    """Three texts at once, each as by itself: products of several rows round, those of one token do not."""
    model = open_model(provider_options=GPU | {"activations": "bf16"})
    sequences = [long_prompt[start : start + 70] for start in (0, 50, 150)]
    together = batch(model, sequences, 8)
    assert together == [batch(model, [sequence], 8)[0] for sequence in sequences]


def test_beams_branch(open_model: Callable[..., Any], prompts: list[Tokens]) -> None:
    """Beams exchange rows of the cache from token to token: tickets go with them."""
    found = []
    for options in (GPU, CPU):
        model = open_model(provider_options=options | {"activations": "bf16"}, kv_dtype="fp32")
        generator = generator_of(model, len(prompts[0]) + 12, num_beams=3, past_present_share_buffer=False)
        generator.append_tokens(np.array([prompts[0]], np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        found.append(generator.get_sequence(0).tolist())
    assert found[0] == found[1]


def test_what_runs_where(open_model: Callable[..., Any], tmp_path: Path) -> None:
    """One line of the session says it; what the device has no place for is an error, or the CPU's."""
    report = tmp_path / "placement.json"
    open_model(provider_options=GPU | {"placement": str(report)})
    placement = json.loads(report.read_text())
    assert placement["why"] == "device=gpu"
    assert "Portable Computing Language" in placement["device"]
    assert any("6 layers and the LM head in 50 kernels a token" in line for line in placement["lowered"]), placement
    with pytest.raises(RuntimeError, match=r"(?s)device gpu leaves .* to its host.* a KV cache in bf16, fp16 or fp32"):
        open_model(provider_options=GPU, kv_dtype="int8")


def test_what_the_gpu_does_not_take_the_cpu_computes(open_model: Callable[..., Any], prompts: list[Tokens]) -> None:
    gpu, cpu = (
        turns_of(open_model(provider_options=options, kv_dtype="int8"), prompts[0])[0]
        for options in (GPU | {"on_unsupported": "cpu"}, CPU)
    )
    assert gpu.tokens == cpu.tokens
    assert math.isfinite(gpu.logits[0].max())
