# SPDX-License-Identifier: Apache-2.0
"""gpt-oss's checkpoints as they are released: experts in MXFP4, whose bits are kept."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from flownpu.convert import ConversionError, convert
from flownpu.model.folder import MANIFEST
from flownpu.ops import q4nx
from tests.convert.conftest import TinyModel, is_projection, write_tiny
from tests.convert.running import check_logits


def write_mxfp4(folder: Path, **changes: Any) -> TinyModel:
    """A tiny checkpoint with random codes, and transformers' model of it, whose experts it dequantises itself."""
    config = write_tiny("gpt_oss", folder, **changes).reference.config
    tensors, rng = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = experts, rows, columns // 32
        tensors[f"{name}_blocks"] = torch.from_numpy(rng.integers(0, 256, (*shape, 16), dtype=np.uint8))
        # The values of E2M1 have an rms of 2.9; with these scales weights have about the deviation of write_tiny's.
        tensors[f"{name}_scales"] = torch.from_numpy(rng.integers(127 - 6, 127 - 3, shape, dtype=np.uint8))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    set_packing(folder, "mxfp4")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if is_projection(name) and ".experts." not in name:
                parameter.copy_(torch.from_numpy(q4nx.dequantize_codes(q4nx.quantize(parameter.numpy()))))
    assert reference.dtype == torch.float32
    assert reference.config.swiglu_limit == config.swiglu_limit
    return TinyModel(folder, reference)


def set_packing(folder: Path, method: str) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": method, "modules_to_not_convert": ["model.layers.*.self_attn"]}
    path.write_text(json.dumps(config))


def test_released_checkpoint_keeps_its_bits_and_equals_transformers(
    tmp_path: Path, ep_devices: list[onnxruntime.OrtEpDevice]
) -> None:
    tiny = write_mxfp4(tmp_path / "checkpoint")
    convert(tiny.folder, tmp_path / "model", kv_dtype="fp32")
    check_logits(tmp_path / "model", tiny, ep_devices)
    weights = ir.load(tmp_path / "model" / "model.onnx").graph.initializers
    config = tiny.reference.config
    inner, hidden = config.intermediate_size, config.hidden_size
    for index, layer in enumerate(tiny.reference.model.layers):
        experts = layer.mlp.experts
        name = f"layers.{index}.mlp.experts"
        gate_up, down = (
            np.split(weights[f"{name}.{part}"].const_value.numpy(), config.num_local_experts)
            for part in ("gate_up_proj", "down_proj")
        )
        for expert in range(config.num_local_experts):
            both = experts.gate_up_proj[expert].detach().numpy().T
            for blocks, expected in zip(np.split(gate_up[expert], 2), (both[::2], both[1::2]), strict=True):
                assert q4nx.layout_of(blocks) == q4nx.TABLE
                np.testing.assert_array_equal(q4nx.dequantize(blocks, inner, hidden), expected)
            expected = experts.down_proj[expert].detach().numpy().T
            np.testing.assert_array_equal(q4nx.dequantize(down[expert], hidden, inner), expected)
    said = json.loads((tmp_path / "model" / MANIFEST).read_text())["quantisation"]["weights"]
    assert said["mxfp4"].startswith(f"{9 * config.num_local_experts} weights: codes unchanged")


@pytest.mark.parametrize(("family", "method"), [("gpt_oss", "gptq"), ("llama", "mxfp4")])
def test_other_quantised_experts_are_refused(family: str, method: str, tmp_path: Path) -> None:
    tiny = write_tiny(family, tmp_path / "checkpoint")
    set_packing(tiny.folder, method)
    with pytest.raises(ConversionError, match=f'mxfp4 of gpt-oss\'s experts, and of no others, got "{method}"'):
        convert(tiny.folder, tmp_path / "model")


def test_wrong_shapes_are_refused(tmp_path: Path) -> None:
    tiny = write_mxfp4(tmp_path / "checkpoint")
    path = tiny.folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file(tensors | {name: tensors[name][..., :-1].contiguous()}, path)
    with pytest.raises(ConversionError, match=r"down_proj_scales has shape \[480, 4\], expected \[480, 5\]"):
        convert(tiny.folder, tmp_path / "model")
    save_file(tensors | {name: torch.full_like(tensors[name], 255)}, path)
    with pytest.raises(ConversionError, match="expected every scale to be a number"):
        convert(tiny.folder, tmp_path / "model")
