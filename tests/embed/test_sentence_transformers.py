# SPDX-License-Identifier: Apache-2.0
"""sentence-transformers takes the folders as its ONNX backend, and gives the same embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from flownpu.embed import EmbeddingModel
from flownpu.errors import FlowNPUError
from flownpu.graph_rewrites.testing import FLOAT32_ROUNDING
from tests.embed import sentence_transformers_run
from tests.embed.checkpoints import SENTENCES
from tests.embed.test_embeddings import BFLOAT16, BFLOAT16_TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.embed.conftest import Model


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of its environment; the tests are skipped where it cannot be installed."""
    try:
        return sentence_transformers_run.environment()
    except FlowNPUError as error:
        pytest.skip(f"sentence-transformers cannot be installed here: {error}")


# Of one that needs token_type_ids, and of one whose tokenizer padded on the left; gemma3 has dense layers, too.
@pytest.mark.parametrize("name", ["bert-mean", "qwen3", "gemma3"])
def test_onnx_backend(name: str, model: Callable[[str], Model], python: Path, library: Path) -> None:
    folder = model(name).folder
    found = sentence_transformers_run.encode(
        python,
        model=folder,
        texts=SENTENCES,
        provider="FlowNPUExecutionProvider",
        options=BFLOAT16,
        library=library,
    )
    ours = EmbeddingModel(folder, options=BFLOAT16).embed(SENTENCES).vectors
    theirs = np.array(found["vectors"], np.float32)
    # Batches differ, as in test_a_batch_is_its_texts_one_by_one.
    np.testing.assert_array_less(np.linalg.norm(ours - theirs, axis=1), BFLOAT16_TOLERANCE + 4 * FLOAT32_ROUNDING)
