# SPDX-License-Identifier: Apache-2.0
"""Tokenizers whose unused merges a conversion leaves out give the tokens of the original, by Hugging Face's library."""

import itertools
import json
import pydoc_data.topics
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from flownpu.convert.errors import ConversionError
from flownpu.convert.quick_tokenizer import quick_tokenizer

GEMMA: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "gemma3-topics" / "tokenizer.json").read_text()
)


def all_ways() -> dict[str, Any]:
    """The small model's tokenizer in the form of Gemma's, with each way to cut each token in two, in its order."""
    vocabulary = GEMMA["model"]["vocab"]
    made = ["".join(merge) for merge in GEMMA["model"]["merges"]]
    merges = [
        [token[:cut], token[cut:]]
        for token in made
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    return GEMMA | {"model": GEMMA["model"] | {"merges": merges}}


def bpe(merges: list[list[str]], **settings: Any) -> dict[str, Any]:
    """A tokenizer of these merges, with the tokens that they are of."""
    tokens = dict.fromkeys(token for left, right in merges for token in (*left, *right, left, right, left + right))
    model = {"type": "BPE", "vocab": {token: number for number, token in enumerate(tokens)}, "merges": merges}
    return {"version": "1.0", "added_tokens": [], "model": model | settings}


def quick(tokenizer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(quick_tokenizer(json.dumps(tokenizer).encode()))
    return found


def tokens(tokenizer: dict[str, Any], texts: list[str]) -> list[list[int]]:
    return [one.ids for one in Tokenizer.from_str(json.dumps(tokenizer)).encode_batch(texts)]


def texts_of_all_kinds() -> list[str]:
    """Prose with code, each of its words, runs of a character, control tokens, and characters of all of Unicode."""
    chance = random.Random(1)
    prose = list(pydoc_data.topics.topics.values())
    words = sorted({word for page in prose for word in page.split()})
    runs = [character * length for character in " \n\ta-=.#é🙂" for length in range(1, 70)]
    codes = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]  # without surrogates
    any_characters = ["".join(map(chr, chance.choices(codes, k=40))) for _ in range(500)]
    pieces = [*(one["content"] for one in GEMMA["added_tokens"]), *runs, *any_characters, *words]
    return prose + words + runs + any_characters + ["".join(chance.choices(pieces, k=12)) for _ in range(2000)]


def test_tokenizer_with_each_way_to_cut_tokens_gives_same_tokens_without_unused_merges() -> None:
    given, texts = all_ways(), texts_of_all_kinds()
    changed = quick(given)
    assert tokens(changed, texts) == tokens(given, texts)
    # Training adds a token by one merge, so no more are of use.
    assert len(changed["model"]["merges"]) <= len(GEMMA["model"]["merges"]) < len(given["model"]["merges"]) / 1.5


@pytest.mark.parametrize("seed", range(40))
def test_merges_in_any_order_give_same_tokens_of_each_short_text(seed: int) -> None:
    chance = random.Random(seed)
    pieces, merges = ["a", "b", "c"], set[tuple[str, str]]()
    while len(merges) < 25:
        left, right = chance.choices(pieces, k=2)
        if len(left + right) <= 6:
            merges.add((left, right))
            pieces.append(left + right)
    given = bpe([list(merge) for merge in chance.sample(sorted(merges), len(merges))])
    texts = ["".join(text) for length in range(1, 8) for text in itertools.product("abc", repeat=length)]
    assert tokens(quick(given), texts) == tokens(given, texts)


def test_last_of_equal_merges_counts_as_in_tokenizers() -> None:
    given = bpe([["a", "b"], ["b", "c"], ["ab", "c"], ["a", "bc"], ["a", "b"]])
    texts = ["abc", "ab", "bc"]
    assert tokens(quick(given), texts) == tokens(given, texts)


@pytest.mark.parametrize(
    ("merges", "settings"),
    [
        ([["a", "b"], ["b", "c"], ["ab", "c"], ["a", "bc"]], {"dropout": 0.5}),
        ([["a", "b"], ["b", "c"], ["ab", "c"], ["a", "bc"]], {"end_of_word_suffix": "c"}),
        ([["<0xC3>", "<0xA9>"], ["a", "<0xC3><0xA9>"], ["a<0xC3>", "<0xA9>"]], {"byte_fallback": True}),
        ([["<unk>", "a"], ["<unk>a", "a"], ["<unk>", "aa"]], {"unk_token": "<unk>"}),
    ],
)
def test_merges_that_do_not_begin_with_characters_are_kept(merges: list[list[str]], settings: dict[str, Any]) -> None:
    changed = quick(bpe(merges, **settings))
    assert [merge.split(" ") for merge in changed["model"]["merges"]] == merges


@pytest.mark.parametrize("merges", [[["a", " "], ["a ", "b"]], [["#version", "s"]]])
def test_merges_that_texts_cannot_write_are_read_again(merges: list[list[str]]) -> None:
    changed = quick(bpe(merges))
    read = json.loads(Tokenizer.from_str(json.dumps(changed)).to_str())
    assert read["model"]["merges"] == merges


def test_other_models_are_kept() -> None:
    words = b'{"model": {"type": "WordLevel", "vocab": {"b": 0, "a": 1}, "unk_token": "a"}}'
    assert quick_tokenizer(words) == words


def test_damaged_tokenizer_is_refused() -> None:
    with pytest.raises(ConversionError, match=r"tokenizer\.json is not valid JSON"):
        quick_tokenizer(b"{")
