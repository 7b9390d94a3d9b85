# SPDX-License-Identifier: Apache-2.0
"""With sampling and candidates, a token's frequency equals its probability, whatever was proposed."""

import numpy as np
import pytest
from numpy.typing import NDArray

from flownpu.generate.language_model import LanguageModel, Sampling
from tests.generate.conftest import Scripted, scripted

TOP = 5
DRAWS = 1000
# Chi-square with 4 degrees of freedom exceeds this once in a million times: P(X > x) = e^(-x / 2) (1 + x / 2) = 1e-6 at
# x = 33.4.
MOST_CHI_SQUARE = 33.4


def probabilities(logits: NDArray[np.float32], temperature: float) -> dict[int, float]:
    """The probabilities of the TOP likeliest tokens, by softmax in float64."""
    top = np.argsort(-logits)[:TOP]
    weights = np.exp((logits[top].astype(np.float64) - logits.max()) / temperature)
    return dict(zip(top.tolist(), (weights / weights.sum()).tolist(), strict=True))


def chi_square(drawn: list[int], expected: dict[int, float]) -> float:
    assert set(drawn) <= set(expected)
    counts = {token: drawn.count(token) for token in expected}
    return sum((counts[token] - len(drawn) * p) ** 2 / (len(drawn) * p) for token, p in expected.items())


@pytest.mark.parametrize("rank", [0, 2, None])
def test_frequencies_are_probabilities(rank: int | None, plain: LanguageModel, looking: LanguageModel) -> None:
    """The candidate for a token is its likeliest value, the third likeliest, or one that never comes."""
    temperature = 1.5
    sampling = Sampling(temperature=temperature, top_k=TOP, seed=11)
    prompt = plain.tokens_of_text("The statement is used to")
    reference = plain.generator(64, Sampling(temperature=0))
    reference.append_tokens(prompt)
    first = probabilities(reference.get_logits().reshape(-1), temperature)
    anchor = max(first, key=lambda token: first[token])
    reference.append_tokens(np.array([anchor], np.int32))
    second = probabilities(reference.get_logits().reshape(-1), temperature)
    candidate = plain.vocabulary_size - 2 if rank is None else list(second)[rank]
    generator = scripted(looking, Scripted([*prompt.tolist(), anchor, candidate, 5, 5]), 64, sampling)
    generator.append_tokens(np.append(prompt, np.int32(anchor)))
    drawn = []
    for _ in range(DRAWS):
        generator.rewind_to(len(prompt) + 1)
        generator.generate_next_token()
        drawn.append(int(generator.get_next_tokens()[0]))
    assert chi_square(drawn, second) < MOST_CHI_SQUARE
    kept = generator.tally.kept / DRAWS
    # A candidate is kept with its probability: 5 standard deviations of the mean of so many draws.
    assert abs(kept - second.get(candidate, 0.0)) < 5 * 0.5 / DRAWS**0.5


def test_changed_distribution_is_noticed() -> None:
    """A tenth of the draws is moved from one of two equal tokens to the other."""
    expected = dict.fromkeys(range(TOP), 1 / TOP)
    moved = [0] * 300 + [1] * 100 + [2] * 200 + [3] * 200 + [4] * 200
    assert chi_square(moved, expected) > MOST_CHI_SQUARE
