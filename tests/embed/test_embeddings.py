# SPDX-License-Identifier: Apache-2.0
"""Embeddings are those that transformers' hidden states give, pooled by hand."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from flownpu.convert import ConversionError, convert
from flownpu.embed import EmbeddingModel
from flownpu.errors import FlowNPUError
from flownpu.graph_rewrites.testing import BFLOAT16_ROUNDING, FLOAT32_ROUNDING
from tests.embed.checkpoints import ENCODER, POSITIONS, PROMPTS, SENTENCES
from tests.embed.conftest import Model, cosines, pooled

POOLING = {"bert-mean": "mean", "bert-cls": "cls", "xlm-roberta-mean": "mean", "qwen3": "last", "gemma3": "mean"}
# Texts of many lengths; of nothing but special tokens; longer than the model takes; of letters that it has never seen.
TEXTS = [*SENTENCES, "", "word " * 200, "\N{FOX FACE} naïve é"]
# Products that a value goes through, one after the other: four of each layer and two of its attention.
PRODUCTS = 6 * ENCODER["num_hidden_layers"]
# As in tests/rewrites/optimum_reference.py: a sum of K terms in float32 is off by sqrt(K) roundings, in quadrature over
# the products; the CPU device rounds what it multiplies to bfloat16, once before each product. Both are relative to an
# embedding's length, 1, and vectors of length 1 that differ by e have a cosine of 1 - e^2 / 2.
FLOAT32_TOLERANCE = 4 * (2 * PRODUCTS * ENCODER["intermediate_size"]) ** 0.5 * FLOAT32_ROUNDING
BFLOAT16_TOLERANCE = PRODUCTS * BFLOAT16_ROUNDING
BFLOAT16 = {"device": "cpu", "activations": "bf16"}


def expected(name: str, model: Model) -> NDArray[np.float32]:
    hidden = [model.hidden(text) for text in TEXTS]
    if name != "gemma3":
        return pooled(hidden, POOLING[name])
    vectors = np.stack([one[0].mean(axis=0) for one in hidden])
    for place in ("2_Dense", "3_Dense"):
        vectors = vectors @ load_file(model.checkpoint / place / "model.safetensors")["linear.weight"].T
    normalised: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return normalised


@pytest.mark.parametrize("name", POOLING)
def test_embeddings_equal_transformers(name: str, model: Callable[[str], Model]) -> None:
    made = model(name)
    reference = expected(name, made)
    for provider, options, tolerance in (("cpu", {}, FLOAT32_TOLERANCE), ("flownpu", BFLOAT16, BFLOAT16_TOLERANCE)):
        embedder = EmbeddingModel(made.folder, provider=provider, options=options)
        found = embedder.embed(TEXTS)
        assert cosines(found.vectors, reference).min() >= 1 - tolerance**2 / 2
        np.testing.assert_allclose(np.linalg.norm(found.vectors, axis=1), 1, rtol=4 * FLOAT32_ROUNDING * 64)
        assert found.cut == [TEXTS.index("word " * 200)]
        assert found.tokens[found.cut[0]] == embedder.longest == POSITIONS
        assert found.tokens[0] == len(made.tokenizer.encode(TEXTS[0]).ids)
        # No node is left to ONNX Runtime.
        assert provider == "cpu" or "100.0 %" in embedder.placement


@pytest.mark.parametrize("name", POOLING)
def test_batch_equals_single_texts(name: str, model: Callable[[str], Model]) -> None:
    embedder = EmbeddingModel(model(name).folder, options=BFLOAT16)
    batch = embedder.embed(TEXTS).vectors
    alone = np.concatenate([embedder.embed([text]).vectors for text in TEXTS])
    # Both round to bfloat16 at the same places, but add float32 sums in another order: that changes how values near the
    # middle between two bfloat16 numbers are rounded, at worst all values.
    np.testing.assert_array_less(np.linalg.norm(batch - alone, axis=1), BFLOAT16_TOLERANCE)
    # No row has another row's embedding.
    assert np.all(np.argmax(batch @ alone.T, axis=1) == np.arange(len(TEXTS)))


def test_prompts_and_dimensions_equal_sentence_transformers(model: Callable[[str], Model]) -> None:
    embedder = EmbeddingModel(model("qwen3").folder, options=BFLOAT16)
    whole = embedder.embed(SENTENCES, prompt_name="query").vectors
    prompted = embedder.embed([PROMPTS["query"] + text for text in SENTENCES]).vectors
    np.testing.assert_array_equal(whole, prompted)
    first = embedder.embed(SENTENCES, prompt_name="query", dimensions=40).vectors
    kept = whole[:, :40] / np.linalg.norm(whole[:, :40], axis=1, keepdims=True)
    np.testing.assert_allclose(first, kept, rtol=0, atol=4 * FLOAT32_ROUNDING)
    assert embedder.embed([], dimensions=2**63).vectors.size == 0
    with pytest.raises(FlowNPUError, match="expected 1 to 128 dimensions, got 129"):
        embedder.embed(["x"], dimensions=129)
    with pytest.raises(FlowNPUError, match=r"no prompt is named 'title': .* has query, document"):
        embedder.embed(["x"], prompt_name="title")
    assert embedder.embed([]).vectors.shape == (0, 0)


def test_text_without_utf8_is_refused(model: Callable[[str], Model]) -> None:
    with pytest.raises(FlowNPUError, match="expected a text in UTF-8, got the byte 0xe9"):
        EmbeddingModel(model("bert-mean").folder, options=BFLOAT16).embed(["caf\udce9"])


@pytest.mark.parametrize("weights", ["bf16", "int8", "q4nx"])
def test_rounded_weights_turn_embeddings_within_bound(
    weights: str, model: Callable[[str], Model], tmp_path: Path
) -> None:
    made = model("bert-mean")
    convert(made.checkpoint, tmp_path / "model", encoder_weights=weights)
    errors = json.loads((tmp_path / "model" / "flownpu_manifest.json").read_text())["quantisation"]["relative_error"]
    found = EmbeddingModel(tmp_path / "model", provider="cpu").embed(TEXTS).vectors
    # The reference has the words' table and the matrices in bfloat16. A product's relative error is its weight's, and
    # those of a layer's four products add up in quadrature along the layers; 2 because a text may be off by more.
    error = 2 * (4 * ENCODER["num_hidden_layers"]) ** 0.5 * max(errors.values())
    assert cosines(found, expected("bert-mean", made)).min() >= 1 - error**2 / 2


def test_left_padding_is_refused(model: Callable[[str], Model]) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(model("qwen3").folder / "model.onnx"))
    ids = np.array([[0, 5, 6], [5, 6, 7]])
    with pytest.raises(Exception, match=r"seqlens_k"):
        session.run(None, {"input_ids": ids, "attention_mask": (ids != 0).astype(np.int64)})
    # The settings that sentence-transformers reads tell it to pad on the right.
    settings = json.loads((model("qwen3").folder / "tokenizer_config.json").read_text())
    assert settings["padding_side"] == "right"


def _changed(source: Path, folder: Path, file: str, **settings: object) -> Path:
    shutil.copytree(source, folder)
    path = folder / file
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **settings}))
    return folder


@pytest.mark.parametrize(
    ("file", "settings", "reason"),
    [
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "expected a pooling of cls, .* got none"),
        ("1_Pooling/config.json", {"pooling_mode": "attention"}, "got attention, which is not supported"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt is false"),
        ("config_sentence_transformers.json", {"prompts": [1]}, "expected prompts to be texts by name"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "for how many tokens"),
    ],
)
def test_unsupported_pooling_files_are_refused(
    file: str, settings: dict[str, object], reason: str, model: Callable[[str], Model], tmp_path: Path
) -> None:
    with pytest.raises(FlowNPUError, match=reason):
        EmbeddingModel(_changed(model("bert-mean").folder, tmp_path / "model", file, **settings), provider="cpu")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"hidden_act": "relu"}, 'expected hidden_act to be one of gelu, .* got "relu"'),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"num_attention_heads": 5}, "expected hidden_size to be a multiple of num_attention_heads, got 96 and 5"),
        ({"num_hidden_layers": 2}, "tensors have no place in a model of this family"),
        ({"num_hidden_layers": 4}, "encoder.layer.3.attention.self.query.weight is missing"),
        (
            {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"}},
            "one that scores pairs of them with one label, got BertForSequenceClassification with 2 labels",
        ),
        ({"model_type": "mpnet"}, "expected model_type to be one of .*mpnet"),
    ],
)
def test_unfit_checkpoints_are_refused(
    settings: dict[str, object], reason: str, model: Callable[[str], Model], tmp_path: Path
) -> None:
    source = _changed(model("bert-mean").checkpoint, tmp_path / "source", "config.json", **settings)
    with pytest.raises(ConversionError, match=reason):
        convert(source, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_unfit_options_are_refused(model: Callable[[str], Model], tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="has no KV cache and no logits"):
        convert(model("bert-mean").checkpoint, tmp_path / "model", kv_dtype="fp16")
    with pytest.raises(ConversionError, match="a qwen3 is a decoder, whose weights are Q4NX"):
        convert(model("qwen3").checkpoint, tmp_path / "model", encoder_weights="int8")
    with pytest.raises(ConversionError, match="leave --context-length out"):
        convert(model("bert-mean").checkpoint, tmp_path / "model", context_length=8)
