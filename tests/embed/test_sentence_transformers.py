# SPDX-License-Identifier: Apache-2.0
"""sentence-transformers' ONNX backend loads converted folders, and gives the same embeddings."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flownpu.embed import EmbeddingModel
from flownpu.errors import FlowNPUError
from tests.embed import sentence_transformers_run
from tests.embed.checkpoints import SENTENCES
from tests.embed.conftest import Model
from tests.embed.test_embeddings import BFLOAT16, BFLOAT16_TOLERANCE


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of sentence-transformers' environment; tests are skipped where it cannot be installed."""
    try:
        return sentence_transformers_run.environment()
    except FlowNPUError as error:
        pytest.skip(f"sentence-transformers cannot be installed here: {error}")


# One that needs token_type_ids, one whose tokenizer padded on the left, and one that has dense layers, too.
NAMES = ("bert-mean", "qwen3", "gemma3")


@pytest.fixture(scope="module")
def theirs(model: Callable[[str], Model], python: Path, library: Path) -> dict[str, list[list[float]]]:
    """sentence-transformers' embeddings of SENTENCES, by model."""
    given = {"texts": SENTENCES, "provider": "FlowNPUExecutionProvider", "options": BFLOAT16, "library": library}
    found = sentence_transformers_run.encode(python, [{"model": model(name).folder, **given} for name in NAMES])
    return {name: run["vectors"] for name, run in zip(NAMES, found, strict=True)}


@pytest.mark.parametrize("name", NAMES)
def test_onnx_backend_equals_flownpu(
    name: str, model: Callable[[str], Model], theirs: dict[str, list[list[float]]]
) -> None:
    ours = EmbeddingModel(model(name).folder, options=BFLOAT16).embed(SENTENCES).vectors
    # Texts are batched in another way: the bound of test_batch_equals_single_texts holds.
    distances = np.linalg.norm(ours - np.array(theirs[name], np.float32), axis=1)
    np.testing.assert_array_less(distances, BFLOAT16_TOLERANCE)
