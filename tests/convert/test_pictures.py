# SPDX-License-Identifier: Apache-2.0
"""A checkpoint with a vision tower becomes three models, which compute what transformers computes."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from flownpu.convert import ConversionError, convert
from flownpu.convert.dense.writer import stored_bytes
from flownpu.convert.graph.data_file import aligned
from flownpu.convert.vision.configuration import read_vision
from flownpu.convert.vision.weights import vision_weight_plan
from flownpu.model.integrity import damage
from flownpu.ops import q4nx
from tests.convert.picture_models import TEXT, VISION, reference, stored_matrices, write_pictures_checkpoint
from tests.convert.test_checkpoint import change_config, change_tensors

FORMATS = ("bf16", "int8", "q4nx")
GRAPHS = ("vision.onnx", "embedding.onnx", "model.onnx")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures") / "checkpoint"
    write_pictures_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def converted(checkpoint: Path) -> Callable[[str], Path]:
    """Converts the checkpoint once for each format of the tower's weights, and returns the model's folder."""

    def convert_once(vision_weights: str) -> Path:
        output = checkpoint.with_name(vision_weights)
        if not output.exists():
            convert(checkpoint, output, kv_dtype="fp32", vision_weights=vision_weights)
        return output

    return convert_once


@pytest.fixture
def spoilt(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may change."""
    return shutil.copytree(checkpoint, tmp_path / "checkpoint")


def session(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def pictures(count: int) -> NDArray[np.float32]:
    side = VISION["image_size"]
    return np.random.default_rng(1).uniform(-1, 1, (count, 3, side, side)).astype(np.float32)


@pytest.mark.parametrize("vision_weights", FORMATS)
def test_features_equal_those_of_transformers(
    vision_weights: str, checkpoint: Path, converted: Callable[[str], Path]
) -> None:
    model = converted(vision_weights)
    pixels = pictures(2)
    with torch.no_grad():
        tower = reference(checkpoint, model).model
        expected = tower.get_image_features(torch.from_numpy(pixels)).pooler_output.numpy()
    (features,) = session(model / "vision.onnx").run(None, {"pixel_values": pixels})
    assert features.shape == (2, 256, TEXT["hidden_size"])
    # Both compute in float32. A sum of K rounded products is off by about sqrt(K) u of its size, u = 2^-24. A feature
    # comes through 6 sums a layer (QKV, scores, values, output, fc1, fc2), the patches' and the projector's, of at most
    # P = 1024 terms; their errors are independent, and so are those of the two computations.
    sums = 2 * (6 * VISION["num_hidden_layers"] + 2)
    error = np.linalg.norm(features - expected) / np.linalg.norm(expected)
    assert error < math.sqrt(sums * 1024) * 2**-24


@pytest.mark.parametrize("vision_weights", FORMATS)
def test_tower_weight_errors_are_in_manifest(vision_weights: str, converted: Callable[[str], Path]) -> None:
    model = converted(vision_weights)
    manifest = json.loads((model / "flownpu_manifest.json").read_text())
    noted = manifest["quantisation"]["vision"]
    assert noted["format"] == manifest["settings"]["vision_weights"] == vision_weights
    exact = stored_matrices(converted("bf16") / "vision.onnx")  # the checkpoint is bfloat16: nothing is lost
    for name, matrix in stored_matrices(model / "vision.onnx").items():
        weight = name if "projector" in name else f"{name}.weight"
        assert noted["relative_error"][weight] == pytest.approx(q4nx.relative_error(exact[name], matrix), abs=1e-6)
    worst = max(noted["relative_error"].values())
    # Rounding normal numbers to 255 levels over their range, some 2 * 3 sigma, has a mean squared error of a 12th of a
    # squared step: 6 / 254 / sqrt(12) = 0.7 %; the longest rows reach to 4 sigma. For Q4NX see docs/q4nx.md.
    assert {"bf16": worst == 0, "int8": 0.004 < worst < 8 / 254 / math.sqrt(12), "q4nx": 0.05 < worst < 0.09}[
        vision_weights
    ]


@pytest.mark.parametrize("vision_weights", FORMATS)
def test_tower_weight_bytes_equal_predicted_size(
    vision_weights: Any, checkpoint: Path, converted: Callable[[str], Path]
) -> None:
    """stored_bytes says the file's size beforehand, and Q4NX weights are in narrow blocks."""
    path = converted(vision_weights) / "vision.onnx"
    tower = read_vision(json.loads((checkpoint / "config.json").read_text()), TEXT["hidden_size"])
    data = path.with_name("vision.onnx.data").stat().st_size
    assert stored_bytes(vision_weight_plan(tower), vision_weights) == aligned(data)
    tensors = [value.const_value for value in ir.load(path).graph.initializers.values()]
    blocks = [tensor for tensor in tensors if tensor is not None and tensor.dtype == ir.DataType.UINT8]
    assert {q4nx.layout_of(tensor.shape.numpy()) for tensor in blocks} == (
        {q4nx.NARROW} if vision_weights == "q4nx" else set()
    )


def test_float32_vision_weights_are_rounded_to_bf16(spoilt: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)

    def perturb(tensors: dict[str, Any]) -> None:
        tensors.update({k: (v * random.uniform(1, 1.01, v.shape)).astype(np.float32) for k, v in tensors.items()})

    change_tensors(spoilt, perturb)
    convert(spoilt, tmp_path / "model")
    errors = json.loads((tmp_path / "model" / "flownpu_manifest.json").read_text())["quantisation"]["vision"]
    # Errors are uniform up to half a step; a step is 2^-7 of a mantissa near 1, and half as much of one near 2.
    for error in errors["relative_error"].values():
        assert 2**-9 / math.sqrt(3) < error < 2**-8 / math.sqrt(3)


def test_words_and_pictures_are_embedded(checkpoint: Path, converted: Callable[[str], Path]) -> None:
    model = converted("bf16")
    tower = reference(checkpoint, model).model
    image = tower.config.image_token_id
    embedding = session(model / "embedding.onnx")
    ids = np.array([[2, image, image, 7, image], [image, 9, 9, 9, 9]], np.int64)
    features = np.random.default_rng(0).normal(size=(1, 3, TEXT["hidden_size"])).astype(np.float32)
    (found,) = embedding.run(None, {"input_ids": ids, "image_features": features})
    with torch.no_grad():
        expected = tower.get_input_embeddings()(torch.from_numpy(ids)).numpy()
    expected[0, [1, 2, 4]] = features[0]
    expected[1, 0] = features[0, 0]  # each row takes features from the first on
    # A word's embedding is the result of two float32 products: with Q4NX's scale and with the embedding's.
    np.testing.assert_allclose(found, expected, rtol=3 * 2**-24, atol=0)
    # GenAI passes empty features where there are no pictures.
    nothing = features[0, :0]
    (found,) = embedding.run(None, {"input_ids": ids[:, -2:-1], "image_features": nothing})
    np.testing.assert_allclose(found, expected[:, -2:-1], rtol=3 * 2**-24, atol=0)
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument, match="out of data bounds"):
        embedding.run(None, {"input_ids": ids, "image_features": nothing})


