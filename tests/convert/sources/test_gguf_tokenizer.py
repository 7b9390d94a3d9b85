# SPDX-License-Identifier: Apache-2.0
"""Converted tokenizers of GGUF files give the original tokenizers' tokens, in transformers and in GenAI."""

import json
import pydoc_data.topics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from flownpu.convert import ConversionError, convert
from flownpu.generate.chat_template import ChatTemplate
from flownpu.generate.tokenizer import Tokenizer as ModelTokenizer
from tests.convert.conftest import write_tiny
from tests.convert.sources.gguf_files import write_gguf

FIXTURE = Path(__file__).parents[2] / "fixtures" / "gemma3-topics"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
PAGES = list(pydoc_data.topics.topics.values())
# Short texts only: `sentencepiece` below takes time with the square of a text's length.
TEXTS = [paragraph for page in PAGES for paragraph in page.split("\n\n") if len(paragraph) < 200][:60]
TEXTS += [
    "  leading",
    "trailing  ",
    "a\tb",
    "naïve café 你好 🙂 \x01",
    "x\n\n\n   y",
    "1234 5678",
    "«quoted» # 1",
    "I'LL we've",
]
# The regular expressions that split words in the published tokenizer.json of Llama 3 and of Qwen.
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_WORDS = LLAMA3_WORDS.replace("{1,3}", "")

Edit = Callable[[gguf.GGUFWriter], None]
ONE_LAYER: dict[str, dict[str, Any]] = {
    "gemma3_text": {"num_hidden_layers": 1, "layer_types": ["full_attention"], "query_pre_attn_scalar": 16},
    "llama": {"num_hidden_layers": 1},
    "qwen3": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
}


# Those of Tekken (Mistral NeMo) and of GPT-4o (Phi-4-mini).
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDINGS}|\p{{N}}{{1,3}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(words: str, *, compose: bool) -> Tokenizer:
    """A BPE tokenizer of 600 tokens over bytes, and two special ones, trained on Python's reference.

    `words`: an expression that splits texts; "": GPT-2's words, which the library has; "digits": these, and digits by
    themselves, as SmolLM has them.
    """
    tokenizer = Tokenizer(models.BPE())
    if compose:
        tokenizer.normalizer = normalizers.NFC()
    is_gpt2 = words in ("", "digits")
    cut = [] if is_gpt2 else [pre_tokenizers.Split(Regex(words), "isolated")]
    digits = [pre_tokenizers.Digits(individual_digits=True)] if words == "digits" else []
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=is_gpt2)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cut, *digits, letters])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(PAGES, trainer)
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    return tokenizer


