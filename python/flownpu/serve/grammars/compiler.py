# SPDX-License-Identifier: Apache-2.0
"""Compiles grammars with GenAI's guidance, without a model; a model's worker can follow the accepted ones."""

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flownpu.errors import FlowNPUError, require
from flownpu.generate.answer_format import MARKS
from flownpu.generate.guidance import Guidance, rehearse
from flownpu.generate.speculative.choice import ChoiceModel
from flownpu.generate.tokenizer import byte_level_bytes
from flownpu.serve.grammars.form import AnswerForm, write_rules
from flownpu.serve.grammars.marked import write_marked_rules
from flownpu.serve.grammars.schemas import enforce

END_TOKEN = 256
VOCABULARY = END_TOKEN + 1 + len(MARKS)
"""Tokens of the tokenizer that stands for a model's: one for each byte, the one that ends a text, and special marks."""
TRIED = 16
"""Tokens that are written by way of trial: up to an object's first property, where a grammar has most alternatives."""
CONTEXT = 4096
"""Most tokens of a text: GenAI wants to know."""
REMEMBERED = 1024
"""Verdicts on fragments of schemas, such as a `pattern`, that requests repeat."""


@dataclass(frozen=True)
class Grammar:
    """The grammar that an answer's text must follow."""

    guidance: Guidance | None = None
    left_out: tuple[str, ...] = ()
    """Places of schemas' keywords that are not enforced: JSON pointers, behind the function's name if it is one's."""


class Compiler:
    """GenAI's guidance with a tokenizer of bytes.

    Raises:
        MissingDependencyError: onnxruntime_genai is not installed.
    """

    def __init__(self) -> None:
        self._genai = require("onnxruntime_genai", extra="genai", purpose="Structured answers")
        with tempfile.TemporaryDirectory(prefix="flownpu-") as folder:
            _write_folder(Path(folder))
            self._choices = ChoiceModel(self._genai, Path(folder), VOCABULARY)
            self._remembered = functools.lru_cache(REMEMBERED)(self._refusal)
            self.refusal("start: /a/\n")  # reads the tokenizer

    def compile(self, form: AnswerForm) -> Grammar:
        """The grammar of a form.

        Raises:
            FlowNPUError: no answer can have the form, or guidance cannot follow it.
        """
        left_out: list[str] = []
        written: dict[int, str] = {}

        def add(schema: dict[str, Any], name: str, what: str) -> None:
            try:
                enforced = enforce(schema, self.refusal)
            except FlowNPUError as error:
                raise FlowNPUError(f"{what}: {error}") from error
            written[id(schema)] = enforced.text
            left_out.extend(name + place for place in enforced.left_out)

        if form.schema is not None:
            add(form.schema, "", "the schema of the answer")
        for function in form.functions:
            add(function.schema, function.name, f"the parameters of the tool {function.name}")
        if form.marks is None:
            rules = write_rules(form, lambda schema: written[id(schema)])
        else:
            rules, more = write_marked_rules(form, form.marks, lambda schema: written[id(schema)])
            left_out.extend(more)
        # A schema alone was already tried by `enforce`.
        if form.functions and (reason := self.refusal(rules)):
            raise FlowNPUError(reason)
        return Grammar(Guidance(rules), tuple(left_out))

    def refusal(self, rules: str) -> str:
        """Why guidance does not take a grammar, or cannot go on with it after some tokens; empty if it does."""
        return self._remembered(rules) if len(rules) < REMEMBERED else self._refusal(rules)

    def _refusal(self, rules: str) -> str:
        try:
            written = rehearse(self._genai, self._choices, Guidance(rules), TRIED)
        except FlowNPUError as error:
            return str(error)
        return "" if written != [END_TOKEN] else "no text follows the schema"


def _write_folder(folder: Path) -> None:
    """Writes a folder for `ChoiceModel`: a byte-level tokenizer with a token for each byte and no merges."""
    settings: dict[str, Any] = {"vocab_size": VOCABULARY, "context_length": CONTEXT, "eos_token_id": END_TOKEN}
    settings |= {"bos_token_id": END_TOKEN, "pad_token_id": END_TOKEN, "type": "gemma3_text"}
    sizes = dict.fromkeys(("hidden_size", "num_attention_heads", "num_key_value_heads", "head_size"), 1)
    names = {"inputs": {"input_ids": "input_ids"}, "outputs": {"logits": "logits"}}
    search = {"max_length": CONTEXT}
    special = {"<end>": END_TOKEN} | {mark: END_TOKEN + 1 + place for place, mark in enumerate(MARKS)}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": token, "content": text, "special": True, **plain} for text, token in special.items()]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": byte_level_bytes() | special, "merges": []},
    }
    files = {
        "genai_config.json": {"model": settings | {"decoder": sizes | names}, "search": search},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<end>"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
