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

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The instruction that Qwen3-Reranker is given by default: what a document should do."""
# The rest of the text around a query and a document that Qwen3-Reranker was trained with.
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Scores:
    """The scores of documents, in the documents' order."""

    logits: NDArray[np.float32]
    """[documents]: the model's output for each document; a higher logit is a better answer."""
    tokens: list[int]
    """How many tokens of each pair of query and document were computed."""
    cut: list[int]
    """Indices of the pairs that were longer than the model takes."""

    @property
    def scores(self) -> NDArray[np.float32]:
        """[documents]: 1 / (1 + e^-logit), between 0 and 1."""
        # Written with tanh, which cannot overflow.
        return ((1 + np.tanh(self.logits / 2)) / 2).astype(np.float32)


class Reranker(TextModel):
    """A model that classifies pairs of texts with one label (a cross-encoder). Takes the arguments of `TextModel`."""

    outputs = ("logits",)

    def score(self, query: str, documents: Sequence[str], *, advance: Callable[[int], None] = lambda _: None) -> Scores:
        """Scores how well each document answers the query.

        Args:
            query: the first text of each pair.
            documents: the second text of each pair.
            advance: called after each batch with the number of its documents.

        Raises:
            FlowNPUError: a text is not UTF-8, or the model has several labels.
        """
        rows = self.tokenizer.rows([(query, document) for document in documents])
        return self._scores(rows, advance)

    def _scores(self, rows: Sequence[TokenRow], advance: Callable[[int], None]) -> Scores:
        logits = np.empty(len(rows), np.float32)
        for indices, output, _ in self.run(rows, advance):
            logits[indices] = self._logits(output)
        return Scores(logits, [len(row.ids) for row in rows], cut_rows(rows))

    def _logits(self, output: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits [N] of a batch of N pairs, from the graph's output; FlowNPUError if it has another shape."""
        if output.ndim != 2 or output.shape[1] != 1:
            raise FlowNPUError(
                f"{self.folder}: expected a model with one label, whose logits are [{len(output)}, 1], got "
                f"{list(output.shape)}"
            )
        return output[:, 0]


class GeneratingReranker(Reranker):
    """A decoder that was trained to answer "yes" or "no": Qwen3-Reranker (Zhang et al., 2025).

    "Qwen3 Embedding: Advancing Text Embedding and Reranking Through Foundation Models" defines the form of its input,
    and the score: e^l(yes) / (e^l(yes) + e^l(no)), where l are the logits of the next token. That is the logistic
    function of l(yes) - l(no), which is what `Scores.logits` has for a document.
    """

    instruction: str = INSTRUCTION

    def score(self, query: str, documents: Sequence[str], *, advance: Callable[[int], None] = lambda _: None) -> Scores:
        """Scores how well each document answers the query; `instruction` tells the model what an answer is.

        Args, errors: as `Reranker.score`; FlowNPUError also if the tokenizer lacks the tokens "yes" and "no", or if
        the graph yields the logits of more than the last token.
        """
        tokenizer = self.tokenizer
        asked = f"<Instruct>: {self.instruction}\n<Query>: {query}\n<Document>: "
        rows = tokenizer.framed_rows(_BEFORE, [asked + document for document in documents], _BEHIND)
        return self._scores(rows, advance)

    def _logits(self, output: NDArray[np.float32]) -> NDArray[np.float32]:
        if output.ndim != 3 or output.shape[1] != 1:
            raise FlowNPUError(
                f"{self.folder}: expected the logits of a row's last token, [{len(output)}, 1, words], got "
                f"{list(output.shape)}: convert the model with --logits last"
            )
        yes, no = (output[:, 0, self.tokenizer.token(answer)] for answer in ("yes", "no"))
        return yes - no


def open_reranker(folder: Path, **options: Any) -> Reranker:
    """Opens the reranker in a folder: a `GeneratingReranker` if the folder has a genai_config.json, else a `Reranker`.

    Args, errors: as `TextModel`.
    """
    generates = (folder / "genai_config.json").is_file()
    return (GeneratingReranker if generates else Reranker)(folder, **options)
