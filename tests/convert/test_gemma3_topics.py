# SPDX-License-Identifier: Apache-2.0
"""The small trained model: transformers and GenAI give the same tokens, and Q4NX costs it little perplexity."""

import copy
import json
import math
import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Gemma3ForCausalLM

from flownpu.convert import convert
from flownpu.generate.language_model import LanguageModel, Sampling, Timing
from flownpu.ops import q4nx

FOLDER = Path(__file__).parents[1] / "fixtures" / "gemma3-topics"
HELD_OUT_TOKENS = 1024


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def genai_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    og = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    folder = tmp_path_factory.mktemp("model") / "gemma3-topics"
    convert(FOLDER, folder)
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["decoder"]["session_options"]["provider_options"] = []  # ORT's own CPU provider
    (folder / "genai_config.json").write_text(json.dumps(config))
    return og.Tokenizer(og.Model(str(folder)))


@pytest.fixture(scope="module")
def model() -> Gemma3ForCausalLM:
    return Gemma3ForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation="eager")


def perplexity(model: Gemma3ForCausalLM, ids: list[int]) -> float:
    """Perplexity over pieces of 512 tokens, eight times the window of the local layers."""
    batch = torch.tensor(ids).reshape(-1, 512)
    with torch.no_grad():
        logits = model(batch).logits
    return math.exp(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()))


def test_checkpoint_is_below_10_megabytes() -> None:
    assert sum(path.stat().st_size for path in FOLDER.glob("*.safetensors")) <= 10e6


def test_transformers_and_genai_give_same_tokens(tokenizer: Any, genai_tokenizer: Any) -> None:
    texts = [paragraph for page in pydoc_data.topics.topics.values() for paragraph in page.split("\n\n")]
    texts += ["  leading", "trailing  ", "a\tb", "naïve café 你好 🙂 \x01", "x\n\n\n   y", "1234 5678", "«quoted» ▁"]
    texts.append("<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n")
    for text in texts:
        expected = tokenizer.encode(text, add_special_tokens=False)
        assert genai_tokenizer.encode(text).tolist() == expected, text
        assert genai_tokenizer.decode(np.array(expected, np.int32)) == tokenizer.decode(
            expected, skip_special_tokens=True
        )


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_chat_template_equals_transformers(system: list[dict[str, str]], tokenizer: Any, genai_tokenizer: Any) -> None:
    messages = [
        *system,
        {"role": "user", "content": "Hi "},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "What is assert?"},
    ]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert genai_tokenizer.apply_chat_template(json.dumps(messages), add_generation_prompt=True) == expected
    assert expected.endswith("<start_of_turn>user\nWhat is assert?<end_of_turn>\n<start_of_turn>model\n")


def test_q4nx_perplexity_is_within_3_percent_of_bf16(model: Gemma3ForCausalLM, tokenizer: Any) -> None:
    ids = tokenizer.encode((FOLDER / "held_out.txt").read_text())[:HELD_OUT_TOKENS]
    converted = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in converted.named_parameters():
            if name.endswith(("_proj.weight", "embed_tokens.weight")):
                quantized = q4nx.quantize(parameter.numpy())
                parameter.copy_(torch.from_numpy(q4nx.dequantize_codes(quantized)))
    bf16, four_bits = perplexity(model, ids), perplexity(converted, ids)
    assert four_bits <= 1.03 * bf16
    # A uniform guess has a perplexity of 4096, the vocabulary's size; one by tokens' frequencies alone, some hundreds.
    assert bf16 < 200


def test_answers_end_and_are_sentences_of_pages(converted: Callable[..., Path]) -> None:
    """The model writes the reference's English in the chat's form. It is too small to keep to the question."""
    model, timing = LanguageModel(converted()), Timing()
    prompt = model.tokens_of_messages([{"role": "user", "content": "What is the assert statement?"}])
    words = "".join(model.complete(prompt, 200, Sampling(temperature=0), timing)).split()
    assert timing.new_tokens < 200
    pages = " ".join(" ".join(pydoc_data.topics.topics.values()).split())
    quadruples = [" ".join(words[i : i + 4]) for i in range(len(words) - 3)]
    assert len(quadruples) >= 5
    # Four words whose pairs alone are likely are hardly ever in the pages as a sequence of four.
    assert sum(quadruple in pages for quadruple in quadruples) > len(quadruples) / 2
