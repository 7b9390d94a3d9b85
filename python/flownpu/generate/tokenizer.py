# SPDX-License-Identifier: Apache-2.0
"""Texts to tokens, and tokens to bytes and texts, by a model folder's tokenizer.json.

Hugging Face's library `tokenizers` reads the file, as in transformers, so the tokens are transformers'.
"""

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flownpu.errors import check_text, require
from flownpu.generate.answer_format import format_of
from flownpu.generate.control_tokens import ControlTokens
from flownpu.model.folder import chat_templates, read_json, special_tokens
from flownpu.model.tokenizer_file import open_tokenizer

Tokens = NDArray[np.int32]
_PURPOSE = "Text generation"
# How SentencePiece and tokenizer.json spell a token that is one byte of a character.
_BYTE = re.compile("<0x([0-9A-F]{2})>")


class Tokenizer:
    """A model folder's tokenizer.

    Args:
        folder: holds tokenizer.json; special tokens that only tokenizer_config.json names are special, too.
        allow_control_tokens: whether control tokens that are written in the texts of a conversation count as such; see
            `ControlTokens`.

    Raises:
        FlowNPUError: tokenizer.json is missing, or a file is damaged.
        MissingDependencyError: `tokenizers` is not installed.
    """

    def __init__(self, folder: Path, *, allow_control_tokens: bool = False) -> None:
        self._tokenizer = open_tokenizer(folder, extra="genai", purpose=_PURPOSE)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._add_special_tokens(folder)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token for token, added_token in added.items() if added_token.special}
        templates = "".join(chat_templates(folder).values())
        form = format_of(templates)
        marks = frozenset() if form is None else form.special
        self._silent = {token for token in self._special if added[token].content not in marks}
        self._control = None if allow_control_tokens else ControlTokens(self._tokenizer, templates)
        kinds = _decoder_kinds(self._tokenizer)
        self._bytes_of_characters = byte_level_bytes() if "ByteLevel" in kinds else {}
        self._has_byte_tokens = "ByteFallback" in kinds
        self._known_bytes: dict[int, bytes] = {}
        # Some text before a token, for decoders that take a space from the beginning of a text.
        self._before = self._tokenizer.encode("a", add_special_tokens=False).ids
        self._text_before = self._decode(self._before)

    def tokens_of_text(self, text: str) -> Tokens:
        """The tokens of a whole prompt: special ones such as <bos> around it, and all control tokens written in it."""
        check_text(text)
        return np.array(self._tokenizer.encode(text).ids, np.int32)

    def mark(self, value: Any) -> Any:
        """A JSON value of a conversation, such as its tools, for the chat template: see `ControlTokens.mark`."""
        return value if self._control is None else self._control.mark(value)

    def mark_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The turns of a conversation for the chat template: see `ControlTokens.mark_message`."""
        return [dict(turn) if self._control is None else self._control.mark_message(turn) for turn in messages]

    def unmark(self, text: str) -> str:
        """A text without marks, such as the error of a chat template that cites a turn."""
        return text if self._control is None else self._control.unmark(text)

    def tokens_of_marked(self, text: str, *, special_tokens: bool = False) -> Tokens:
        """The tokens of a chat template's output for marked texts: only its own control tokens count as such.

        Args:
            text: the template's text.
            special_tokens: whether the tokenizer adds tokens such as <bos>, which templates write themselves.
        """
        check_text(text)
        if self._control is not None:
            return np.array(self._control.encode(text, special_tokens=special_tokens), np.int32)
        return np.array(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids, np.int32)

    def token(self, text: str) -> int | None:
        """The token of that text, or None."""
        found = self._tokenizer.token_to_id(text)
        return None if found is None else int(found)

    def bytes_of(self, token: int, *, begins: bool = False) -> bytes:
        """The bytes that a token adds to an answer: UTF-8, maybe a part of a character.

        A special token adds none, unless it is a mark of the model's `AnswerFormat`.

        Args:
            token: any number; one that the tokenizer does not know adds nothing.
            begins: whether it is the answer's first token: some tokenizers write a space before each word, and not
                before a text's first.
        """
        if token not in self._known_bytes:
            self._known_bytes[token] = self._bytes_inside(token)
        if begins and self._known_bytes[token].startswith(b" ") and not self._bytes_of_characters:
            return self._decode([token]).encode()
        return self._known_bytes[token]

    def _bytes_inside(self, token: int) -> bytes:
        """The bytes that a token adds to a text that has begun."""
        name = self._tokenizer.id_to_token(token)
        if name is None or token in self._silent:
            return b""
        if token in self._special:  # a mark, which stands for its name
            return str(name).encode()
        if self._bytes_of_characters:
            try:
                return bytes(self._bytes_of_characters[character] for character in name)
            except KeyError:  # an added token, which stands for its own text
                return str(name).encode()
        if self._has_byte_tokens and (byte := _BYTE.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        text = self._decode([*self._before, token])
        return (text.removeprefix(self._text_before) if self._text_before else text).encode()

    def text_of(self, token: int, *, begins: bool = False) -> str:
        r"""How OpenAI writes a token: its text, its name if it is a special one, or its bytes as in `\xe2\x82`."""
        if token in self._special:
            return str(self._tokenizer.id_to_token(token))
        data = self.bytes_of(token, begins=begins)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in data)

    def text_stream(self) -> Callable[[int], str]:
        """A function that takes a new sequence's tokens one by one, and returns the text that each adds.

        The bytes of an incomplete character are held back until it is complete. Bytes that are no UTF-8 become U+FFFD.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        begins = True

        def text_of(token: int) -> str:
            nonlocal begins
            data = self.bytes_of(token, begins=begins)
            begins = begins and token in self._silent
            return decoder.decode(data)

        return text_of

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def _add_special_tokens(self, folder: Path) -> None:
        """Makes the tokens special that tokenizer_config.json calls so, as transformers (5.23) does.

        Those that the model has no number for are left out: transformers would number them beyond its vocabulary.
        """
        path = folder / "tokenizer_config.json"
        listed = read_json(path).get("added_tokens_decoder") if path.is_file() else None
        if isinstance(listed, dict):
            texts = [one.get("content") for one in listed.values() if isinstance(one, dict) and one.get("special")]
        else:
            texts = list(special_tokens(folder).values())
        special = {one.content for one in self._tokenizer.get_added_tokens_decoder().values() if one.special}
        added_token = require("tokenizers", extra="genai", purpose=_PURPOSE).AddedToken
        for text in texts:
            if isinstance(text, str) and text not in special and self.token(text) is not None:
                self._tokenizer.add_special_tokens([added_token(text, special=True, normalized=False)])


def _decoder_kinds(tokenizer: Any) -> set[str]:
    """The types of the steps by which a tokenizer makes text of tokens."""
    if tokenizer.decoder is None:
        return set()
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return {step["type"] for step in decoder.get("decoders", [decoder])}


def byte_level_bytes() -> dict[str, int]:
    """The byte that each character stands for in byte-level BPE.

    GPT-2's encoder.py: bytes with a visible character in Latin-1 are that character; the others are, in their order,
    the characters from U+0100 on.
    """
    alphabet = sorted(require("tokenizers", extra="genai", purpose=_PURPOSE).pre_tokenizers.ByteLevel.alphabet())
    visible = [character for character in alphabet if ord(character) < 256]
    hidden = [byte for byte in range(256) if chr(byte) not in visible]
    return {character: ord(character) for character in visible} | dict(
        zip(alphabet[len(visible) :], hidden, strict=True)
    )
