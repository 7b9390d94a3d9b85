# SPDX-License-Identifier: Apache-2.0
"""Keeps names of control tokens in users' texts from becoming control tokens.

A chat template mixes its own control tokens, such as <start_of_turn>, with texts of users and of tools; these must not
open turns by writing the same names. Before the template sees a text, a secret mark is put between the characters of
each control token in the text. In the template's output, control tokens without marks are the template's own. They get
names with the mark, which only a second view of the tokenizer knows, and all other marks are removed. So the prompt is
tokenised as one text, and spaces and neighbours count as in any text.
"""

import json
import os
import re
import secrets
from collections.abc import Collection, Mapping
from typing import Any

from flownpu.errors import require

# The characters of Unicode's two planes for private use, of which three are a number of 51 bits that nobody guesses.
_PRIVATE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_MARK_LENGTH = 3
# Forms of names that are control tokens even if tokenizer.json does not call them special; DeepSeek's, which have the
# fullwidth bar U+FF5C, are not.
_CONTROL_NAME = re.compile("<[|\uff5c].*[|\uff5c]>", re.DOTALL)
_BRACKETED = re.compile(r"[<\[{].*[>\]}]", re.DOTALL)


class ControlTokens:
    """The control tokens of a tokenizer.

    These are its special tokens; and of its other added tokens those of the form <|name|>, and those in brackets that
    the chat template names, such as <think>, </think> and <tool_call>.

    Args:
        tokenizer: the `tokenizers.Tokenizer`.
        template: the chat template; may be empty.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        added = dict(sorted(tokenizer.get_added_tokens_decoder().items()))
        numbers = {one.content: token for token, one in added.items() if one.content}
        special = {one.content for one in added.values() if one.content and one.special}
        # A template that writes <think> may leave </think> to the model.
        template = template.replace("/", "")
        written = {
            name
            for name in numbers
            if _CONTROL_NAME.fullmatch(name) or (_BRACKETED.fullmatch(name) and name.replace("/", "") in template)
        }
        self._mark = "".join(chr(secrets.choice(secrets.choice(_PRIVATE))) for _ in range(_MARK_LENGTH))
        self._special = _pattern(special)
        self._all = _pattern(special | written)
        self._control = {numbers[name]: name for name in special | written}
        # Templates may also write texts as JSON in ASCII.
        marks = f"{self._mark}|{re.escape(json.dumps(self._mark)[1:-1])}"
        self._marks = re.compile(marks)
        self._names_and_marks = re.compile(f"(?P<name>{self._all.pattern})|{marks}")
        self._view = self._renaming_view(tokenizer, added.values())
        names = {name: self._renamed(name) if name in special | written else name for name in numbers}
        self._numbers = {self._view.token_to_id(names[name]): token for name, token in numbers.items()}

    def mark(self, value: Any) -> Any:
        """A JSON value with marks in all control tokens of its texts, its objects' keys included."""
        return self._marked(value, self._all)

    def mark_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A turn of a conversation with marks in its texts.

        In the model's own turns only special tokens are marked: answers have none, but may have others, such as <think>
        and <tool_call>, which are to be the tokens again that they were.
        """
        names = self._special if message.get("role") == "assistant" else self._all
        return {key: value if key == "role" else self._marked(value, names) for key, value in message.items()}

    def unmark(self, text: str) -> str:
        """The text without marks."""
        return self._marks.sub("", text)

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """The tokens of a text in which control tokens with marks are plain text.

        Args:
            text: what the chat template wrote of marked texts.
            special_tokens: whether the tokenizer adds tokens such as <bos>.
        """
        renamed = self._names_and_marks.sub(lambda found: self._renamed(found["name"]) if found["name"] else "", text)
        encoding = self._view.encode(renamed, add_special_tokens=special_tokens)
        tokens: list[int] = []
        for token, is_around, place in zip(encoding.ids, encoding.special_tokens_mask, encoding.offsets, strict=True):
            if is_around:
                tokens.append(token)
            elif token in self._numbers:
                tokens.append(self._numbers[token])
            # A vocabulary, such as Unigram's, may have the name as a word. An unknown word may become <unk>.
            elif token in self._control and self._control[token] in renamed[slice(*place)]:
                tokens += self._spelled(self._control[token])
            else:
                tokens.append(token)
        return tokens

    def _marked(self, value: Any, names: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return names.sub(lambda found: "".join(character + self._mark for character in found[0]), value)
        if isinstance(value, Mapping):
            return {self._marked(key, names): self._marked(item, names) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(item, names) for item in value]
        return value

    def _renamed(self, name: str) -> str:
        return name[:1] + self._mark + name[1:]

    def _renaming_view(self, tokenizer: Any, added: Collection[Any]) -> Any:
        """The tokenizer with other names for its control tokens; it shares the vocabulary's memory."""
        tokenizers = require("tokenizers", extra="genai", purpose="Text generation")
        view = tokenizers.Tokenizer(tokenizer.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if (value := getattr(tokenizer, part)) is not None:
                setattr(view, part, value)
        # New tokens are numbered from the vocabulary's size on. If the vocabulary has holes, these numbers may be its
        # own, and names that no text has then take them.
        first = size = tokenizer.get_vocab_size(with_added_tokens=False)
        while own := [n for n in range(first, first + len(added)) if view.model.id_to_token(n) is not None]:
            first = own[-1] + 1
        view.add_tokens([f"{self._mark}{number}" for number in range(first - size)])
        names = set(self._control.values())
        view.add_tokens(
            [
                tokenizers.AddedToken(
                    self._renamed(one.content) if one.content in names else one.content,
                    single_word=one.single_word,
                    lstrip=one.lstrip,
                    rstrip=one.rstrip,
                    normalized=one.normalized and one.content not in names,
                    special=one.special,
                )
                for one in added
            ]
        )
        return view

    def _spelled(self, name: str) -> list[int]:
        """The tokens of a name's characters, each by itself."""
        return [int(piece.id) for character in name for piece in self._view.model.tokenize(character)]


def _pattern(names: Collection[str]) -> re.Pattern[str]:
    """Finds any of the names, the longest first; the time for a text does not depend on how many names there are."""
    return re.compile(_branches(names) if names else "(?!)")


def _branches(names: Collection[str]) -> str:
    """A regular expression that tries each character once: names that begin alike share their beginning."""
    beginning = os.path.commonprefix(list(names))  # noqa: RUF071 of texts, not of paths
    rests: dict[str, list[str]] = {}
    for name in names:
        rest = name[len(beginning) :]
        rests.setdefault(rest[:1], []).append(rest)
    ends = rests.pop("", None)
    branches = f"(?:{'|'.join(map(_branches, rests.values()))})" if rests else ""
    return re.escape(beginning) + branches + ("?" if ends and branches else "")