def edit_byte_level(tokenizer: Tokenizer, pre: str) -> Edit:
    def edit(writer: gguf.GGUFWriter) -> None:
        tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([CONTROL if token.startswith("<|") else NORMAL for token in tokens])
        writer.add_token_merges([" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]])
        writer.add_bos_token_id(tokens.index("<|begin|>"))
        writer.add_eos_token_id(tokens.index("<|end|>"))
        writer.add_chat_template(TEMPLATE)

    return edit


# A text that the vocabulary of kind gemma4 has at its end again, as files of Gemma 4 have some.
TWICE = "#"


def sentencepiece_vocabulary() -> list[tuple[str, int, float]]:
    """Text, type and score of each token of the small trained model; one is user-defined, like Gemma's newlines."""
    stored = json.loads((FIXTURE / "tokenizer.json").read_text())
    ids = stored["model"]["vocab"]
    merged = {left + right: -float(rank) for rank, (left, right) in enumerate(stored["model"]["merges"])}
    special = {token["content"] for token in stored["added_tokens"]}

    named = {"<unk>": UNKNOWN, "\n\n": USER_DEFINED}

    def kind(token: str) -> int:
        if token in special:
            return named.get(token, CONTROL)
        return BYTE if token.startswith("<0x") else named.get(token, NORMAL)

    return [(token, kind(token), merged.get(token, -1e4)) for token in sorted(ids, key=lambda token: ids[token])]


def edit_sentencepiece(kind: str, *, add_space: bool) -> Edit:
    def edit(writer: gguf.GGUFWriter) -> None:
        tokens, types, scores = map(list, zip(*sentencepiece_vocabulary(), strict=True))
        if kind == "gemma4":
            merges = json.loads((FIXTURE / "tokenizer.json").read_text())["model"]["merges"]
            writer.add_token_merges([" ".join(merge) for merge in merges])
            # Scores of the other order: merges count.
            tokens, types, scores = [*tokens, TWICE], [*types, NORMAL], [float(i) for i in range(len(tokens) + 1)]
        writer.add_tokenizer_model(kind)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_scores(scores)
        for add, token in (
            (writer.add_pad_token_id, "<pad>"),
            (writer.add_eos_token_id, "<eos>"),
            (writer.add_bos_token_id, "<bos>"),
            (writer.add_unk_token_id, "<unk>"),
        ):
            add(tokens.index(token))
        writer.add_add_space_prefix(add_space)
        writer.add_chat_template(TEMPLATE)

    return edit


def sentencepiece(text: str) -> list[int]:
    """SentencePiece's BPE: merges, until none is left, the neighbours whose token scores highest, leftmost first."""
    vocabulary = {token: (i, kind, score) for i, (token, kind, score) in enumerate(sentencepiece_vocabulary())}
    scores = {token: score for token, (_, kind, score) in vocabulary.items() if kind in (NORMAL, USER_DEFINED)}
    user_defined = next(token for token, (_, kind, _) in vocabulary.items() if kind == USER_DEFINED)
    ids = []
    for number, part in enumerate(text.replace(" ", "▁").split(user_defined)):
        if number:
            ids.append(vocabulary[user_defined][0])
        pieces = list(part)
        while pairs := [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]:
            _, i = min(pairs)
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
        for piece in pieces:
            known = [piece] if piece in vocabulary else [f"<0x{byte:02X}>" for byte in piece.encode()]
            ids += [vocabulary[token][0] for token in known]
    return ids


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, Any]]:
    """Converts a GGUF file with a tokenizer; returns the model's tokenizer in transformers, and ours."""

    def convert_with(family: str, vocabulary_size: int, edit: Edit) -> tuple[Any, Any]:
        folder = tmp_path_factory.mktemp("gguf")
        tiny = write_tiny(family, folder / "checkpoint", vocab_size=vocabulary_size, **ONE_LAYER[family])
        write_gguf(folder / "model.gguf", tiny.reference, tokenizer=edit)
        convert(folder / "model.gguf", folder / "model")
        return transformers.AutoTokenizer.from_pretrained(folder / "model"), ModelTokenizer(folder / "model")

    return convert_with


