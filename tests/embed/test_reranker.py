# SPDX-License-Identifier: Apache-2.0
"""Scores of pairs of texts are transformers'."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from flownpu.embed import EmbeddingModel, Reranker
from flownpu.errors import FlowNPUError
from tests.embed.checkpoints import SENTENCES
from tests.embed.test_embeddings import BFLOAT16, BFLOAT16_TOLERANCE, FLOAT32_TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.embed.conftest import Model

QUERY = "where does the river run?"
DOCUMENTS = [*SENTENCES, "", "word " * 200]


@pytest.mark.parametrize("name", ["bert-score", "xlm-roberta-score"])
def test_scores_of_transformers(name: str, model: Callable[[str], Model]) -> None:
    made = model(name)
    expected = np.array([made.hidden((QUERY, document), "logits")[0, 0] for document in DOCUMENTS])
    # A logit is one product of a vector below 1 in each element with the classifier's weights; errors are relative to
    # what such a product may be.
    weights = dict(made.reference.named_parameters())
    last = next(value for place, value in weights.items() if value.ndim == 2 and len(value) == 1)
    largest = float(last.detach().norm()) * last.shape[1] ** 0.5
    for provider, options, tolerance in (("cpu", {}, FLOAT32_TOLERANCE), ("flownpu", BFLOAT16, BFLOAT16_TOLERANCE)):
        found = Reranker(made.folder, provider=provider, options=options).score(QUERY, DOCUMENTS)
        assert np.abs(found.logits - expected).max() < tolerance * largest
        np.testing.assert_allclose(found.scores, 1 / (1 + np.exp(-found.logits)), rtol=1e-6)
        assert found.cut == [len(DOCUMENTS) - 1]
    # The bound tells documents apart.
    assert np.ptp(expected) > FLOAT32_TOLERANCE * largest


def test_each_kind_of_model_says_what_it_is_not(model: Callable[[str], Model]) -> None:
    with pytest.raises(FlowNPUError, match=r"an output logits, got .* and last_hidden_state"):
        Reranker(model("bert-mean").folder, provider="cpu")
    with pytest.raises(FlowNPUError, match=r"holds no modules\.json"):
        EmbeddingModel(model("bert-score").folder, provider="cpu")