def test_word_table_is_stored_once(spoilt: Path, tmp_path: Path) -> None:
    change_config(spoilt, tie_word_embeddings=True, text_config=TEXT | {"tie_word_embeddings": True})
    convert(spoilt, tmp_path / "model")
    tables = [ir.load(tmp_path / "model" / name).graph.initializers["embed_tokens"] for name in GRAPHS[1:]]
    places = [(t.const_value.location, t.const_value.offset) for t in tables]  # type: ignore[union-attr]
    assert places[0] == places[1]
    assert {path.name for path in (tmp_path / "model").glob("*.data")} == {"vision.onnx.data", "model.onnx.data"}


def test_damaged_vision_tower_is_named(converted: Callable[[str], Path], tmp_path: Path) -> None:
    model = shutil.copytree(converted("int8"), tmp_path / "model")
    assert damage(model) == []
    name = "vision_tower.encoder.layers.1.mlp.fc1.weight"
    manifest = json.loads((model / "flownpu_manifest.json").read_text())
    place = manifest["tensors"][name]
    assert place["file"] == "vision.onnx.data"
    contents = bytearray((model / "vision.onnx.data").read_bytes())
    contents[place["offset"] + 5] ^= 1
    (model / "vision.onnx.data").write_bytes(contents)
    assert any(name in line for line in damage(model))


def test_text_decoder_alone_is_converted(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "model", vision_weights="none")
    assert json.loads((tmp_path / "model" / "genai_config.json").read_text())["model"]["type"] == "gemma3_text"
    assert [path.name for path in (tmp_path / "model").glob("*.onnx")] == ["model.onnx"]
    assert not (tmp_path / "model" / "image_processor.json").exists()


