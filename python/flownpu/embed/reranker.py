# SPDX-License-Identifier: Apache-2.0
"""Scores of pairs of texts: how well a document answers a query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.embed.session import TextModel, cut_rows
from flownpu.errors import FlowNPUError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from flownpu.embed.tokens import TokenRow

__all__ = ["INSTRUCTION", "GeneratingReranker", "Reranker", "Scores", "open_reranker"]

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""What Qwen3-Reranker is told by default that a document is to do."""
# What else it was trained with around a query and a document.
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Scores:
    """The scores of documents, in their order."""

    logits: NDArray[np.float32]
    """[documents]: what the model says, the higher the better."""
    tokens: list[int]
    """The tokens of each pair, as far as they were computed."""
    cut: list[int]
    """The pairs that were longer than the model takes."""

    @property
    def scores(self) -> NDArray[np.float32]:
        """Between 0 and 1: 1 / (1 + e^-logit)."""
        # By tanh, which overflows nowhere.
        return ((1 + np.tanh(self.logits / 2)) / 2).astype(np.float32)


class Reranker(TextModel):
    """A model that classifies pairs of texts with one label (a cross-encoder)."""

    outputs = ("logits",)

    def score(self, query: str, documents: Sequence[str], *, advance: Callable[[int], None] = lambda _: None) -> Scores:
        """Scores each document's answer to the query.

        Args:
            query: the first text of each pair.
            documents: the second ones.
            advance: hears how many more documents are done.

        Raises:
            FlowNPUError: a text is no UTF-8, or the model has several labels.
        """
        rows = self.session.tokenizer.rows([(query, document) for document in documents])
        return self._scores(rows, advance)

    def _scores(self, rows: Sequence[TokenRow], advance: Callable[[int], None]) -> Scores:
        logits = np.empty(len(rows), np.float32)
        for indices, output, _ in self.session.run(rows, advance):
            logits[indices] = self._logits(output)
        return Scores(logits, [len(row.ids) for row in rows], cut_rows(rows))

    def _logits(self, output: NDArray[np.float32]) -> NDArray[np.float32]:
        """A batch's scores [N], of what the graph yields."""
        if output.ndim != 2 or output.shape[1] != 1:
            raise FlowNPUError(
                f"{self.folder}: expected a model with one label, whose logits are [{len(output)}, 1], got "
                f"{list(output.shape)}"
            )
        return output[:, 0]


class GeneratingReranker(Reranker):
    """A decoder that was trained to answer "yes" or "no": Qwen3-Reranker (Zhang et al., 2025).

    "Qwen3 Embedding: Advancing Text Embedding and Reranking Through Foundation Models" has the form of its input, and
    the score: e^l(yes) / (e^l(yes) + e^l(no)), l being the logits of the next token. It is the logistic function of
    l(yes) - l(no), a document's logit here.
    """

    instruction: str = INSTRUCTION

    def score(self, query: str, documents: Sequence[str], *, advance: Callable[[int], None] = lambda _: None) -> Scores:
        """Scores each document's answer to the query, as `instruction` says what an answer is.

        Args, errors: as `Reranker`; FlowNPUError, too, if the tokenizer has not the words that the model was trained
        with.
        """
        tokenizer = self.session.tokenizer
        asked = f"<Instruct>: {self.instruction}\n<Query>: {query}\n<Document>: "
        rows = tokenizer.framed_rows(_BEFORE, [asked + document for document in documents], _BEHIND)
        return self._scores(rows, advance)

    def _logits(self, output: NDArray[np.float32]) -> NDArray[np.float32]:
        if output.ndim != 3 or output.shape[1] != 1:
            raise FlowNPUError(
                f"{self.folder}: expected the logits of a row's last token, [{len(output)}, 1, words], got "
                f"{list(output.shape)}: convert the model with --logits last"
            )
        yes, no = (output[:, 0, self.session.tokenizer.token(answer)] for answer in ("yes", "no"))
        return yes - no


def open_reranker(folder: Path, **options: Any) -> Reranker:
    """The reranker that a folder holds, one of a generating model where it is a folder of ORT GenAI's.

    Args, errors: as `TextModel`.
    """
    generates = (folder / "genai_config.json").is_file()
    return (GeneratingReranker if generates else Reranker)(folder, **options)
