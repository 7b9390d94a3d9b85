# SPDX-License-Identifier: Apache-2.0
"""Any fault of a checkpoint is reported with the name of the file or tensor, and nothing is written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from flownpu.convert import ConversionError, convert
from flownpu.convert.checkpoint import Checkpoint

Change = Callable[[dict[str, Any]], None]


def change_tensors(folder: Path, change: Change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **settings_: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings_))


def shard(folder: Path) -> None:
    """Splits the weights into two files and an index, as large checkpoints have them."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{i}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def refused(folder: Path, tmp_path: Path) -> str:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConversionError) as raised:
        convert(folder, tmp_path / "model")
    assert sorted(tmp_path.rglob("*")) == before, "something was left behind"
    return str(raised.value)


def test_sharded_checkpoint_gives_same_model(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "single")
    shard(checkpoint)
    convert(checkpoint, tmp_path / "sharded")
    for name in ("model.onnx", "model.onnx.data", "genai_config.json"):
        assert (tmp_path / "single" / name).read_bytes() == (tmp_path / "sharded" / name).read_bytes()


def test_float32_and_bfloat16_of_same_values_give_same_model(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "bf16")
    change_tensors(checkpoint, lambda tensors: tensors.update({k: v.astype(np.float32) for k, v in tensors.items()}))
    convert(checkpoint, tmp_path / "fp32")
    assert (tmp_path / "bf16" / "model.onnx.data").read_bytes() == (tmp_path / "fp32" / "model.onnx.data").read_bytes()


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_decoder_of_vision_checkpoint_is_converted(prefix: str, checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "text")
    change_tensors(
        checkpoint,
        lambda t: t.update({prefix + k.removeprefix("model."): t.pop(k) for k in list(t)} | {"vision": np.zeros(3)}),
    )
    text = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    convert(checkpoint, tmp_path / "vision")
    for name in ("model.onnx", "model.onnx.data", "genai_config.json"):
        assert (tmp_path / "text" / name).read_bytes() == (tmp_path / "vision" / name).read_bytes()


def test_rows_are_read_in_stored_type(checkpoint: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    expected = load_file(checkpoint / "model.safetensors")[name]
    rows = Checkpoint(checkpoint).rows(name, 5, 9)
    assert rows.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(rows, expected[5:9])


def test_source_without_checkpoint_or_model_is_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, tmp_path)
    assert "Hugging Face checkpoint" in message
    assert "genai_config.json" in message
    assert "there is no such file or folder" in refused(tmp_path / "nowhere", tmp_path)


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json"])
def test_missing_file_is_named(missing: str, checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / missing).unlink()
    assert missing in refused(checkpoint, tmp_path)


def test_unsupported_weight_files_are_named(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    assert "found pytorch_model.bin" in refused(checkpoint, tmp_path)


def test_missing_shard_is_named(checkpoint: Path, tmp_path: Path) -> None:
    shard(checkpoint)
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refused(checkpoint, tmp_path)


def test_shard_without_listed_tensor_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    shard(checkpoint)
    path = checkpoint / "model-00001-of-00002.safetensors"
    tensors = load_file(path)
    gone = next(iter(tensors))
    save_file({name: value for name, value in tensors.items() if name != gone}, path)
    message = refused(checkpoint, tmp_path)
    assert gone in message
    assert path.name in message


def test_index_outside_folder_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"model.embed_tokens.weight": "../other.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "../other.safetensors" in refused(checkpoint, tmp_path)


@pytest.mark.parametrize("kept", [0, 7, 100, 20000])
def test_truncated_weights_are_refused(kept: int, checkpoint: Path, tmp_path: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    message = refused(checkpoint, tmp_path)
    assert "model.safetensors: not a whole safetensors file" in message


@pytest.mark.parametrize("text", ["", "{", "[]", '"gemma"'])
def test_damaged_configuration_is_refused(text: str, checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "config.json").write_text(text)
    assert "config.json" in refused(checkpoint, tmp_path)


def test_unsupported_family_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    change_config(checkpoint, model_type="rwkv")
    message = refused(checkpoint, tmp_path)
    assert "gemma3_text, gemma3, gemma4_text, gemma4, gemma4_unified_text" in message
    assert "exported by ORT GenAI's builder or by optimum" in message


def test_missing_tensor_is_named(checkpoint: Path, tmp_path: Path) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    change_tensors(checkpoint, lambda tensors: tensors.pop(name))
    assert f"tensor {name} is missing" in refused(checkpoint, tmp_path)


def test_tensors_without_place_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    """A tensor that transformers would ignore with a warning is an error; stored inverse frequencies are not."""
    frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(checkpoint, lambda tensors: tensors.update({frequencies: np.ones(8, np.float32)}))
    convert(checkpoint, tmp_path / "frequencies")
    name = "model.layers.1.self_attn.q_proj.bias"
    change_tensors(checkpoint, lambda tensors: tensors.update({name: np.ones(96, np.float32)}))
    assert f"1 tensors have no place in a model of this family as FlowNPU knows it ({name})" in refused(
        checkpoint, tmp_path
    )


def test_missing_embedding_is_named(checkpoint: Path, tmp_path: Path) -> None:
    change_tensors(checkpoint, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    assert "model.embed_tokens.weight is missing" in refused(checkpoint, tmp_path)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_norm.weight"])
def test_wrong_shape_is_refused(name: str, checkpoint: Path, tmp_path: Path) -> None:
    change_tensors(checkpoint, lambda tensors: tensors.update({name: np.ascontiguousarray(tensors[name][:-1])}))
    message = refused(checkpoint, tmp_path)
    assert name in message
    assert "expected [96" in message or "expected [16" in message


def test_configuration_of_another_size_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    change_config(checkpoint, vocab_size=301)
    message = refused(checkpoint, tmp_path)
    assert "model.embed_tokens.weight has shape [300, 96], expected [301, 96]" in message


@pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj.weight", "model.norm.weight"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nonfinite_values_are_refused(name: str, value: float, checkpoint: Path, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors[name].flat[3] = value

    change_tensors(checkpoint, spoil)
    message = refused(checkpoint, tmp_path)
    assert "finite" in message
    assert name.removeprefix("model.").removesuffix(".weight") in message


def test_quantised_checkpoint_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    change_tensors(checkpoint, lambda tensors: tensors.update({name: tensors[name].astype(np.int8)}))
    message = refused(checkpoint, tmp_path)
    assert name in message
    assert "I8" in message


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"kv_dtype": "int7"}, 'bf16, fp16, fp32, int8, got "int7"'),
        ({"kv_dtype": "int8", "paged": True}, "not in int8: leave --kv-dtype int8 out"),
        ({"logits": "first"}, 'got "first"'),
        ({"context_length": 129}, "1 to 128, got 129"),
        ({"context_length": 0}, "1 to 128, got 0"),
    ],
)
def test_invalid_setting_is_refused(settings_: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=message):
        convert(checkpoint, tmp_path / "model", **settings_)
    assert not (tmp_path / "model").exists()
