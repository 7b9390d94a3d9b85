# SPDX-License-Identifier: Apache-2.0
"""Turns texts into tokens by the model's own tokenizer.json, cut at the length that the model takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flownpu.errors import FlowNPUError, check_text
from flownpu.model.folder import MANIFEST, read_json
from flownpu.model.tokenizer_file import open_tokenizer

# Families whose first position is the padding token's id + 1, so that they take that many tokens less.
_COUNT_FROM_PADDING = {"roberta", "xlm-roberta", "camembert"}


@dataclass(frozen=True)
class TokenRow:
    """The tokens of a text, or of a pair of texts; `is_cut` if they were more than the model takes."""

    ids: list[int]
    types: list[int]
    """For each token 0 if it is the first text's and 1 if it is the second's, in models that tell them apart."""
    is_cut: bool


class TextTokenizer:
    """A model folder's tokenizer.

    Attributes:
        longest: how many tokens a text may have, special tokens included.
        padding: the id of the token that pads rows.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the folder's tokenizer.json and the files that say how long texts may be.

        Raises:
            FlowNPUError: a file is missing or damaged.
            MissingDependencyError: tokenizers is not installed.
        """
        self._tokenizer = open_tokenizer(folder, extra="embed", purpose="flownpu embed")
        settings = _settings(folder, "sentence_bert_config.json")
        self.longest = _longest(folder, settings)
        self._lowers = settings.get("do_lower_case") is True
        padding = self._tokenizer.padding or {}
        self.padding = int(padding.get("pad_id", 0))
        self._tokenizer.no_padding()

    def rows(self, texts: Sequence[str] | Sequence[tuple[str, str]]) -> list[TokenRow]:
        """The tokens of texts, or of pairs of texts, cut at `longest`; of a pair the longer text is cut first.

        Raises:
            FlowNPUError: a text has no token, or is not UTF-8.
        """
        for text in texts:
            for part in (text,) if isinstance(text, str) else text:
                check_text(part)
        self._tokenizer.enable_truncation(self.longest)
        found = self._tokenizer.encode_batch([self._prepared(text) for text in texts])
        rows = [TokenRow(list(one.ids), list(one.type_ids), bool(one.overflowing)) for one in found]
        empty = next((index for index, row in enumerate(rows) if not row.ids), None)
        if empty is not None:
            raise FlowNPUError(f"text {empty} is empty, and this model's tokenizer makes no token of it: leave it out")
        return rows

    def framed_rows(self, before: str, texts: Sequence[str], behind: str) -> list[TokenRow]:
        """The tokens of each text between those of `before` and `behind`, without the tokenizer's special tokens.

        A text is cut so that all three together have at most `longest` tokens.

        Raises:
            FlowNPUError: a text is not UTF-8, or `before` and `behind` leave no token for a text.
        """
        for text in texts:
            check_text(text)
        self._tokenizer.no_truncation()
        first, last = (self._tokenizer.encode(text, add_special_tokens=False).ids for text in (before, behind))
        room = self.longest - len(first) - len(last)
        if room < 1:
            raise FlowNPUError(
                f"the model takes {self.longest} tokens, and {len(first) + len(last)} of them are what stands around "
                "a text: nothing of a text can be read"
            )
        self._tokenizer.enable_truncation(room)
        found = self._tokenizer.encode_batch([self._prepared(text) for text in texts], add_special_tokens=False)
        rows = [[*first, *one.ids, *last] for one in found]
        return [TokenRow(ids, [0] * len(ids), bool(one.overflowing)) for ids, one in zip(rows, found, strict=True)]

    def token(self, word: str) -> int:
        """The id of a word that is one token.

        Raises:
            FlowNPUError: the tokenizer has no such token.
        """
        number = self._tokenizer.token_to_id(word)
        if number is None:
            raise FlowNPUError(
                f"expected a tokenizer in which {word!r} is a token, got one that has no such: the model "
                "was not trained to answer so"
            )
        return int(number)

    def _prepared(self, text: str | tuple[str, str]) -> str | tuple[str, str]:
        if not self._lowers:
            return text
        return text.lower() if isinstance(text, str) else (text[0].lower(), text[1].lower())


def _settings(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name) if (folder / name).is_file() else {}


def _longest(folder: Path, settings: dict[str, Any]) -> int:
    """Most tokens of a text: the least of the limits in the folder's configuration, tokenizer and manifest."""
    config = _settings(folder, "config.json")
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and config.get("model_type") in _COUNT_FROM_PADDING:
        positions -= int(config.get("pad_token_id") or 1) + 1
    limits = [
        positions,
        _settings(folder, MANIFEST).get("settings", {}).get("context_length"),
        settings.get("max_seq_length"),
        _settings(folder, "tokenizer_config.json").get("model_max_length"),
    ]
    known = [int(limit) for limit in limits if isinstance(limit, int | float) and not isinstance(limit, bool)]
    if not known or min(known) < 1:
        raise FlowNPUError(
            f"{folder}: expected config.json to say for how many tokens the model is (max_position_embeddings), got "
            f"{positions!r}"
        )
    return min(known)
