# SPDX-License-Identifier: Apache-2.0
r"""Writes the tokenizer of a GGUF file as the files that ORT GenAI and transformers read.

GGUF has three kinds that the supported families use:

    "gpt2"    BPE over bytes: tokens, merges, and the name of the regular expression that splits a text into words
    "llama"   SentencePiece's BPE: tokens with scores; the pair that makes the token with the highest score merges first
    "gemma4"  the same, with merges in the place of scores

All become a tokenizer.json of type BPE. "llama" has no list of merges: these are all pairs of tokens that together are
a token, the highest score first.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flownpu.convert.errors import ConversionError
from flownpu.model.folder import MORE_TEMPLATES

if TYPE_CHECKING:
    from flownpu.convert.gguf.file import GgufFile

_TEMPLATE_NAME = re.compile(r"\w{1,100}", re.ASCII)
# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_SPACE = "▁"

# The expressions that split texts into words in the tokenizer.json of published models.
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_DIGIT, _DIGITS = r"\p{N}", r"\p{N}{1,3}"
# Llama 3's, and Qwen's, which takes digits one by one.
_WORDS = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
# GPT-4o's and Tekken's: a word of capitals ends before a small letter, and only GPT-4o's has endings such as 's.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+ENDINGS|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*ENDINGS|DIGITS|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _ByteLevel:
    """The meaning of a value of tokenizer.ggml.pre."""

    words: tuple[str, ...]
    """Expressions that split a text, each what the ones before it left."""
    tokenizer_class: str
    add_bos: bool
    """Whether a text begins with the BOS token, if the file does not say."""
    compose: bool = False
    """Texts are first brought into Unicode's composed form (NFC)."""
    ignore_merges: bool = False
    """A word that is in the vocabulary is one token, whatever the merges would make of it."""


_FAST = "PreTrainedTokenizerFast"
_LLAMA3 = _ByteLevel((_WORDS.replace("DIGITS", _DIGITS),), _FAST, add_bos=True, ignore_merges=True)
_CL100K = _ByteLevel(_LLAMA3.words, _FAST, add_bos=False)
_QWEN = _ByteLevel((_WORDS.replace("DIGITS", _DIGIT),), "Qwen2Tokenizer", add_bos=False, compose=True)
_GPT2 = _ByteLevel((_GPT2_WORDS,), _FAST, add_bos=False)
_SINGLE_DIGITS = _ByteLevel((_DIGIT, _GPT2_WORDS), _FAST, add_bos=False)
_GPT4O = _ByteLevel((_CASES.replace("ENDINGS", f"{_ENDINGS}?").replace("DIGITS", _DIGITS),), _FAST, add_bos=False)
_TEKKEN = _ByteLevel(
    (_CASES.replace("ENDINGS", "").replace("DIGITS", _DIGIT),), _FAST, add_bos=True, ignore_merges=True
)
_BYTE_LEVEL = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _CL100K),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN),
    **dict.fromkeys(("gpt-2", "olmo", "mpt"), _GPT2),
    **dict.fromkeys(("smollm", "refact", "starcoder"), _SINGLE_DIGITS),
    "gpt-4o": _GPT4O,
    "tekken": _TEKKEN,
}


