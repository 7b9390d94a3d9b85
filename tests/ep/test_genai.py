# SPDX-License-Identifier: Apache-2.0
"""ORT GenAI, which has its own copy of ONNX Runtime, uses the same library."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.ep.conftest import parse

pytest.importorskip("onnxruntime_genai", reason="needs the extra genai")

VOCABULARY = 16
END = 0


@pytest.fixture
def scores() -> Any:
    """A bigram model: row i scores the tokens after token i. The end never wins."""
    scores = np.random.default_rng(0).standard_normal((VOCABULARY, VOCABULARY)).astype(np.float32)
    scores[:, END] = -9
    return scores


def write_model(folder: Path, scores: Any, options: dict[str, str]) -> onnx.ModelProto:
    model = parse(
        f"""g (int64[batch,sequence] input_ids, float[{VOCABULARY},{VOCABULARY}] scores)
            => (float[batch,sequence,{VOCABULARY}] logits) {{ a = Gather(scores, input_ids)  logits = Add(a, a) }}"""
    )
    del model.graph.input[1]
    model.graph.initializer.append(onnx.numpy_helper.from_array(scores, "scores"))
    onnx.save(model, folder / "model.onnx")
    session_options = {
        "session.disable_cpu_ep_fallback": "1",
        "provider_options": [{"FlowNPUExecutionProvider": options}],
    }
    sizes = {"head_size": 4, "hidden_size": 4, "num_attention_heads": 1, "num_hidden_layers": 0}
    decoder = {
        "filename": "model.onnx",
        **sizes,
        "num_key_value_heads": 1,
        "inputs": {"input_ids": "input_ids"},
        "outputs": {"logits": "logits"},
        "session_options": session_options,
    }
    tokens = {"bos_token_id": 1, "eos_token_id": [END], "pad_token_id": END, "vocab_size": VOCABULARY}
    config = {
        "model": {"type": "gemma3_text", "context_length": 64, **tokens, "decoder": decoder},
        "search": {"max_length": 64, "past_present_share_buffer": False},
    }
    (folder / "genai_config.json").write_text(json.dumps(config))
    return model


def generate(genai: Any, folder: Path, first: int, length: int) -> list[int]:
    model = genai.Model(str(folder))
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=length, do_sample=False)
    generator = genai.Generator(model, parameters)
    generator.append_tokens([first])
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)]


def test_genai_generates_expected_tokens(genai: Any, tmp_path: Path, scores: Any) -> None:
    placement = tmp_path / "placement.json"
    write_model(tmp_path, scores, {"placement": str(placement)})
    expected = [3]
    while len(expected) < 12:
        expected.append(int(scores[expected[-1]].argmax()))
    assert generate(genai, tmp_path, 3, 12) == expected
    assert json.loads(placement.read_text())["claimed"] == 2


def test_copies_of_onnxruntime_share_library(genai: Any, tmp_path: Path, scores: Any, ep_devices: list[Any]) -> None:
    model = write_model(tmp_path, scores, {})
    options = onnxruntime.SessionOptions()
    options.add_provider_for_devices(ep_devices, {})
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    for first in (3, 7):
        second = generate(genai, tmp_path, first, 2)[1]
        (logits,) = session.run(None, {"input_ids": np.array([[first]])})
        np.testing.assert_array_equal(logits[0, 0], 2 * scores[first])
        assert logits.argmax() == second


def test_errors_reach_user_of_genai_word_for_word(genai: Any, tmp_path: Path, scores: Any) -> None:
    write_model(tmp_path, scores, {"colour": "red"})
    with pytest.raises(Exception, match=r"\[FlowNPU\] option colour = 'red' is not known; the options are: device"):
        genai.Model(str(tmp_path))
