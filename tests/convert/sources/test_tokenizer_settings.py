# SPDX-License-Identifier: Apache-2.0
"""Tokenizer configurations from repositories: GenAI opens the converted ones, and transformers reads the same."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from flownpu.convert import convert
from flownpu.convert.errors import ConversionError
from flownpu.convert.sources.tokenizer_settings import readable_by_genai
from flownpu.generate.guidance import Guidance
from flownpu.generate.language_model import LanguageModel, Sampling
from flownpu.generate.tokenizer import Tokenizer

FIXTURE = Path(__file__).parents[2] / "fixtures" / "gemma3-topics"
GIVEN: dict[str, Any] = json.loads((FIXTURE / "tokenizer_config.json").read_text())
SETTINGS = "tokenizer_config.json"
TEXT = "The for statement: é 漢"
MESSAGES = [{"role": "user", "content": TEXT}]
TEMPLATE = GIVEN["chat_template"]
NAMED = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "{{ tools }}"}]
BOS = {"__type": "AddedToken", "content": "<bos>", "lstrip": False, "normalized": False, "rstrip": False}
KINDS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "an unknown class": {"tokenizer_class": "XTokenizer"},
    "a class that GenAI does not know": {"tokenizer_class": "Gemma3Tokenizer"},
    "a class of transformers 5": {"tokenizer_class": "TokenizersBackend"},
    "a bos_token that is an object": {"bos_token": BOS},
    "named templates": {"chat_template": NAMED},
    "no template": {"chat_template": None},
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "topics"
    convert(FIXTURE, folder)
    return folder


@pytest.fixture(scope="module")
def genai_model(converted: Path) -> Any:
    og = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    config = og.Config(str(converted))
    config.clear_providers()
    return og.Model(config)


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    for old in (folder / SETTINGS, *folder.rglob("*.jinja")):
        old.unlink(missing_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("kind", KINDS)
def test_converted_tokenizer_settings_give_same_tokens_to_all_readers(
    kind: str, converted: Path, genai_model: Any, tmp_path: Path
) -> None:
    import onnxruntime_genai as og

    files = {SETTINGS: json.dumps(GIVEN | KINDS[kind]).encode()}
    shutil.copyfile(FIXTURE / "tokenizer.json", tmp_path / "tokenizer.json")
    write(tmp_path, files)
    write(converted, readable_by_genai(files))
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path, converted))
    expected = before.encode(TEXT)
    assert after.encode(TEXT) == expected
    assert Tokenizer(converted).tokens_of_text(TEXT).tolist() == expected
    assert og.Tokenizer(genai_model).encode(TEXT).tolist() == before.encode(TEXT, add_special_tokens=False)
    if kind != "no template":
        texts = {one.apply_chat_template(MESSAGES, tokenize=False) for one in (before, after)}
        assert len(texts) == 1
        tools = [one.get_chat_template(tools=[{}]) for one in (before, after)]
        assert tools[0] == tools[1]


def test_readable_tokenizer_settings_are_kept() -> None:
    files = {SETTINGS: (FIXTURE / SETTINGS).read_bytes(), "tokenizer.json": b"{}"}
    assert readable_by_genai(files) == files


def test_tokens_of_tokenizer_class_are_kept() -> None:
    """The class is CohereTokenizer, which GenAI does not know; transformers' class has these tokens."""
    given = {"tokenizer_class": "CohereTokenizerFast", "eos_token": "<end>"}
    changed = json.loads(readable_by_genai({SETTINGS: json.dumps(given).encode()})[SETTINGS])
    assert changed == {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<BOS_TOKEN>", "eos_token": "<end>"}


def test_files_of_templates_count_before_named_ones() -> None:
    files = {SETTINGS: json.dumps({"chat_template": NAMED}).encode(), "chat_template.jinja": b"x"}
    assert set(readable_by_genai(files)) == set(files)
    assert readable_by_genai(files)["chat_template.jinja"] == b"x"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "expected a JSON object, got a list"),
        ("{", "not valid JSON"),
        ({"chat_template": [{"name": "../x", "template": "y"}]}, "names of letters and digits, got '../x'"),
        ({"chat_template": ["x"]}, "expected chat_template to be a text, or a list"),
    ],
)
def test_damaged_tokenizer_settings_are_refused(content: Any, words: str) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(ConversionError, match=words):
        readable_by_genai({SETTINGS: text.encode()})


def test_checkpoint_without_tokenizer_settings_answers_with_guidance(tmp_path: Path) -> None:
    """GenAI's guidance opens the tokenizer; so do its processors of images."""
    source, folder = tmp_path / "checkpoint", tmp_path / "model"
    shutil.copytree(FIXTURE, source, ignore=shutil.ignore_patterns(SETTINGS))
    convert(source, folder)
    model = LanguageModel(folder, provider="cpu")
    generator = model.generator(64, Sampling(temperature=0), guidance=Guidance("start: /[a-c]{3}/"))
    prompt = model.tokens_of_text("The")
    model.append(generator, prompt)
    assert len("".join(text for _, text in model.steps(generator))) == 3
