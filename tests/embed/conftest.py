# SPDX-License-Identifier: Apache-2.0
"""Small models that embed texts, made and converted once, with transformers' results for the same weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer

from flownpu.convert import convert
from flownpu.ops import q4nx
from tests.embed.checkpoints import POSITIONS, make_checkpoint

# Tables that stay in float32 where other matrices are rounded.
_TABLES = ("position_embeddings", "token_type_embeddings")


@dataclass
class Model:
    """A checkpoint, the folder made of it, and transformers' model with the folder's weights."""

    checkpoint: Path
    folder: Path
    reference: torch.nn.Module
    tokenizer: Tokenizer

    def hidden(self, text: str | tuple[str, str], output: str = "last_hidden_state") -> NDArray[np.float32]:
        """transformers' output for one text alone, float32 [1, ...]."""
        pair = (text,) if isinstance(text, str) else text
        tokens = self.tokenizer.encode(*pair)
        ids = torch.tensor([tokens.ids])
        more = {"token_type_ids": torch.tensor([tokens.type_ids])} if 1 in tokens.type_ids else {}
        with torch.no_grad():
            found = self.reference(ids, attention_mask=torch.ones_like(ids), **more)
        array: NDArray[np.float32] = found[output].numpy()
        return array


def _rounded(weight: NDArray[np.float32], is_decoder: bool) -> NDArray[np.float32]:
    if is_decoder:
        return q4nx.dequantize_codes(q4nx.quantize(np.ascontiguousarray(weight)))
    return weight.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Makes a model by the names of `make_checkpoint`, once; an encoder's matrices are bfloat16, a decoder's Q4NX."""
    made: dict[str, Model] = {}

    def make(name: str) -> Model:
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            checkpoint = make_checkpoint(name, root / "checkpoint")
            convert(checkpoint, root / "model")
            kind = transformers.AutoModelForSequenceClassification if name.endswith("score") else transformers.AutoModel
            reference: Any = kind.from_pretrained(checkpoint, dtype=torch.float32).eval()
            for place, parameter in reference.named_parameters():
                if parameter.ndim == 2 and not any(table in place for table in _TABLES):
                    values = _rounded(parameter.detach().numpy(), name in ("qwen3", "gemma3"))
                    parameter.data = torch.from_numpy(np.array(values))
            tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
            tokenizer.no_padding()
            tokenizer.enable_truncation(POSITIONS)
            made[name] = Model(checkpoint, root / "model", reference, tokenizer)
        return made[name]

    return make


def cosines(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
    """The cosines [N] of the angles between rows [N, D] of one and the same rows of the other."""
    one, other = one.astype(np.float64), other.astype(np.float64)
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    result: NDArray[np.float64] = np.sum(one * other, axis=1) / lengths
    return result


def pooled(hidden: Sequence[NDArray[np.float32]], how: str) -> NDArray[np.float32]:
    """Embeddings [N, D] of length 1, pooled from texts' hidden states [1, t, D] by "mean", "cls" or "last"."""
    place = {"cls": 0, "last": -1}
    vectors = np.stack([one[0].mean(axis=0) if how == "mean" else one[0, place[how]] for one in hidden])
    normalised: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return normalised