def tokenizer_files(file: GgufFile, rows: int) -> dict[str, bytes]:
    """The contents of tokenizer.json, tokenizer_config.json and the chat templates' files, by path.

    Args:
        file: the file.
        rows: how many rows the embedding table has; there may not be more tokens.

    Raises:
        ConversionError: the file has no tokenizer, or one that is damaged or not known.
    """
    tokenizer = _Tokenizer(file, rows)
    return {
        "tokenizer.json": json.dumps(tokenizer.tokenizer(), ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(tokenizer.settings(), ensure_ascii=False, indent=2).encode(),
        **tokenizer.templates(),
    }


class _Tokenizer:
    def __init__(self, file: GgufFile, rows: int) -> None:
        self.file = file
        self.kind = self.value("model", "none")
        if self.kind not in ("gpt2", "llama", "gemma4"):
            raise ConversionError(
                f"{file.path}: expected a tokenizer of the kind gpt2, llama or gemma4 in tokenizer.ggml.model, got "
                f'"{self.kind}"; convert the checkpoint that the file was made of'
            )
        self.pre = str(self.value("pre", "default"))
        if self.kind == "gpt2" and self.pre not in _BYTE_LEVEL:
            raise ConversionError(
                f'{file.path}: expected tokenizer.ggml.pre to be one of {", ".join(_BYTE_LEVEL)}, got "{self.pre}", '
                "whose words are not known; convert the checkpoint that the file was made of"
            )
        self.tokens: list[str] = self.listed("tokens")
        if len(self.tokens) > rows:
            raise ConversionError(
                f"{file.path}: expected at most {rows} tokens, the rows of token_embd.weight, got {len(self.tokens)}"
            )
        # Files of Gemma 4 have some texts twice: the later one counts, as in llama.cpp.
        if len(set(self.tokens)) != len(self.tokens) and self.kind != "gemma4":
            raise ConversionError(f"{file.path}: expected tokens that differ, and one is there twice")
        types = self.value("token_type")
        self.types: list[int] = [_NORMAL] * len(self.tokens) if types is None else [int(kind) for kind in types]
        if len(self.types) != len(self.tokens):
            raise ConversionError(f"{file.path}: expected {len(self.tokens)} token types, got {len(self.types)}")
        self.bos, self.eos = self.special("bos"), self.special("eos")
        spm = self.kind != "gpt2"
        default = True if spm else _BYTE_LEVEL[self.pre].add_bos
        self.add_bos = bool(self.value("add_bos_token", default)) and self.bos is not None
        self.add_eos = bool(self.value("add_eos_token", False)) and self.eos is not None
        self.add_space = spm and bool(self.value("add_space_prefix", self.kind == "llama"))

    def tokenizer(self) -> dict[str, Any]:
        """The contents of tokenizer.json."""
        parts = self._byte_level() if self.kind == "gpt2" else self._sentencepiece()
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added_tokens(),
            "post_processor": self._post_processor(),
            **parts,
        }

    def settings(self) -> dict[str, Any]:
        """The contents of tokenizer_config.json."""
        if self.kind == "gpt2":
            tokenizer_class = _BYTE_LEVEL[self.pre].tokenizer_class
        else:
            tokenizer_class = "LlamaTokenizer" if self.add_space else "GemmaTokenizer"
        settings = {
            "tokenizer_class": tokenizer_class,
            "add_bos_token": self.add_bos,
            "add_eos_token": self.add_eos,
            "bos_token": self.bos,
            "eos_token": self.eos,
            "pad_token": self.special("padding"),
            "unk_token": self._unknown(),
            "clean_up_tokenization_spaces": False,
        }
        return {key: value for key, value in settings.items() if value is not None}

    def templates(self) -> dict[str, bytes]:
        """The files of the chat templates: that of ordinary conversations, and others by name, such as tool_use."""
        key = "tokenizer.chat_template"
        found = {}
        for name, value in self.file.metadata.items():
            if name == key or (name.startswith(f"{key}.") and _TEMPLATE_NAME.fullmatch(name.removeprefix(f"{key}."))):
                if not isinstance(value, str):
                    raise ConversionError(f"{self.file.path}: expected a text in {name}, got {value!r:.40}")
                other = name.removeprefix(f"{key}.")
                path = "chat_template.jinja" if name == key else f"{MORE_TEMPLATES}/{other}.jinja"
                found[path] = value.encode()
        return found

    def value(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"tokenizer.ggml.{key}", default)

    def listed(self, key: str) -> list[str]:
        values = self.value(key)
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ConversionError(
                f"{self.file.path}: expected a list of texts in tokenizer.ggml.{key}, and there is none"
            )
        return values

    def special(self, name: str) -> str | None:
        """The text of a special token whose id the file has; None if it has none."""
        index = self.value(f"{name}_token_id")
        if index is None:
            return None
        if not 0 <= int(index) < len(self.tokens):
            raise ConversionError(
                f"{self.file.path}: expected tokenizer.ggml.{name}_token_id below {len(self.tokens)}, got {index}"
            )
        return self.tokens[int(index)]

    def _unknown(self) -> str | None:
        unknown = self.special("unknown")
        return unknown or next((t for t, kind in zip(self.tokens, self.types, strict=True) if kind == _UNKNOWN), None)

    def _added_tokens(self) -> list[dict[str, Any]]:
        """The tokens that are found in a text before it is split into words."""
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": index, "content": token, **plain, "special": kind != _USER_DEFINED}
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]

    def _byte_level(self) -> dict[str, Any]:
        known = _BYTE_LEVEL[self.pre]
        merges = self._listed_merges()
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        words = [
            {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
            for expression in known.words
        ]
        return {
            "normalizer": {"type": "NFC"} if known.compose else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*words, byte_level]},
            "decoder": {**byte_level, "use_regex": True},
            "model": self._model(merges, unknown=None, byte_fallback=False, ignore_merges=known.ignore_merges),
        }

    def _listed_merges(self) -> list[list[str]]:
        merges = [merge.split(" ") for merge in self.listed("merges")]
        if wrong := next((merge for merge in merges if len(merge) != 2), None):
            raise ConversionError(f"{self.file.path}: expected merges of two tokens, got {' '.join(wrong)!r}")
        return merges

    def _sentencepiece(self) -> dict[str, Any]:
        merges = self._merges() if self.kind == "llama" else self._listed_merges()
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        prepend = {"type": "Prepend", "prepend": _SPACE}
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if self.add_space:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
        return {
            "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]} if self.add_space else replace,
            # The normalizer replaces all spaces, so this never splits a text; Gemma's own tokenizer.json has it too.
            "pre_tokenizer": None if self.add_space else split,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self._model(merges, unknown=self._unknown(), byte_fallback=True, ignore_merges=False),
        }

    def _merges(self) -> list[list[str]]:
        """The pairs of tokens that together are a token, the highest score first."""
        scores = self.value("scores")
        if scores is None or len(scores) != len(self.tokens):
            raise ConversionError(f"{self.file.path}: expected tokenizer.ggml.scores for {len(self.tokens)} tokens")
        ids = {
            token: index
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (_NORMAL, _USER_DEFINED)
        }
        found = []
        for token, index in ids.items():
            for cut in range(1, len(token)):
                left, right = ids.get(token[:cut]), ids.get(token[cut:])
                if left is not None and right is not None:
                    found.append((-float(scores[index]), index, left, right))
        return [[self.tokens[left], self.tokens[right]] for *_, left, right in sorted(found)]

    def _model(
        self, merges: list[list[str]], *, unknown: str | None, byte_fallback: bool, ignore_merges: bool
    ) -> dict[str, Any]:
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": byte_fallback,
            "byte_fallback": byte_fallback,
            "ignore_merges": ignore_merges,
            "vocab": {token: index for index, token in enumerate(self.tokens)},
            "merges": merges,
        }

    def _post_processor(self) -> dict[str, Any] | None:
        """Adds the BOS and EOS tokens around a text; None if there are none to add."""
        before = [self.bos] if self.add_bos else []
        after = [self.eos] if self.add_eos else []
        if not before and not after:
            return None

        def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
            def special(token: str | None) -> dict[str, Any]:
                return {"SpecialToken": {"id": token, "type_id": type_id}}

            text = {"Sequence": {"id": sequence, "type_id": type_id}}
            return [*map(special, before), text, *map(special, after)]

        return {
            "type": "TemplateProcessing",
            "single": around("A", 0),
            "pair": [*around("A", 0), *around("B", 1)],
            "special_tokens": {
                token: {"id": token, "ids": [self.tokens.index(token)], "tokens": [token]}
                for token in (*before, *after)
                if token is not None
            },
        }
