# SPDX-License-Identifier: Apache-2.0
"""A model's weights as a .q4nx file: each by its name, with the model's codes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from flownpu.cli import main
from flownpu.convert import ConversionError, convert
from flownpu.convert.export_q4nx import export_q4nx
from flownpu.convert.progress import Progress
from flownpu.ops import q4nx, q4nx_file
from tests.convert.conftest import TinyModel, is_projection, write_tiny
from tests.convert.sources.gguf_files import write_gguf


@pytest.mark.parametrize("family", ["gemma3_text", "llama", "qwen3"])
def test_exported_weights_equal_fastflowlm(
    family: str, tiny_models: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    tiny = tiny_models(family)
    convert(tiny.folder, tmp_path / "model")
    export_q4nx(tmp_path / "model", tmp_path / "model.q4nx")
    file = q4nx_file.read(tmp_path / "model.q4nx")
    expected = {name: parameter.detach().numpy() for name, parameter in tiny.reference.named_parameters()}
    gemma = family == "gemma3_text"
    embedding = expected.pop("model.embed_tokens.weight")
    scaled = embedding * np.float32(np.sqrt(embedding.shape[1])) if gemma else embedding
    np.testing.assert_array_equal(file.pop("model.embed_tokens.weight"), scaled.astype(q4nx.BFLOAT16))
    expected.setdefault("lm_head.weight", embedding)
    if family == "llama":
        # The file holds the divisors of the plain frequencies, in bfloat16.
        factors = file.pop("rope_freqs.weight").astype(np.float64)
        plain = 5e5 ** (-np.arange(8) / 8)
        np.testing.assert_allclose(plain / factors, tiny.reference.model.rotary_emb.inv_freq.numpy(), rtol=2.0**-8)
    assert file.keys() == expected.keys()
    for name, values in expected.items():
        if is_projection(name):
            blocks = q4nx_file.blocks(file[name], *values.shape)
            np.testing.assert_array_equal(q4nx.dequantize(blocks, *values.shape), values, err_msg=name)
            # The same bytes as if the weight had been packed by itself: the padding is zero.
            np.testing.assert_array_equal(q4nx.pack(*q4nx.unpack(blocks, *values.shape)), blocks)
        else:
            np.testing.assert_array_equal(file[name], (values + np.float32(gemma)).astype(q4nx.BFLOAT16), err_msg=name)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1])
def test_codes_of_gguf_file_reach_q4nx_file(kind: Type, tmp_path: Path) -> None:
    """The .q4nx file's blocks are wide and have minima; the model's may have another layout."""
    tiny = write_tiny("llama", tmp_path / "checkpoint")
    write_gguf(tmp_path / "model.gguf", tiny.reference, type_of=lambda _: kind, scales_in_bf16=False)
    convert(tmp_path / "model.gguf", tmp_path / "model")
    assert main(["export-q4nx", str(tmp_path / "model"), str(tmp_path / "out" / "model.q4nx")]) == 0
    file = q4nx_file.read(tmp_path / "out" / "model.q4nx")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    for name, source in (
        ("model.layers.1.self_attn.v_proj.weight", "blk.1.attn_v.weight"),
        ("model.layers.2.mlp.down_proj.weight", "blk.2.ffn_down.weight"),
        ("lm_head.weight", "output.weight"),
    ):
        data = stored[source].data
        head = 2 if kind == Type.Q4_0 else 4
        raw = data.reshape(len(data), -1, head + 16)
        codes = np.concatenate([raw[..., head:] & 15, raw[..., head:] >> 4], axis=-1).reshape(len(data), -1)
        parameters = np.ascontiguousarray(raw[..., :head]).view(np.float16).astype(np.float32)
        scale, minimum = parameters[..., 0], parameters[..., 1] if kind == Type.Q4_1 else -8 * parameters[..., 0]
        expected = q4nx.pack(codes, scale.astype(q4nx.BFLOAT16), minimum.astype(q4nx.BFLOAT16))
        np.testing.assert_array_equal(file[name], expected.reshape(-1, 5120))


def test_embedding_is_dequantised_after_rounding_scales(tmp_path: Path) -> None:
    """FastFlowLM's converter dequantises first; docs/use/bring-your-model.md says how many values differ."""
    tiny = write_tiny("llama", tmp_path / "checkpoint")
    # The reference's own embedding went through Q4NX: rounding its scales to bfloat16 would change nothing.
    torch.nn.init.normal_(tiny.reference.model.embed_tokens.weight, std=0.05)
    write_gguf(tmp_path / "model.gguf", tiny.reference, type_of=lambda _: Type.Q4_1, scales_in_bf16=False)
    stored, ours = _embedding_before_and_after(tmp_path)
    theirs = stored.astype(q4nx.BFLOAT16).astype(np.float32)
    # Statistics of 28800 values in 900 groups, each with a scale of its own.
    assert np.mean(ours != theirs) == pytest.approx(0.66, abs=0.05)
    assert np.linalg.norm(ours - theirs) / np.linalg.norm(theirs) == pytest.approx(0.0055, rel=0.1)
    # Half a step of bfloat16 for the minimum, for 15 scales (a group's range), and for each of the two results.
    spread = np.ptp(stored.reshape(len(stored), -1, 32), axis=-1, keepdims=True)
    least = np.abs(stored.reshape(len(stored), -1, 32)).max(-1, keepdims=True)
    bound = 2.0**-8 * (spread + least + 2 * least)
    assert np.all(np.abs(ours - theirs).reshape((*bound.shape[:2], 32)) <= bound)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.F16])
