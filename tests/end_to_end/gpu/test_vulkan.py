# SPDX-License-Identifier: Apache-2.0
"""The trained small model in GenAI on Vulkan, by lavapipe, writes the cpu device's tokens."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.end_to_end.conftest import Tokens
from tests.end_to_end.gpu.test_genai import CAPACITY, CPU, GPU, assert_same, turns_of
from tests.end_to_end.replies import rewound_and_fresh

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("lavapipe")]

VULKAN = GPU | {"gpu_api": "vulkan"}


def test_conversation_equals_cpu(open_model: Callable[..., Any], held_out: Tokens, prompts: list[Tokens]) -> None:
    """A prompt longer than the window, whose caches are no longer, and than a chunk of 256; then a second turn."""
    texts = held_out[:270], prompts[0]
    ours, theirs = (
        turns_of(
            open_model(provider_options=options, sliding_window_cache=True), *texts, past_present_share_buffer=True
        )
        for options in (VULKAN, CPU)
    )
    for mine, its in zip(ours, theirs, strict=True):
        if not assert_same(mine, its):
            break


def test_rewound_sequence_equals_fresh(open_model: Callable[..., Any], held_out: Tokens, prompts: list[Tokens]) -> None:
    again, fresh = rewound_and_fresh(open_model(provider_options=VULKAN), held_out[:270], 100, prompts[1], CAPACITY)
    assert again.tokens == fresh.tokens
