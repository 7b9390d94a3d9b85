# SPDX-License-Identifier: Apache-2.0
"""GenAI's choice of the next token, from logits that another model has computed.

It uses a model whose whole graph is `logits = row`, with the folder's tokenizer and ending tokens. GenAI's generator of
this model has the sequence, sampling, penalties, guidance and random state, and no weights. So a token is chosen by the
same code as without candidates, with the same random numbers.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FILE = "choice.onnx"
_ROW = "row"
# The graph as an ONNX file: int64 input_ids [B, S], which are ignored, and float32 row [B, 1, V] -> logits [B, 1, V].
# In ONNX's text format, from which `onnx.parser` makes these bytes:
#     <ir_version: 10, opset_import: ["": 21]>
#     choice (int64[B, S] input_ids, float[B, 1, V] row) => (float[B, 1, V] logits) { logits = Identity(row) }
_GRAPH = bytes.fromhex(
    "080a3a7f0a190a03726f7712066c6f6769747322084964656e746974793a00120663686f6963655a1d0a09696e7075745f69647312100a0e0807"
    "120a0a031201420a031201535a1b0a03726f7712140a120801120e0a031201420a0208010a03120156621e0a066c6f6769747312140a12080112"
    "0e0a031201420a0208010a0312015642040a001015"
)


class ChoiceModel:
    """Makes choices; one object serves all sequences of a folder's model.

    Args:
        genai: the module onnxruntime_genai.
        folder: folder of the model whose tokens are chosen.
        vocabulary: V, the size of its vocabulary.
    """

    def __init__(self, genai: Any, folder: Path, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        config = genai.Config(str(folder))
        config.clear_providers()
        # Any plain decoder's type works, because GenAI distinguishes types only by their caches and images. More
        # threads would spin while they wait, on cores that the model's threads need.
        alone = {"intra_op_num_threads": 1, "inter_op_num_threads": 1}
        decoder = {"filename": _FILE, "num_hidden_layers": 0, "session_options": alone}
        config.overlay(json.dumps({"model": {"type": "gemma3_text", "decoder": decoder}}))
        config.add_model_data(_FILE, _GRAPH)
        self._model = genai.Model(config)

    def choice(self, make: Callable[[Any], Any]) -> "Choice":
        """A choice for a new sequence; `make` makes a generator of a given model, with the wanted sampling."""
        return Choice(make(self._model), self.vocabulary)


class Choice:
    """One sequence's tokens so far, and how the next one is chosen."""

    def __init__(self, generator: Any, vocabulary: int) -> None:
        self.generator = generator
        self._row = np.zeros((1, 1, vocabulary), np.float32)
        # GenAI 0.18 keeps a reference to this memory, so each step reads its contents anew.
        generator.set_model_input(_ROW, self._row)
        self._has_logits = False

    def append(self, tokens: NDArray[np.int32], logits: NDArray[np.float32]) -> None:
        """Appends given tokens; `logits`, float32 [V], are those behind the last of them."""
        self._row[...] = logits
        self.generator.append_tokens(tokens)
        self._has_logits = True

    def next(self, logits: NDArray[np.float32]) -> int:
        """Chooses a token from the logits behind the last one, float32 [V]; appends it unless it ends the text."""
        self._row[...] = logits
        if self._has_logits:  # GenAI read the logits when tokens were appended; they may have changed since
            self.generator.set_logits(self._row)
            self._has_logits = False
        self.generator.generate_next_token()
        return int(self.generator.get_next_tokens()[0])
