# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers of the kinds that language models have, trained on Python's reference."""

import functools
import json
import pydoc_data.topics
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

UNKNOWN = "<unk>"
SPECIAL = (UNKNOWN, "<s>", "</s>", "<|turn|>", "<|end|>")
# Not special, as in some repositories; the last is ordinary text that is one token.
OTHERS = ("<\uff5cUser\uff5c>", "<think>", "</think>", "    ")
TEXTS = list(pydoc_data.topics.topics.values())[:12]
KINDS = ("byte-level BPE", "BPE with bytes and a space before", "Unigram")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn|><\uff5cUser\uff5c>{{ message['role'] }}\n"
    "{{ message['content'] }}<|end|>{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n<think>{% endif %}"
)


@functools.cache
def trained(kind: str) -> str:
    """The tokenizer.json of a kind, as text."""
    tokenizer = {KINDS[0]: _byte_level, KINDS[1]: _with_bytes, KINDS[2]: _unigram}[kind]()
    # Phi-3's end of a turn takes the spaces behind it.
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL[:-1]])
    tokenizer.add_special_tokens([AddedToken(SPECIAL[-1], special=True, normalized=False, rstrip=True)])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in OTHERS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return str(tokenizer.to_str())


def write_tokenizer(folder: Path, kind: str) -> Path:
    """Writes a kind's files, with a chat template."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "chat_template": TEMPLATE}
    (folder / "tokenizer.json").write_text(trained(kind), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def renamed(text: str, names: dict[str, str]) -> str:
    """A tokenizer.json whose added tokens have other names."""
    content: dict[str, Any] = json.loads(text)
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, dict):
        content["model"]["vocab"] = {names.get(name, name): number for name, number in vocabulary.items()}
    else:
        content["model"]["vocab"] = [[names.get(name, name), score] for name, score in vocabulary]
    if content["model"].get("unk_token"):
        content["model"]["unk_token"] = names.get("<unk>", "<unk>")
    content["post_processor"] = None
    return json.dumps(content)


def _byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it; control tokens are not in the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet))
    return tokenizer


def _with_bytes() -> Tokenizer:
    """As Llama 2, Phi-3 and Mistral have it: a text begins with a space, and rare characters are bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN, byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    draft = Tokenizer(models.BPE())
    draft.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[A-Za-z]+|[^A-Za-z]"), "isolated")
    texts = [text.replace(" ", "▁") for text in TEXTS]
    draft.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=700, special_tokens=list(SPECIAL)))
    model = json.loads(draft.to_str())["model"]
    words = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys([*words, *model["vocab"]]))}
    tokenizer.model = models.BPE(
        vocab=vocabulary,
        merges=[tuple(merge) for merge in model["merges"]],
        unk_token=UNKNOWN,
        byte_fallback=True,
        fuse_unk=True,
    )
    return tokenizer


def _unigram() -> Tokenizer:
    """As T5 has it: to the model a control token is a piece like others, of the highest score."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        TEXTS, trainers.UnigramTrainer(vocab_size=600, special_tokens=list(SPECIAL), unk_token=UNKNOWN)
    )
    return tokenizer