@pytest.mark.parametrize(
    ("family", "pre", "words", "bos"),
    [
        ("llama", "llama-bpe", LLAMA3_WORDS, True),
        ("llama", "dbrx", LLAMA3_WORDS, False),
        ("qwen3", "qwen2", QWEN_WORDS, False),
        ("llama", "olmo", "", False),
        ("llama", "smollm", "digits", False),
        ("llama", "tekken", TEKKEN_WORDS, True),
        ("llama", "gpt-4o", GPT4O_WORDS, False),
    ],
)
def test_byte_level_tokenizer_is_converted(
    family: str, pre: str, words: str, bos: bool, converted: Callable[..., tuple[Any, Any]]
) -> None:
    original = byte_level(words, compose=pre == "qwen2")
    tokenizer, ours = converted(family, original.get_vocab_size(), edit_byte_level(original, pre))
    for text in TEXTS:
        expected = original.encode(text).ids
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
        assert ours.tokens_of_marked(text).tolist() == expected, text
        assert "".join(map(ours.text_stream(), expected)) == original.decode(expected)
    begin = [original.token_to_id("<|begin|>")] if bos else []
    assert tokenizer.encode("x<|end|>") == [*begin, *original.encode("x").ids, original.token_to_id("<|end|>")]
    messages = [{"role": "user", "content": "Hi "}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|begin|>[user] Hi \n"


def test_named_templates_equal_transformers(tmp_path: Path) -> None:
    original = byte_level(QWEN_WORDS, compose=True)

    def edit(writer: gguf.GGUFWriter) -> None:
        edit_byte_level(original, "qwen2")(writer)
        writer.kv_data[0].pop("tokenizer.chat_template")
        named = {"default": "{{ messages[0].content }}", "tool_use": "tools: {{ tools[0].function.name }}"}
        writer.add_chat_template([{"name": name, "template": text} for name, text in named.items()])

    tiny = write_tiny("qwen3", tmp_path / "checkpoint", vocab_size=original.get_vocab_size(), **ONE_LAYER["qwen3"])
    write_gguf(tmp_path / "model.gguf", tiny.reference, tokenizer=edit)
    convert(tmp_path / "model.gguf", tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    own = ChatTemplate.of(tmp_path / "model")
    messages, tools = [{"role": "user", "content": "Hi"}], [{"type": "function", "function": {"name": "f"}}]
    for given, expected in ((None, "Hi"), (tools, "tools: f")):
        assert tokenizer.apply_chat_template(messages, given, tokenize=False) == expected
        assert own.render(messages, given or ()) == expected


@pytest.mark.parametrize(
    ("family", "kind", "add_space"),
    [("gemma3_text", "llama", False), ("gemma3_text", "gemma4", False), ("llama", "llama", True)],
)
def test_sentencepiece_tokenizer_is_converted(
    family: str, kind: str, add_space: bool, converted: Callable[..., tuple[Any, Any]]
) -> None:
    size = len(sentencepiece_vocabulary())
    tokenizer, ours = converted(family, size + 1, edit_sentencepiece(kind, add_space=add_space))
    later = {sentencepiece(TWICE)[0]: size} if kind == "gemma4" else {}
    for text in TEXTS:
        expected = [later.get(token, token) for token in sentencepiece(" " * add_space + text)]
        # transformers' LlamaTokenizer treats leading spaces in its own way, whatever tokenizer.json says.
        if not (add_space and text.startswith(" ")):
            assert tokenizer.encode(text, add_special_tokens=False) == expected, text
            assert tokenizer.decode(expected) == text
        # The space that tokenizer.json puts before a text also follows added tokens, here newlines.
        if not (add_space and "\n\n" in text):
            assert ours.tokens_of_marked(text).tolist() == expected, text
        assert "".join(map(ours.text_stream(), expected)) == text
    assert tokenizer.encode("<eos>")[0] == tokenizer.bos_token_id
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.unk_token) == ("<pad>", "<eos>", "<unk>")


def edit_other(**changes: Any) -> Edit:
    """Writes the tokenizer of bytes with some of its metadata changed or, if None is given, left out."""

    def edit(writer: gguf.GGUFWriter) -> None:
        edit_byte_level(byte_level(LLAMA3_WORDS, compose=False), "llama-bpe")(writer)
        pairs = writer.kv_data[0]
        for key, value in changes.items():
            name = f"tokenizer.ggml.{key}"
            if value is None:
                del pairs[name]
            else:
                pairs[name].value = value

    return edit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "bert"},
            'expected a tokenizer of the kind gpt2, llama or gemma4 in tokenizer.ggml.model, got "bert"',
        ),
        ({"model": None}, 'got "none"; convert the checkpoint'),
        ({"pre": "viking"}, 'expected tokenizer.ggml.pre to be one of llama-bpe, .*, got "viking"'),
        ({"tokens": None}, "expected a list of texts in tokenizer.ggml.tokens"),
        ({"tokens": ["a", "b", "a"]}, "expected tokens that differ"),
        ({"tokens": ["a", "b"]}, "expected 2 token types, got 602"),
        (
            {"tokens": [str(i) for i in range(700)]},
            "expected at most 602 tokens, the rows of token_embd.weight, got 700",
        ),
        ({"merges": None}, "expected a list of texts in tokenizer.ggml.merges"),
        ({"merges": ["a b c"]}, "expected merges of two tokens, got 'a b c'"),
        ({"bos_token_id": 9999}, "bos_token_id below 602, got 9999"),
        ({"model": "llama"}, "expected tokenizer.ggml.scores for 602 tokens"),
    ],
)
def test_unfit_gguf_tokenizer_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny = write_tiny("llama", tmp_path / "checkpoint", vocab_size=602, num_hidden_layers=1)
    write_gguf(tmp_path / "model.gguf", tiny.reference, tokenizer=edit_other(**changes))
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path / "model.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()
