# SPDX-License-Identifier: Apache-2.0
"""Conversations in GenAI, and the rule by which two replies count as the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime_genai as og

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.end_to_end.conftest import Tokens  # it imports torch and transformers


@dataclass
class Reply:
    """The tokens of a reply, and the logits that each was chosen from."""

    tokens: Tokens
    logits: list[np.ndarray]


def generator_of(model: Any, capacity: int, **options: Any) -> Any:
    """A greedy generator that continues up to `capacity` tokens."""
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(do_sample=False, max_length=capacity, min_length=capacity, **options)
    return og.Generator(model, parameters)


def reply(generator: Any, prompt: Tokens, count: int) -> Reply:
    """Appends a prompt and takes `count` tokens."""
    generator.append_tokens(np.array([prompt], np.int32))
    result = Reply([], [])
    for _ in range(count):
        result.logits.append(generator.get_logits()[0, -1].copy())
        generator.generate_next_token()
        result.tokens.append(int(generator.get_next_tokens()[0]))
    if not generator.is_done():
        # Runs the last token: GenAI 0.18 would leave its place in the cache unwritten when the next turn is appended.
        generator.get_logits()
    return result


def turns_of(model: Any, *prompts: Tokens, capacity: int, count: int, **options: Any) -> list[Reply]:
    """The replies, of `count` tokens each, of one conversation."""
    generator = generator_of(model, capacity, **options)
    return [reply(generator, prompt, count) for prompt in prompts]


def rewound_and_fresh(model: Any, before: Tokens, kept: int, prompt: Tokens, capacity: int) -> tuple[Reply, Reply]:
    """A reply after a rewind to the first `kept` tokens of `before`, and one of a generator that only had these."""
    generator = generator_of(model, capacity)
    reply(generator, before, 4)
    generator.rewind_to(kept)
    again = reply(generator, prompt, 8)
    generator = generator_of(model, capacity)
    generator.append_tokens(np.array([before[:kept]], np.int32))
    generator.get_logits()
    return again, reply(generator, prompt, 8)


def batch(model: Any, sequences: list[Tokens], count: int, **options: Any) -> list[Tokens]:
    """The `count` next tokens of each of some sequences, in one batch, padded on the right."""
    longest = max(map(len, sequences))
    generator = generator_of(model, longest + count, batch_size=len(sequences), **options)
    generator.append_tokens(np.array([s + [0] * (longest - len(s)) for s in sequences], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [generator.get_sequence(i).tolist()[longest:] for i in range(len(sequences))]


def assert_same(ours: Reply, theirs: Reply, bound: Callable[[int], float]) -> bool:
    """Whether all tokens are the same; asserts that the first that differs was chosen between close logits.

    `bound` says of a token's number how far apart these logits may be. Tokens after a difference continue another text
    and are not compared.
    """
    for i, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)):
        if a != b:
            gap = theirs.logits[i][b] - theirs.logits[i][a]
            assert gap <= bound(i), f"token {i}: {a} for {b}"
            return False
    return True
