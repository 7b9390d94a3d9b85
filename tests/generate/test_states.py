# SPDX-License-Identifier: Apache-2.0
"""Sequences of models whose layers have states: after a change they are what new ones are."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flownpu.convert import convert
from flownpu.errors import FlowNPUError
from flownpu.generate.cached_sequence import CachedSequence
from flownpu.generate.language_model import LanguageModel, Sampling
from flownpu.generate.speculative.model import Speculation
from flownpu.generate.state_generator import TAIL
from tests.convert.conftest import write_tiny
from tests.generate.conftest import Scripted, scripted, steady

IDS = np.random.default_rng(8).integers(4, 260, 400).astype(np.int32)
GREEDY = Sampling(temperature=0)
OPTIONS = {"activations": "bf16"}


@pytest.fixture(scope="module", params=["qwen3_5_text", "lfm2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp(request.param)
    tiny = write_tiny(request.param, folder / "checkpoint", max_position_embeddings=512)
    convert(tiny.folder, folder / "model", kv_dtype="fp32")
    return LanguageModel(folder / "model", options=OPTIONS)


def answered(model: LanguageModel, generator: Any, prompt: np.ndarray) -> np.ndarray:
    """The logits of five tokens behind a prompt's new tokens, which are generated."""
    model.append(generator, prompt)
    found = []
    for _ in range(5):
        found.append(generator.get_logits().reshape(-1).copy())
        generator.generate_next_token()
    return np.array(found)


def test_changed_sequence_equals_new_one(model: LanguageModel) -> None:
    """A prompt that goes on, then prompts that differ near the end of the last one, in its reply, and long before."""
    cached = CachedSequence(model, 512, GREEDY)
    rewinds = model.can_rewind
    assert rewinds == model.folder.parent.name.startswith("qwen")

    def answer(prompt: np.ndarray, kept: int) -> np.ndarray:
        generator, new, _ = cached.resume(prompt, ())
        assert len(prompt) - len(new) == kept
        # With bf16 activations a row's bits do not depend on the number of rows, and states change token by token.
        fresh = model.generator(512, GREEDY)
        np.testing.assert_array_equal(answered(model, generator, new), answered(model, fresh, prompt))
        np.testing.assert_array_equal(generator.get_sequence(0), fresh.get_sequence(0))
        return np.array(generator.get_sequence(0))

    first = answer(IDS[:150], 0)
    second = answer(np.concatenate([first, IDS[150:250]]), len(first))
    kept = len(first) + 100 - TAIL if rewinds else 0
    answer(np.concatenate([second[:-8], IDS[300:320]]), kept)
    kept = len(second) + 12 - TAIL if rewinds else 0
    # New tokens are fewer than TAIL, so that the states are kept before them, where they were.
    for common in (kept + 7, kept):
        answer(np.concatenate([second[:common], IDS[320:330]]), kept)
    answer(np.concatenate([second[: max(kept, 2) - 1], IDS[330:340]]), 0)


@pytest.mark.parametrize("wrong", [0, 1, 2, 5])
def test_right_and_wrong_candidates_keep_text_of_states(
    wrong: int, model: LanguageModel, generate: Callable[..., list[int]]
) -> None:
    """Tokens, then a prompt that goes on, and a sequence that goes back to where its states were kept."""
    if not model.can_rewind:
        with pytest.raises(FlowNPUError, match="convolutions with states, which GenAI does not copy"):
            LanguageModel(model.folder, speculation=Speculation(lookup=True))
        return
    looking = steady(LanguageModel(model.folder, options=OPTIONS, speculation=Speculation(lookup=True)))
    for sampling in (GREEDY, Sampling(temperature=1.0, seed=3)):
        first = model.generator(512, sampling)
        expected = [generate(first, IDS[:100], 40)]
        first.get_logits()  # computes the last token, as `CachedSequence` does
        expected.append(generate(first, IDS[100:120], 20))
        text = [*IDS[:100].tolist(), *expected[0], *IDS[100:120].tolist(), *expected[1]]
        generator = scripted(looking, Scripted(text, wrong=wrong), 512, sampling)
        assert [generate(generator, IDS[:100], 40), generate(generator, IDS[100:120], 20)] == expected
        assert generator.get_sequence(0).tolist() == text
        tally = generator.tally
        assert tally.candidates > 0
        if wrong == 0:
            # Three of the four rows of a step are candidates, and no token is computed again.
            assert (tally.kept, tally.steps) == (tally.candidates, 10 + 5)
        if wrong == 1:
            assert tally.kept == 0
    if wrong == 2:
        assert generator.kept_before(len(text)) > 140
        generator.rewind_to(150)
        fresh = model.generator(512, GREEDY)
        model.append(fresh, np.array(text[:150], np.int32))
        np.testing.assert_array_equal(generator.get_logits().reshape(-1), fresh.get_logits().reshape(-1))