def test_embedding_in_more_bits_equals_table(kind: Type, tmp_path: Path) -> None:
    """FastFlowLM's converter keeps such an embedding as it is in the file; ours writes the model's table.

    That has 8 bits if the file's has codes of 8 (whose scales bfloat16 holds here), and 4 if it has floats.
    """
    tiny = write_tiny("llama", tmp_path / "checkpoint")
    types = {"embed_tokens": kind}
    write_gguf(tmp_path / "model.gguf", tiny.reference, type_of=lambda name: types.get(name.split(".")[-2], Type.Q4_0))
    stored, ours = _embedding_before_and_after(tmp_path)
    table = stored if kind == Type.Q8_0 else q4nx.dequantize_codes(q4nx.quantize(stored))
    np.testing.assert_array_equal(ours, table.astype(q4nx.BFLOAT16).astype(np.float32))


def _embedding_before_and_after(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The embedding's values in model.gguf in a folder, and those in the .q4nx file that is exported from it."""
    convert(folder / "model.gguf", folder / "model")
    export_q4nx(folder / "model", folder / "model.q4nx")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(folder / "model.gguf").tensors}
    tensor = tensors["token_embd.weight"]
    stored = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return stored, q4nx_file.read(folder / "model.q4nx")["model.embed_tokens.weight"].astype(np.float32)


def test_export_reports_progress_and_replaces_with_force_only(
    tiny_models: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    convert(tiny_models("qwen3").folder, tmp_path / "model")
    output, heard = tmp_path / "model.q4nx", list[Progress]()
    export_q4nx(tmp_path / "model", output, progress=heard.append)
    header = 8 + int.from_bytes(output.read_bytes()[:8], "little")
    assert heard[-1].done == heard[-1].total == output.stat().st_size - header
    whole = output.read_bytes()
    with pytest.raises(ConversionError, match=r"model.q4nx exists; give another output, or --force to replace it"):
        export_q4nx(tmp_path / "model", output)
    output.write_bytes(b"something else")
    export_q4nx(tmp_path / "model", output, force=True)
    assert output.read_bytes() == whole


def test_model_without_q4nx_form_is_refused(
    tiny_models: Callable[[str], TinyModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(tiny_models("gemma2").folder, tmp_path / "model")
    arguments: list[Any] = ["export-q4nx", tmp_path / "model", tmp_path / "model.q4nx"]
    assert main([str(argument) for argument in arguments]) == 1
    assert "expected a model of gemma3_text, llama, qwen3, got gemma2" in capsys.readouterr().err
    convert(tiny_models("llama").folder, tmp_path / "model", weights="8/4/4", force=True)
    assert main([str(argument) for argument in arguments]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "got layers.0.self_attn.q_proj of 8; convert the source with --weights q4" in said
    assert main(["export-q4nx", str(tmp_path), str(tmp_path / "model.q4nx")]) == 1
    assert "genai_config.json" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