@pytest.mark.parametrize(("prefix", "inner"), [("", "vision_model."), ("model.", ""), ("model.", "vision_model.")])
def test_tensor_names_of_other_versions_are_read(
    prefix: str, inner: str, spoilt: Path, converted: Callable[[str], Path], tmp_path: Path
) -> None:
    def rename(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            if name.startswith("vision_tower."):
                tensors[f"{prefix}vision_tower.{inner}{name.removeprefix('vision_tower.')}"] = tensors.pop(name)
            elif name.startswith("multi_modal_projector."):
                tensors[prefix + name] = tensors.pop(name)

    change_tensors(spoilt, rename)
    convert(spoilt, tmp_path / "model", kv_dtype="fp32")
    for name in (*GRAPHS, "vision.onnx.data"):
        assert (tmp_path / "model" / name).read_bytes() == (converted("bf16") / name).read_bytes()


def test_picture_settings_in_processor_file_are_read(
    spoilt: Path, converted: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = json.loads((spoilt / "preprocessor_config.json").read_text())
    (spoilt / "preprocessor_config.json").unlink()
    (spoilt / "processor_config.json").write_text(json.dumps({"image_processor": settings, "image_seq_length": 256}))
    convert(spoilt, tmp_path / "model")
    name = "image_processor.json"
    assert (tmp_path / "model" / name).read_bytes() == (converted("bf16") / name).read_bytes()


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, lambda tensors: tensors.pop(name))


def change_settings(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "preprocessor_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def change_vision(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: change_config(folder, vision_config=VISION | changes)


REFUSALS: dict[str, tuple[Callable[[Path], None], str]] = {
    "tokens": (lambda folder: change_config(folder, mm_tokens_per_image=64), "mm_tokens_per_image 256, got 64"),
    "activation": (change_vision(hidden_act="gelu"), 'gelu_pytorch_tanh, got "gelu"'),
    "channels": (change_vision(num_channels=4), "3 channels"),
    "heads": (change_vision(num_attention_heads=5), "multiple of num_attention_heads"),
    "pool": (change_vision(patch_size=5), "multiple of 16"),
    "token": (lambda folder: change_config(folder, image_token_index=5000), "vocabulary's size 4128, got 5000"),
    "layers": (change_vision(num_hidden_layers=3), "vision_tower.encoder.layers.2.layer_norm1.weight is missing"),
    "shape": (change_vision(intermediate_size=96), r"fc1.weight has shape \[288, 144\], expected \[96, 144\]"),
    "tower": (remove("vision_tower.embeddings.patch_embedding.weight"), "--vision-weights none"),
    "projector": (remove("multi_modal_projector.mm_soft_emb_norm.weight"), "mm_soft_emb_norm.weight is missing"),
    "size": (change_settings(size={"height": 64, "width": 64}), "expected pictures of 128 x 128"),
    "filter": (change_settings(resample=4), "got size .* resample 4"),
    "step": (change_settings(do_normalize=False), "do_normalize false"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_unfit_vision_model_is_refused(what: str, spoilt: Path, tmp_path: Path) -> None:
    spoil, message = REFUSALS[what]
    spoil(spoilt)
    with pytest.raises(ConversionError, match=message):
        convert(spoilt, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_infinite_weights_are_refused(spoilt: Path, tmp_path: Path) -> None:
    name = "vision_tower.encoder.layers.1.mlp.fc2.weight"

    def spoil(tensors: dict[str, Any]) -> None:
        tensors[name][3, 5] = np.inf

    change_tensors(spoilt, spoil)
    with pytest.raises(ConversionError, match=f"{name} has a value that is not finite"):
        convert(spoilt, tmp_path / "model")


def test_formats_are_for_models_that_take_pictures(checkpoint: Path, converted: Callable[[str], Path]) -> None:
    with pytest.raises(ConversionError, match='expected vision weights bf16, int8, q4nx or none, got "fp8"'):
        convert(checkpoint, checkpoint.with_name("other"), vision_weights="fp8")
    with pytest.raises(ConversionError, match="for Hugging Face checkpoints only"):
        convert(converted("bf16"), checkpoint.with_name("other"), vision_weights="int8")


def test_pan_and_scan_is_left_out_with_warning(spoilt: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    change_settings(do_pan_and_scan=True)(spoilt)
    convert(spoilt, tmp_path / "model")
    assert "pictures are resized as a whole" in caplog.text
