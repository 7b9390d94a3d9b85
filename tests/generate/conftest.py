# SPDX-License-Identifier: Apache-2.0
"""The small model, models that draft for it, and candidates that a test chooses."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from flownpu.convert import convert
from flownpu.generate.language_model import LanguageModel
from flownpu.generate.speculative.budget import CandidateBudget
from flownpu.generate.speculative.model import Speculation

CHECKPOINT = Path(__file__).parents[1] / "fixtures" / "gemma3-topics"


class Steady(CandidateBudget):
    """Always asks for the most candidates, so that a test's results do not depend on the clock."""

    def count(self) -> int:
        return self.most


@dataclass
class Scripted:
    """Candidates from a known text; every `wrong`-th is another token than the text's (0: none is)."""

    text: Sequence[int]
    wrong: int = 0
    given: int = 0

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        found = []
        for token in self.text[len(tokens) : len(tokens) + count]:
            self.given += 1
            found.append(token ^ 1 if self.wrong and self.given % self.wrong == 0 else token)
        return found

    def rewound(self, length: int) -> None:
        pass


def steady(model: LanguageModel) -> LanguageModel:
    """The model, made to verify as many candidates as it can in each step."""
    assert model.speculative is not None
    budgets = model.speculative.budgets
    budgets.update({name: Steady(budget.times, budget.most, budget.proposing) for name, budget in budgets.items()})
    return model


def scripted(model: LanguageModel, candidates: Any, *arguments: Any, **options: Any) -> Any:
    """A generator of the model whose candidates are the test's."""
    generator = model.generator(*arguments, **options)
    (_, budget), *_ = generator._sources
    generator._sources = [(candidates, budget)]
    return generator


@pytest.fixture(scope="session")
def topics(converted: Callable[..., Path]) -> Path:
    return converted()


@pytest.fixture(scope="session")
def held_out() -> str:
    """Text that the model was not trained on."""
    return (CHECKPOINT / "held_out.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a tenth of noise on its weights: it often chooses the same token, but not always."""
    source = tmp_path_factory.mktemp("noisy")
    checkpoint = source / "checkpoint"
    shutil.copytree(CHECKPOINT, checkpoint)
    weights = load_file(checkpoint / "model.safetensors")
    random = np.random.default_rng(0)
    for name, weight in weights.items():
        if weight.ndim == 2:
            values = weight.astype(np.float32)
            noise = random.standard_normal(weight.shape, np.float32) * (0.1 * values.std())
            weights[name] = (values + noise).astype(weight.dtype)
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    folder = source / "noisy"
    convert(checkpoint, folder)
    return folder


@pytest.fixture(scope="session")
def plain(topics: Path) -> LanguageModel:
    return LanguageModel(topics)


@pytest.fixture(scope="session")
def looking(topics: Path) -> LanguageModel:
    return steady(LanguageModel(topics, speculation=Speculation(lookup=True)))


@pytest.fixture(scope="session")
def drafted(topics: Path, noisy: Path) -> LanguageModel:
    return steady(LanguageModel(topics, speculation=Speculation(draft=noisy)))


@pytest.fixture(scope="session")
def generate() -> Callable[..., list[int]]:
    """Gives a generator a prompt, and returns the generated tokens."""

    def tokens(generator: Any, prompt: Any, count: int) -> list[int]:
        generator.append_tokens(prompt)
        found: list[int] = []
        while len(found) < count and not generator.is_done():
            generator.generate_next_token()
            found.append(int(generator.get_next_tokens()[0]))
        return found

    return tokens
