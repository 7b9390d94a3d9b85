# SPDX-License-Identifier: Apache-2.0
"""ORT GenAI loads what conversion writes, with every type of KV cache.

The models run on ORT's own CPU provider (its name replaces ours in genai_config.json), so these tests check the files,
and not FlowNPU's kernels.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flownpu.convert import convert

og = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")

PROMPT = [2, *range(20, 50)]


def generator_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "genai_config.json").read_text())
    return config


def on_cpu(folder: Path) -> Any:
    config = generator_config(folder)
    config["model"]["decoder"]["session_options"]["provider_options"] = []
    (folder / "genai_config.json").write_text(json.dumps(config))
    return og.Model(str(folder))


def generate(model: Any, prompts: list[list[int]] | None = None, tokens: int = 40, **options: Any) -> list[list[int]]:
    prompts = prompts or [PROMPT]
    longest = max(map(len, prompts))
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(
        do_sample=False, batch_size=len(prompts), max_length=longest + tokens, min_length=longest + tokens, **options
    )
    generator = og.Generator(model, parameters)
    generator.append_tokens(np.array([p + [0] * (longest - len(p)) for p in prompts], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [generator.get_sequence(i)[longest:].tolist() for i in range(len(prompts))]


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "llama", "qwen3"])
def test_greedy_tokens_equal_transformers(family: str, tiny_models: Callable[[str], Any], tmp_path: Path) -> None:
    tiny = tiny_models(family)
    convert(tiny.folder, tmp_path / "model", kv_dtype="fp32")
    tokens = generate(on_cpu(tmp_path / "model"), past_present_share_buffer=True)[0]
    prompt = torch.tensor([PROMPT])
    expected = tiny.reference.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=40, min_new_tokens=40
    )
    assert tokens == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp16", "fp32", "int8"])
def test_cache_types_support_genai_operations(kv_dtype: str, tiny_models: Callable[[str], Any], tmp_path: Path) -> None:
    """With shared and growing caches, prompts in chunks, a batch of different lengths, beams, and rewinding."""
    convert(tiny_models("gemma3_text").folder, tmp_path / "model", kv_dtype=kv_dtype)
    model = on_cpu(tmp_path / "model")
    tokens = generate(model, past_present_share_buffer=True)
    assert generate(model, past_present_share_buffer=False) == tokens
    assert generate(model, past_present_share_buffer=True, chunk_size=7) == tokens
    assert generate(model, [PROMPT, PROMPT[:5], PROMPT], past_present_share_buffer=True)[0] == tokens[0]
    assert len(generate(model, num_beams=3, past_present_share_buffer=True)[0]) == 40
    for share in (True, False):
        parameters = og.GeneratorParams(model)
        parameters.set_search_options(do_sample=False, max_length=128, past_present_share_buffer=share)
        generator = og.Generator(model, parameters)
        generator.append_tokens(np.array([PROMPT + tokens[0][:30]], np.int32))
        generator.rewind_to(len(PROMPT) + 10)
        generator.append_tokens(np.array([tokens[0][10:20]], np.int32))
        for expected in tokens[0][20:25]:
            generator.generate_next_token()
            assert generator.get_next_tokens()[0] == expected


def test_sliding_window_cache_gives_same_tokens(tiny_models: Callable[[str], Any], tmp_path: Path) -> None:
    tiny = tiny_models("gemma3_text")
    convert(tiny.folder, tmp_path / "full")
    convert(tiny.folder, tmp_path / "window", sliding_window_cache=True)
    window = generator_config(tmp_path / "window")["model"]["decoder"]["sliding_window"]
    assert window == {"window_size": 8, "slide_key_value_cache": False, "slide_inputs": False, "layers": [0, 2]}
    assert "sliding_window" not in generator_config(tmp_path / "full")["model"]["decoder"]
    full, windowed = on_cpu(tmp_path / "full"), on_cpu(tmp_path / "window")
    # 31 + 60 tokens are far more than the window of 8 and GenAI's 16 positions of slack.
    tokens = generate(full, tokens=60, past_present_share_buffer=True)
    assert generate(windowed, tokens=60, past_present_share_buffer=True) == tokens
    assert generate(windowed, tokens=60, past_present_share_buffer=True, chunk_size=5) == tokens


def test_genai_configuration_has_search_settings(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "top_k": 64, "top_p": 0.95, "eos_token_id": [1, 106], "pad_token_id": None})
    )
    convert(checkpoint, tmp_path / "model")
    config = generator_config(tmp_path / "model")
    model, decoder = config["model"], config["model"]["decoder"]
    assert (model["type"], model["vocab_size"], model["context_length"]) == ("gemma3_text", 300, 128)
    assert (model["bos_token_id"], model["eos_token_id"], model["pad_token_id"]) == (2, [1, 106], 0)
    assert decoder["session_options"]["provider_options"] == [{"FlowNPUExecutionProvider": {}}]
    assert (decoder["num_attention_heads"], decoder["num_key_value_heads"], decoder["head_size"]) == (6, 2, 16)
    assert config["search"]["do_sample"] is True
    assert (config["search"]["top_k"], config["search"]["top_p"]) == (64, 0.95)
    assert config["search"]["past_present_share_buffer"] is True
    assert config["search"]["max_length"] == 128
