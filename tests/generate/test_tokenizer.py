# SPDX-License-Identifier: Apache-2.0
"""Tokens, bytes and texts are transformers', for the kinds of tokenizers that language models have."""

import json
import pydoc_data.topics
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from flownpu.errors import FlowNPUError
from flownpu.generate.tokenizer import Tokenizer
from tests.generate.tokenizers_of_kinds import KINDS, write_tokenizer

FIXTURE = Path(__file__).parents[1] / "fixtures" / "gemma3-topics"
TURN = "<start_of_turn>user\nhi<end_of_turn>\n"
CHARACTERS = "ab Ze19 \t\n\0\x01.,'\"<|>{}éßñ€漢字🙂👩‍👩‍👧▁Ġ\u0301\u2028\ufdd0\U000f0000"


@pytest.fixture(scope="module", params=[*KINDS, "the small model's"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param not in KINDS:
        return FIXTURE
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), request.param)


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def texts() -> list[str]:
    """Pages of Python's reference, and random characters of many kinds; always the same."""
    chosen = random.Random(0)
    pages = [page[:300] for page in list(pydoc_data.topics.topics.values())[12:40]]
    return [
        "",
        " ",
        "  two",
        *pages,
        *("".join(chosen.choices(CHARACTERS, k=chosen.randint(1, 40))) for _ in range(200)),
    ]


def test_text_tokens_equal_transformers(ours: Tokenizer, theirs: Any) -> None:
    for text in [*texts(), TURN, "<s>a<|turn|>b <|end|>  c</s><think>d</think>    e"]:
        assert ours.tokens_of_text(text).tolist() == theirs.encode(text), text
        without = theirs.encode(text, add_special_tokens=False)
        assert Tokenizer.tokens_of_marked(ours, text).tolist() == without, text


def test_token_stream_equals_transformers(ours: Tokenizer, theirs: Any) -> None:
    for text in [*texts(), "a</s>b<think> c </think>"]:
        tokens = ours.tokens_of_text(text).tolist()
        text_of = ours.text_stream()
        assert "".join(map(text_of, tokens)) == theirs.decode(tokens, skip_special_tokens=True), text


def test_bytes_of_tokens_joined_are_bytes_of_their_text(ours: Tokenizer, theirs: Any) -> None:
    for text in texts():
        tokens = ours.tokens_of_text(text).tolist()[1:]
        data = b"".join(ours.bytes_of(token, begins=place == 0) for place, token in enumerate(tokens))
        assert data.decode() == theirs.decode(tokens, skip_special_tokens=True), text


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return Tokenizer(FIXTURE)


@pytest.fixture(scope="module")
def byte(small: Tokenizer) -> Callable[[int], int]:
    def token(value: int) -> int:
        found = small.token(f"<0x{value:02X}>")
        assert found is not None
        return found

    return token


def test_incomplete_character_is_held_back(small: Tokenizer, byte: Callable[[int], int]) -> None:
    text_of = small.text_stream()
    assert [text_of(byte(value)) for value in "€é".encode()] == ["", "", "€", "", "é"]


def test_invalid_bytes_leave_text_around_them(small: Tokenizer, byte: Callable[[int], int]) -> None:
    text_of = small.text_stream()
    letter = small.token("s")
    assert letter is not None
    tokens = [byte(0xC3), byte(0xA9), byte(0xFF), letter, byte(0xE2), byte(0x82), letter]
    assert [text_of(token) for token in tokens] == ["", "é", "\ufffd", "s", "", "", "\ufffds"]


def test_token_text_and_bytes_follow_openai(small: Tokenizer, byte: Callable[[int], int]) -> None:
    assert small.text_of(byte(0xE2)) == "\\xe2"
    assert (small.text_of(1), small.bytes_of(1)) == ("<eos>", b"")
    assert (small.text_of(10**6), small.bytes_of(10**6)) == ("", b"")


@pytest.mark.parametrize(
    "more",
    [
        {"pad_token": "<think>"},
        {"pad_token": {"__type": "AddedToken", "content": "<think>"}},
        {"image_token": "<think>", "mask_token": "<absent>"},
        {"extra_special_tokens": {"mood_token": "<think>"}},
        {"extra_special_tokens": ["<think>"]},
        {"added_tokens_decoder": {"1006": {"content": "<think>", "special": True, "normalized": False}}},
        {"added_tokens_decoder": {}, "pad_token": "<think>"},
        {},
    ],
)
def test_token_special_by_configuration_is_special(more: dict[str, Any], tmp_path: Path) -> None:
    """As in transformers, except that a token without a number stays text."""
    write_tokenizer(tmp_path, KINDS[0])
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer(tmp_path)
    tokens = ours.tokens_of_text("a<think>b</think>c").tolist()
    assert tokens == theirs.encode("a<think>b</think>c")
    assert "".join(map(ours.text_stream(), tokens)) == theirs.decode(tokens, skip_special_tokens=True)
    assert max(ours.tokens_of_text("<absent>")) < 1009


def test_truncation_and_padding_of_file_are_ignored(tmp_path: Path) -> None:
    shutil.copytree(FIXTURE, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((FIXTURE / "tokenizer.json").read_text())
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
    content |= {"truncation": cut, "padding": {**pad, "pad_token": "<pad>"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    for text in ("a", "Some words, and then some more."):
        assert Tokenizer(tmp_path).tokens_of_text(text).tolist() == Tokenizer(FIXTURE).tokens_of_text(text).tolist()


@pytest.mark.parametrize(("content", "words"), [(None, "holds no tokenizer.json"), ("{}", "cannot be read")])
def test_folder_without_tokenizer_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(FlowNPUError, match=words):
        Tokenizer(tmp_path)
