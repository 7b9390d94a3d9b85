# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's E form: long prompts of which only the last token passes through the layers that share keys and values."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file

from flownpu.convert import ConversionError, convert
from tests.convert.conftest import TinyModel, write_tiny
from tests.convert.running import assert_near, error_bound
from tests.convert.sources.prequantised_checkpoints import change_config
from tests.convert.test_numbers import random_ids, tolerance
from tests.decoding import DecoderSession

FORM = "gemma4_text"
CONTEXT, WINDOW = 4096, 64


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder = tmp_path_factory.mktemp("long") / "checkpoint"
    return write_tiny(FORM, folder, max_position_embeddings=CONTEXT, sliding_window=WINDOW)


def session(folder: Path, devices: list[onnxruntime.OrtEpDevice]) -> DecoderSession:
    chosen = [device for device in devices if device.device.type.name == "CPU"][:1]
    return DecoderSession(folder, chosen, {"activations": "bf16", "on_unsupported": "error"})


@pytest.mark.parametrize("tokens", [1, 3000])
def test_prompts_and_the_tokens_behind_them_equal_transformers(
    tokens: int, tiny: TinyModel, tmp_path: Path, ep_devices: list[onnxruntime.OrtEpDevice]
) -> None:
    """With whole caches, and with those of a window's size."""
    ids = random_ids(1, tokens + 3)
    expected = tiny.logits(ids)[0, tokens - 1 :]
    bound = error_bound(tiny, ids, range(tokens - 1, tokens + 3), expected)
    ends = [(0, tokens), *((i, i + 1) for i in range(tokens, tokens + 3))]
    for windowed in (False, True):
        folder = tmp_path / f"windowed={windowed}"
        convert(tiny.folder, folder, kv_dtype="fp32", sliding_window_cache=windowed)
        decoder = session(folder, ep_devices)
        found = np.array([decoder(ids[:, start:stop])[0, 0] for start, stop in ends], np.float64)
        assert np.sqrt(np.square(found - expected).mean()) < bound, folder.name


def test_padded_rows_yield_logits_of_own_last_tokens(
    tiny: TinyModel, tmp_path: Path, ep_devices: list[onnxruntime.OrtEpDevice]
) -> None:
    """Rows that are padded on the right yield their own last tokens; the logits of all tokens are those of the last."""
    ids, lengths = random_ids(3, 80), np.array([80, 3, 71])
    mask = (np.arange(80) < lengths[:, None]).astype(np.int64)
    expected = np.array([tiny.logits(row[None, :length])[0, -1] for row, length in zip(ids, lengths, strict=True)])
    for logits in ("last", "all"):
        convert(tiny.folder, tmp_path / logits, kv_dtype="fp32", logits=logits)
        found = session(tmp_path / logits, ep_devices)(np.where(mask, ids, 0), mask)
        last = found[:, 0] if logits == "last" else found[np.arange(3), lengths - 1]
        for row, length, each, transformers in zip(ids, lengths, last, expected, strict=True):
            assert_near(each, transformers, tiny, ids=row[None, :length], lasts=[length - 1])
        stock = DecoderSession(tmp_path / logits)(np.where(mask, ids, 0), mask)
        last = stock[:, 0] if logits == "last" else stock[np.arange(3), lengths - 1]
        np.testing.assert_allclose(last, expected, rtol=0, atol=tolerance(expected, tiny.reference.config))


def test_sharing_layers_have_no_caches_and_compute_one_token(tiny: TinyModel, tmp_path: Path) -> None:
    convert(tiny.folder, tmp_path / "model")
    graph = ir.load(tmp_path / "model" / "model.onnx").graph
    caches = [value.name for value in graph.inputs if value.name.startswith("past_key_values.")]
    assert caches == [f"past_key_values.{layer}.{part}" for layer in range(3) for part in ("key", "value")]
    cuts = [node for node in graph if node.op_type == "GatherND"]
    assert len(cuts) == 2, "the residual stream and the embeddings for layers"
    attention = [node for node in graph if node.op_type == "FlowQKVAttention"]
    sources = [node.inputs[3].name for node in attention[3:]]
    assert sources == ["present.1.key", "present.1.key", "present.2.key"]


def test_unused_projections_of_sharing_layers_change_nothing(tiny: TinyModel, tmp_path: Path) -> None:
    """As released checkpoints have them; another tensor is refused."""
    copy = tmp_path / "checkpoint"
    copy.mkdir()
    for path in tiny.folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    tensors = load_file(copy / "model.safetensors")
    unused = {
        f"model.layers.4.self_attn.{name}.weight": torch.ones(32, 96, dtype=torch.bfloat16)
        for name in ("k_proj", "v_proj")
    }
    unused["model.layers.4.self_attn.k_norm.weight"] = torch.ones(16, dtype=torch.bfloat16)
    save_file(tensors | unused, copy / "model.safetensors", metadata={"format": "pt"})
    for source, name in ((tiny.folder, "without"), (copy, "with")):
        convert(source, tmp_path / name)
    data = [(tmp_path / name / "model.onnx.data").read_bytes() for name in ("without", "with")]
    assert data[0] == data[1]
    other = {"model.layers.4.self_attn.sinks": torch.ones(6, dtype=torch.bfloat16)}
    save_file(tensors | other, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=r"layers\.4\.self_attn\.sinks"):
        convert(copy, tmp_path / "other")


def test_paged_model_is_refused(tiny: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="heads of one size, and keys and values in each layer"):
        convert(tiny.folder, tmp_path / "model", paged=True)


def test_window_layers_without_a_source_are_refused(tmp_path: Path) -> None:
    tiny = write_tiny("gemma4_unified_text", tmp_path / "checkpoint")
    change_config(tiny.folder, num_kv_shared_layers=5)
    with pytest.raises(ConversionError, match="expected layer 2 to share the keys and values of an earlier layer"):
        convert(tiny.folder, tmp_path / "model")
