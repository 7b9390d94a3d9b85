# SPDX-License-Identifier: Apache-2.0
"""Random models have the shapes of the public ones, and activations of a sensible size."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers

from flownpu.convert import ConversionError
from flownpu.convert.families import read_decoder
from flownpu.convert.make_model import RandomWeights, make_model
from flownpu.convert.weights import BiasWeight, NormWeight, ProjectionWeight, RouterWeight, TensorSource, weight_plan
from flownpu.model.shapes import SHAPES
from flownpu.ops import q4nx

# Millions of parameters, as the models' cards give them; tied embeddings count once.
PARAMETERS = {
    "gemma3-1b": 1000,
    "gemma3-4b": 3880,
    "llama3.2-1b": 1236,
    "llama3.2-3b": 3213,
    "llama3.1-8b": 8030,
    "phi4-mini": 3836,
    "qwen2.5-3b": 3086,
    "qwen3-0.6b": 596,
    "qwen3-1.7b": 1721,
    "qwen3-4b": 4022,
    "qwen3-8b": 8191,
    "qwen3-30b-a3b": 30532,
    "olmoe-1b-7b": 6919,
    "qwen3.5-0.8b": 752,
    "qwen3.5-2b": 1882,
    "qwen3.5-4b": 4206,
    "qwen3.5-9b": 8954,
    "lfm2-1.2b": 1170,
    "gpt-oss-20b": 20915,
    "gemma4-e2b": 4629,  # counted: the 5100 of its card include towers
    "gemma4-e4b": 7463,  # counted, likewise
}
# Shapes whose checkpoints stack experts, or have buffers and tensors that nothing reads: their tensors are compared one
# by one in small models (test_other_families.py), and only counted here.
STACKED = ("gpt-oss-20b", "gemma4-e2b", "gemma4-e4b")
# Rows that are no multiple of 32, columns that are no multiple of 256, and both local and global layers.
TINY = {
    "model_type": "gemma3_text",
    "hidden_size": 288,
    "intermediate_size": 336,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 40,
    "query_pre_attn_scalar": 40,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 64,
}


def as_saved(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """A parameter as checkpoints store it: stacked experts become a tensor for each expert and projection."""
    if len(shape) != 3:
        return {name: shape}
    count, rows, columns = shape
    projections = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
    module = name.rpartition(".")[0]
    each = (rows // len(projections), columns)
    return {f"{module}.{e}.{projection}.weight": each for e in range(count) for projection in projections}


@pytest.mark.parametrize("shape", SHAPES)
def test_made_weights_equal_transformers_model(shape: str) -> None:
    config = transformers.AutoConfig.for_model(**SHAPES[shape])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == PARAMETERS[shape]
    if shape in STACKED:
        return
    expected: dict[str, tuple[int, ...]] = {}
    for name, p in model.named_parameters():
        sizes = p[:, 0].shape if ".conv" in name and p.ndim == 3 else p.shape
        expected.update(as_saved(name.removeprefix("model."), tuple(sizes)))
    found: dict[str, tuple[int, ...]] = {}
    rows = Counter[str]()  # of a fused tensor several sources take rows, and several weights
    for weight in weight_plan(read_decoder(SHAPES[shape])):
        if isinstance(weight, ProjectionWeight):
            for source in weight.sources:
                rows[source.tensor] += source.rows
                found[source.tensor] = (rows[source.tensor], weight.columns)
        elif isinstance(weight, RouterWeight):
            found.update({source.tensor: (source.rows, weight.columns) for source in weight.sources})
        elif isinstance(weight, BiasWeight):
            found.update({source.tensor: (source.rows,) for source in weight.sources})
        else:
            found[weight.tensor] = (weight.size,)
    assert found == expected


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(64, 512), (40, 1152), (33, 300)])
def test_random_blocks_have_promised_moments_and_empty_padding(rows: int, columns: int, symmetric: bool) -> None:
    projection = ProjectionWeight("w", (TensorSource("w", rows),), columns)
    random = RandomWeights(1, symmetric=symmetric)
    layout = random.layout(projection)
    assert layout == (q4nx.SYMMETRIC if symmetric else q4nx.NARROW)
    blocks = np.concatenate([part.blocks for part in random.blocks(projection)])
    assert blocks.shape == projection.blocks_shape(layout)
    np.testing.assert_array_equal(q4nx.pack(*q4nx.unpack(blocks, rows, columns), layout), blocks)  # the padding is zero
    weights = q4nx.dequantize(blocks, rows, columns)
    # The mean of n values of deviation s is off by s / sqrt(n); 5 times as much does not happen by chance. Uniform
    # scales of 0.75..1.25 make the variance larger by the factor 1 + 1/48, and so the deviation by 1 %; n values
    # estimate the deviation with an error of 1 / sqrt(2n) if they are normal, and less if they are codes.
    deviation, n = columns**-0.5, weights.size
    assert abs(weights.mean()) < 5 * deviation / n**0.5
    assert abs(weights.std() / deviation - 1) < 0.01 + 5 / (2 * n) ** 0.5


def test_random_gated_weight_has_different_gate_and_up() -> None:
    projection = ProjectionWeight("w", (TensorSource("gate", 40), TensorSource("up", 40)), 256, gated=True)
    parts = list(RandomWeights(1).blocks(projection))
    assert np.concatenate([part.blocks for part in parts]).shape == projection.blocks_shape(q4nx.NARROW) == (4, 8, 640)
    assert sum(part.size for part in parts) == projection.size == 80 * 256
    assert not np.array_equal(parts[0].blocks, parts[1].blocks)


def test_random_model_norms_are_one() -> None:
    np.testing.assert_array_equal(RandomWeights(1).vector(NormWeight("n", "n", 5)), np.ones(5, np.float32))


@pytest.mark.parametrize("symmetric", [False, True])
def test_made_model_runs_and_its_logits_spread(
    symmetric: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    make_model("tiny", tmp_path / "model", kv_dtype="fp32", symmetric=symmetric)
    session = onnxruntime.InferenceSession(tmp_path / "model" / "model.onnx", providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(0).integers(0, 1000, (4, 30))
    feeds: dict[str, Any] = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    for value in session.get_inputs()[2:]:
        feeds[value.name] = np.zeros((4, 2, 0, 40), np.float32)
    logits = session.run(["logits"], feeds)[0]
    assert logits.shape == (4, 1, 1000)
    # A normalised state times weights of variance 1/K has variance 1, apart from what the token's own embedding adds.
    assert 0.7 < logits.std() < 1.5


def test_made_model_is_loaded_by_genai_with_its_byte_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    og = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    make_model("tiny", tmp_path / "model")
    path = tmp_path / "model" / "genai_config.json"
    config = json.loads(path.read_text())
    config["model"]["decoder"]["session_options"]["provider_options"] = []  # ORT's own CPU provider
    path.write_text(json.dumps(config))
    model = og.Model(str(tmp_path / "model"))
    tokens = og.Tokenizer(model).encode("Hi there")
    assert len(tokens) in (8, 9)  # with or without <bos>
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=40)
    generator = og.Generator(model, parameters)
    generator.append_tokens(np.array([tokens], np.int32))
    generator.generate_next_token()
    assert 0 <= generator.get_next_tokens()[0] < 1000


def test_seed_determines_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    data = []
    for i, seed in enumerate((0, 0, 1)):
        make_model("tiny", tmp_path / str(i), seed=seed)
        data.append((tmp_path / str(i) / "model.onnx.data").read_bytes())
    assert data[0] == data[1] != data[2]


def test_rotary_caches_are_no_longer_than_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    make_model("tiny", tmp_path / "model", context_length=48)
    assert json.loads((tmp_path / "model" / "genai_config.json").read_text())["model"]["context_length"] == 48
    with pytest.raises(ConversionError, match="1 to 64, got 65"):
        make_model("tiny", tmp_path / "other", context_length=65)


def test_layer_count_limits_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    make_model("tiny", tmp_path / "model", layers=2)
    assert (
        json.loads((tmp_path / "model" / "genai_config.json").read_text())["model"]["decoder"]["num_hidden_layers"] == 2
    )
    with pytest.raises(ConversionError, match="tiny: expected 1 to 4 layers, got 5"):
        make_model("tiny", tmp_path / "other", layers=5)


def test_router_of_random_mixture_has_normal_logits() -> None:
    """Logits of a normalised state spread like a standard normal, as all products with random weights do."""
    matrix = RandomWeights(1).matrix(RouterWeight("r", (TensorSource("r", 64),), 1024))
    states = np.random.default_rng(0).standard_normal((500, 1024))
    assert 0.9 < (states @ matrix.T).std() < 1.1
    np.testing.assert_array_equal(matrix.astype(q4nx.BFLOAT16).astype(np.float32), matrix)


def test_unknown_shape_lists_known(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"gemma3-1b, gemma3-4b, llama3\.2-1b"):
        make_model("gemma4-1b", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
