# SPDX-License-Identifier: Apache-2.0
"""Converted models whose layers have states, in GenAI's loop, in parts and in batches."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import onnxruntime_genai as og
import pytest
import torch
from safetensors.torch import load_file, save_file

import flownpu
from flownpu.convert import convert
from tests.convert.conftest import write_tiny
from tests.convert.running import IDS, error_bound
from tests.convert.test_numbers import tolerance
from tests.decoding import DecoderSession
from tests.end_to_end.replies import batch

FAMILIES = ["lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"]


def open_model(folder: Path, **more: str) -> og.Model:
    """GenAI's model on FlowNPU with bf16 activations, and more of the provider's options."""
    path = folder / "genai_config.json"
    config = json.loads(path.read_text())
    options = {flownpu.get_ep_name(): {"activations": "bf16", **more}}
    config["model"]["decoder"]["session_options"]["provider_options"] = [options]
    path.write_text(json.dumps(config))
    flownpu.register()
    return og.Model(str(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_loop_of_genai_equal_transformers(family: str, tmp_path: Path) -> None:
    check_loop(family, tmp_path)


def check_loop(family: str, folder: Path, **options: str) -> None:
    """Asserts that logits behind prompts and tokens equal transformers', with more of the provider's options."""
    tiny = write_tiny(family, folder / "checkpoint")
    convert(tiny.folder, folder / "model", kv_dtype="fp32")
    model = open_model(folder / "model", **options)
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=64, do_sample=False)
    generator, found = og.Generator(model, parameters), []
    # A prompt long enough for chunks of the delta rule, its continuation, and tokens one by one.
    generator.append_tokens(IDS[0, :20].astype(np.int32))
    found.append(generator.get_logits()[0, -1])
    generator.append_tokens(IDS[0, 20:33].astype(np.int32))
    for _ in range(6):
        found.append(generator.get_logits()[0, -1])
        generator.generate_next_token()
    sequence, lasts = np.asarray(generator.get_sequence(0), np.int64)[None], [19, *range(32, 38)]
    expected = tiny.logits(sequence)[0, lasts]
    error = np.sqrt(np.square(np.array(found, np.float64) - expected).mean())
    assert error < error_bound(tiny, sequence, lasts, expected)


def test_checkpoint_of_model_with_pictures_equals_that_of_text(tmp_path: Path) -> None:
    """Qwen 3.5's own checkpoints: the decoder is a section, and a tensor has a projection of all experts."""
    tiny = write_tiny("qwen3_5_moe_text", tmp_path / "text")
    whole = tmp_path / "whole"
    shutil.copytree(tiny.folder, whole)
    config = json.loads((whole / "config.json").read_text())
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (whole / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": config, **ends}))
    tensors = load_file(whole / "model.safetensors")
    stacked = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            stacked[name.replace("model.", "model.language_model.", 1)] = tensor
    for layer in range(3):
        module = f"layers.{layer}.mlp.experts"
        gates, ups, downs = (
            torch.stack([tensors[f"model.{module}.{expert}.{part}_proj.weight"] for expert in range(5)])
            for part in ("gate", "up", "down")
        )
        stacked[f"model.language_model.{module}.gate_up_proj"] = torch.cat([gates, ups], 1)
        stacked[f"model.language_model.{module}.down_proj"] = downs
    stacked["model.visual.patch_embed.weight"] = torch.zeros(4, 4)  # pictures are left out
    stacked["mtp.norm.weight"] = torch.zeros(4)  # and so is the drafter
    save_file(stacked, whole / "model.safetensors")
    for folder in ("text", "whole"):
        convert(tmp_path / folder, tmp_path / f"{folder}-model")
    for name in ("model.onnx", "model.onnx.data"):
        assert (tmp_path / "text-model" / name).read_bytes() == (tmp_path / "whole-model" / name).read_bytes(), name


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_long_prompt_in_two_parts_equals_one_go(
    family: str, tmp_path: Path, ep_devices: list[onnxruntime.OrtEpDevice]
) -> None:
    """4,096 tokens, computed in slices, then 300 more one by one: states change token by token, so bits are equal."""
    tiny = write_tiny(family, tmp_path / "checkpoint", max_position_embeddings=4608)
    convert(tiny.folder, tmp_path / "model", kv_dtype="fp32")
    ids = np.random.default_rng(3).integers(4, 260, (1, 4396))

    def logits(*parts: int) -> np.ndarray:
        decoder = DecoderSession(tmp_path / "model", ep_devices[:1], {"activations": "bf16"})
        stops = [*parts, *range(4097, 4397)]
        found = [decoder(ids[:, start:stop])[0, -1] for start, stop in itertools.pairwise([0, *stops])]
        return np.array(found[len(parts) - 1 :])

    np.testing.assert_array_equal(logits(1501, 4096), logits(4096))


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_padded_batch_equal_single_rows(
    family: str, tmp_path: Path, ep_devices: list[onnxruntime.OrtEpDevice]
) -> None:
    """A prompt shorter than a convolution's state is among them; each row then goes on behind its own tokens."""
    tiny = write_tiny(family, tmp_path / "checkpoint")
    convert(tiny.folder, tmp_path / "model", kv_dtype="fp32")
    lengths = np.array([12, 1, 7])
    rows = [IDS[0, start : start + length + 3] for start, length in zip((0, 9, 18), lengths, strict=True)]
    mask = (np.arange(12) < lengths[:, None]).astype(np.int64)
    padded = np.array([np.pad(row[:length], (0, 12 - length)) for row, length in zip(rows, lengths, strict=True)])

    def logits(prompt: np.ndarray, mask: np.ndarray, rows: list[np.ndarray], *devices: Any) -> np.ndarray:
        decoder = DecoderSession(tmp_path / "model", devices, {"activations": "bf16"} if devices else None)
        found = [decoder(prompt, mask)]
        for token in range(-3, 0):
            mask = np.pad(mask, ((0, 0), (0, 1)), constant_values=1)
            found.append(decoder(np.array([[row[token]] for row in rows]), mask))
        return np.array(found)[:, :, 0]

    together = logits(padded, mask, rows, ep_devices[0])
    stock = logits(padded, mask, rows)
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        alone = logits(row[None, :length], np.ones((1, length), np.int64), [row], ep_devices[0])
        # The bits of a row do not depend on other rows: not of products, and each state has a task of its own.
        np.testing.assert_array_equal(together[:, index], alone[:, 0])
        expected = tiny.logits(row[None])[0, length - 1 :]
        np.testing.assert_allclose(stock[:, index], expected, rtol=0, atol=tolerance(expected, tiny.reference.config))
    # A row may be padded on the right only, like those of all converted models.
    with pytest.raises(Exception, match="seqlens_k"):
        logits(padded, mask[:, ::-1].copy(), rows, ep_devices[0])


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_padded_batch_in_loop_of_genai_equals_single_sequences(family: str, tmp_path: Path) -> None:
    check_padded_batch(family, tmp_path)


def check_padded_batch(family: str, folder: Path, **options: str) -> None:
    """Asserts that sequences of different lengths get together the tokens that each gets alone."""
    tiny = write_tiny(family, folder / "checkpoint")
    convert(tiny.folder, folder / "model", kv_dtype="fp32")
    model = open_model(folder / "model", **options)
    sequences = [IDS[0, start : start + length].tolist() for start, length in ((0, 12), (9, 1), (18, 7))]
    assert batch(model, sequences, 8) == [batch(model, [sequence], 8)[0] for sequence in sequences]
