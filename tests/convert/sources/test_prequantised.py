# SPDX-License-Identifier: Apache-2.0
"""AWQ, GPTQ and compressed-tensors' checkpoints keep their codes, scales and zero points; FP8 is read."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from flownpu.convert import ConversionError, convert
from flownpu.convert.checkpoint import Checkpoint
from flownpu.convert.quantise import Carried
from flownpu.convert.sources.huggingface import READERS
from flownpu.convert.sources.packing import read_packing
from flownpu.convert.sources.tables import read_mxfp4
from flownpu.ops import q4nx
from tests.convert.running import check_logits
from tests.convert.sources.prequantised_checkpoints import (
    Form,
    change_config,
    quantised,
    write_float8,
    write_prequantised,
)
from tests.convert.sources.test_gguf import blocks_of
from tests.fuzz.reference.products import BNB4_VALUES


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("llama", Form("awq", 128)),
        ("gemma2", Form("awq", 32)),
        ("gemma3_text", Form("gptq", 128, "gptq_v2")),
        ("llama", Form("gptq", 64, order="plain")),
        ("qwen3", Form("gptq", 32)),
        ("llama", Form("gptq", 128, symmetric=True)),
        ("llama", Form("gptq", -1, "gptq_v2", order="plain")),
        ("llama", Form("gptq", 64, order="act")),
        ("llama", Form("compressed-tensors", 64)),
        ("gemma2", Form("compressed-tensors", -1, symmetric=True)),
        ("llama", Form("gptq", 64, bits=8)),
        ("llama", Form("compressed-tensors", 128, bits=8)),
        ("qwen3", Form("int8", -1, symmetric=True, bits=8)),
        ("llama", Form("nf4", 64)),
        ("qwen3", Form("fp4", 256, "nested")),
    ],
    ids=str,
)
def test_converted_logits_equal_transformers(
    family: str, form: Form, tmp_path: Path, ep_devices: list[onnxruntime.OrtEpDevice]
) -> None:
    tiny = write_prequantised(tmp_path, family, form)
    convert(tiny.folder, tmp_path / "model", kv_dtype="fp32")
    check_logits(tmp_path / "model", tiny, ep_devices)


@pytest.mark.parametrize(
    "form",
    [
        Form(method, 64, exact=False, bits=bits)
        for method, bits in (("awq", 4), ("gptq", 4), ("gptq", 8), ("compressed-tensors", 4), ("int8", 8))
    ],
    ids=str,
)
def test_prequantised_weight_loses_only_rounding_to_bfloat16(form: Form, tmp_path: Path) -> None:
    write_prequantised(tmp_path, "llama", form)
    name = "layers.1.mlp.down_proj"
    path = tmp_path / "checkpoint" / "model.safetensors"
    tensors = load_file(path)
    weight = np.random.default_rng(0).standard_normal((128, 384), dtype=np.float32) + np.float32(0.4)
    parts, exact = quantised(weight, form)
    tensors.update({f"model.{name}.{part}": tensor for part, tensor in parts.items()})
    save_file(tensors, path)
    convert(tmp_path / "checkpoint", tmp_path / "model")
    made = q4nx.unpack(blocks_of(tmp_path / "model")[name], *exact.shape)
    difference = np.abs(q4nx.dequantize_codes(made) - exact)
    size = form.group
    stored = parts["weight_scale"] if "weight_scale" in parts else parts["scales"].T
    scale = np.repeat(stored.astype(np.float32), size, axis=1)
    # The code of Q4NX that stands for 0.
    zero = np.rint(-np.repeat(made.minimum.astype(np.float32) / made.scale.astype(np.float32), 32, axis=1))
    np.testing.assert_array_equal(made.codes - zero, np.rint(exact / scale))
    # Rounding to bfloat16's 8 bits moves a number by half a step at most, 2^-8 of itself: first the scale, then
    # -scale * zero, unless that is a power of two. Both roundings together add a term of 2^-16; float32 sums are
    # rounded to 2^-24.
    magnitude = np.abs(zero.astype(int))
    is_power = (magnitude & (magnitude - 1)) == 0
    bound = 2.0**-8 * scale * (np.abs(made.codes - zero) + np.where(is_power, 0, magnitude)) * (1 + 2.0**-7)
    assert (difference <= bound + 2.0**-23 * 2.0**form.bits * scale).all()
    if form.bits == 4:
        assert difference.max() < 0.12 * scale.max()
    assert difference.any(), "these scales happen to be bfloat16's"
    manifest = json.loads((tmp_path / "model" / "flownpu_manifest.json").read_text())["quantisation"]
    error = q4nx.relative_error(exact, q4nx.dequantize_codes(made))
    assert manifest["relative_error"][name] == pytest.approx(error, abs=1e-6)


@pytest.mark.parametrize(
    "form",
    [
        Form("awq", 64),
        Form("gptq", 128, order="plain"),
        Form("gptq", 32, order="act"),
        Form("compressed-tensors", 32),
        Form("nf4", 256),
    ],
    ids=str,
)
def test_rows_equal_each_other_however_they_are_cut(form: Form, tmp_path: Path) -> None:
    tiny = write_prequantised(tmp_path, "llama", form)
    checkpoint = Checkpoint(tiny.folder)
    packing = read_packing(checkpoint)
    assert packing is not None
    tensors = READERS[packing.method](checkpoint, packing)
    tensors.check("layers.0.mlp.up_proj.weight", (384, 128))

    def rows(first: int, stop: int) -> NDArray[np.float32]:
        found = tensors.rows("layers.0.mlp.up_proj.weight", first, stop)
        return found.exact if isinstance(found, Carried) else found

    whole = rows(0, 384)
    for first, stop in ((0, 32), (5, 6), (13, 50), (376, 384)):
        np.testing.assert_array_equal(rows(first, stop), whole[first:stop])


@pytest.mark.parametrize("form", [Form("nf4", 64, exact=False), Form("fp4", 64, "nested", exact=False)], ids=str)
def test_places_in_table_are_kept_and_values_rounded_to_127th(form: Form, tmp_path: Path) -> None:
    """To half a step of 1 / 127 of a block's scale, and by the rounding of the scale to bf16, 2^-8 of the value."""
    tiny = write_prequantised(tmp_path, "llama", form)
    convert(tiny.folder, tmp_path / "model")
    name = "layers.0.mlp.down_proj"
    exact = tiny.reference.get_parameter(f"model.{name}.weight").detach().numpy()
    blocks = blocks_of(tmp_path / "model")[name]
    assert q4nx.layout_of(blocks) == q4nx.TABLE
    made = q4nx.unpack(blocks, *exact.shape)
    # A value's place is the only one whose multiple of 1 / 127 is the code.
    table = np.array(BNB4_VALUES[form.method])
    scale = np.repeat(np.abs(exact.reshape(-1, form.group)).max(1), form.group).reshape(exact.shape)
    if form.version != "nested":
        nearest = np.abs(exact[..., None] / scale[..., None] - table).argmin(-1)
        np.testing.assert_array_equal(made.codes, np.rint(127 * table)[nearest])
    rounded = scale * np.abs(made.codes) / 127
    bound = scale * 0.5 / 127 + 2.0**-8 * rounded
    assert (np.abs(q4nx.dequantize_codes(made) - exact) <= bound * (1 + 2.0**-20)).all()


def test_mxfp4_of_gpt_oss_equals_transformers() -> None:
    """All codes and scales that bfloat16 and float32 hold, bit for bit; `-0` and 0 are one value."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 64, 3, 16), dtype=np.uint8)
    scales = rng.integers(1, 250, (2, 64, 3), dtype=np.uint8)
    expected = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    quantized, exact = read_mxfp4(blocks, scales)
    np.testing.assert_array_equal(exact, expected.transpose(1, 2).reshape(128, 96).numpy())
    packed = q4nx.pack(*quantized, q4nx.TABLE)
    np.testing.assert_array_equal(q4nx.dequantize(packed, 128, 96), exact)
    with pytest.raises(ValueError, match=r"blocks \[2, 64, 3, 16\] for these scales, got \[2, 64, 2, 16\]"):
        read_mxfp4(blocks[:, :, :2], scales)
    with pytest.raises(ValueError, match="got NaN"):
        read_mxfp4(blocks, np.full_like(scales, 255))


@pytest.mark.parametrize("block", [(32, 64), None])
def test_float8_checkpoint_equals_checkpoint_of_its_values(block: tuple[int, int] | None, tmp_path: Path) -> None:
    tiny = write_float8(tmp_path, "llama", block)
    tiny.reference.save_pretrained(tmp_path / "values")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny.folder / name, tmp_path / "values" / name)
    convert(tiny.folder, tmp_path / "float8")
    convert(tmp_path / "values", tmp_path / "float32", weights="8/4/8")  # the tables have floats of 16 bits
    data = [(tmp_path / name / "model.onnx.data").read_bytes() for name in ("float8", "float32")]
    assert data[0] == data[1]


def test_dropped_parts_of_source_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, act = (
        write_prequantised(tmp_path / "plain", "llama", Form("awq")),
        write_prequantised(tmp_path / "act", "llama", Form(group=64, order="act")),
    )
    with caplog.at_level(logging.INFO, "flownpu"):
        convert(plain.folder, tmp_path / "a")
        convert(act.folder, tmp_path / "b")
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == [
        ("INFO", "awq: 21 weights: codes unchanged, scales and minima rounded to bf16"),
        ("WARNING", "float: 2 weights: quantised to Q4NX"),
        (
            "WARNING",
            "act-order: 21 weights: dequantised, and quantised again to Q4NX, for columns that share a scale are not "
            "neighbours (desc_act)",
        ),
        ("WARNING", "float: 2 weights: quantised to Q4NX"),
    ]
    manifest = json.loads((tmp_path / "a" / "flownpu_manifest.json").read_text())
    assert manifest["quantisation"]["weights"]["awq"].startswith("21 weights: codes unchanged")


def test_gptq_format_names_give_same_bytes(tmp_path: Path) -> None:
    """transformers 5 writes "format" for "checkpoint_format". Zero points of gptq and gptq_v2 differ by 1."""
    tiny = write_prequantised(tmp_path, "llama", Form("gptq", 64, "gptq_v2"))
    convert(tiny.folder, tmp_path / "older")
    settings = Form("gptq", 64, "gptq_v2").config()
    settings["format"] = settings.pop("checkpoint_format")
    change_config(tiny.folder, quantization_config=settings)
    convert(tiny.folder, tmp_path / "newer")
    change_config(tiny.folder, quantization_config={**settings, "format": "gptq"})
    convert(tiny.folder, tmp_path / "wrong")
    data = {path.parent.name: path.read_bytes() for path in tmp_path.glob("*/model.onnx.data")}
    assert data["older"] == data["newer"] != data["wrong"]


def test_settings_in_separate_file_are_read(tmp_path: Path) -> None:
    """AutoGPTQ wrote a quantize_config.json instead of a section of config.json."""
    tiny = write_prequantised(tmp_path, "llama", Form("gptq", 64))
    convert(tiny.folder, tmp_path / "inside")
    settings = Form("gptq", 64).config()
    del settings["quant_method"], settings["checkpoint_format"]
    (tiny.folder / "quantize_config.json").write_text(json.dumps(settings))
    change_config(tiny.folder, quantization_config=None)
    convert(tiny.folder, tmp_path / "outside")
    data = [(tmp_path / name / "model.onnx.data").read_bytes() for name in ("inside", "outside")]
    assert data[0] == data[1]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that can be converted."""
    return write_prequantised(tmp_path_factory.mktemp("sound"), "llama", Form("gptq", 128, order="plain")).folder


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        settings = json.loads((folder / "config.json").read_text())["quantization_config"]
        change_config(folder, quantization_config={**settings, **changes})

    return edit


def edit_tensor(name: str, change: Callable[[NDArray[Any]], NDArray[Any] | None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        changed = change(tensors.pop(name).copy())
        if changed is not None:
            tensors[name] = changed
        save_file(tensors, folder / "model.safetensors")

    return edit


def add_tensor(name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {name: np.ones(8, np.float16)}, folder / "model.safetensors")

    return edit


def filled(value: float) -> Callable[[NDArray[Any]], NDArray[Any]]:
    return lambda tensor: np.full_like(tensor, value)


NVFP4 = {"group_0": {"weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}}}
DOWN = "model.layers.2.mlp.down_proj"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (edit_config(bits=3), "expected 4 or 8 bits, got 3; convert the checkpoint that it was made of"),
        (edit_config(quant_method="awq", version="gemm", bits=8), "expected 4 bits, got 8"),
        (edit_config(group_size=8), "multiple of 32, for Q4NX has one scale for 32 columns, got 8"),
        (edit_config(quant_method="awq", version="gemm", bits=3), "expected 4 bits, got 3"),
        (edit_config(quant_method="awq", version="gemm", group_size=8), "32 columns, got 8"),
        (lambda folder: change_config(folder, model_type="mamba"), 'expected model_type .* got "mamba"'),
        (edit_config(group_size=48), "got 48"),
        (edit_config(group_size=0), "got 0"),
        (edit_config(quant_method="hqq"), 'bitsandbytes or mxfp4, got "hqq"; convert'),
        (edit_config(quant_method="bitsandbytes"), "expected load_in_4bit true; convert"),
        (
            edit_config(quant_method="compressed-tensors"),
            "expected config_groups with one scheme of weights, got None; convert the",
        ),
        (
            edit_config(quant_method="compressed-tensors", format="nvfp4-pack-quantized", config_groups=NVFP4),
            "expected format pack-quantized of 4- .*, got nvfp4-pack-quantized of 4-bit float by tensor_group",
        ),
        (edit_config(quant_method="fp8", weight_block_size=128), "expected blocks of two sizes, .*, got 128"),
        (edit_config(checkpoint_format="marlin"), 'checkpoint_format gptq or gptq_v2, got "marlin"'),
        (edit_config(quant_method="awq", version="gemv"), 'expected version gemm, got "gemv"'),
        (edit_config(quant_method="awq", format="llm-awq"), 'expected format gemm, got "llm-awq"'),
        (edit_config(quant_method="awq", zero_point=False), "expected zero_point true, got false"),
        (edit_config(group_size=64), r"q_proj.qzeros has shape \[1, 16\], expected \[2, 16\]"),
        (lambda folder: change_config(folder, quantization_config=[4]), r"expected a JSON object, got \[4\]"),
        (edit_tensor(f"{DOWN}.qweight", lambda _: None), f"tensor {DOWN}.weight is missing"),
        (edit_tensor(f"{DOWN}.scales", lambda _: None), f"tensor {DOWN}.scales is missing"),
        (
            edit_tensor(f"{DOWN}.qweight", lambda t: t[:-1].copy()),
            rf"{DOWN}.qweight has shape \[47, 128\], expected \[48",
        ),
        (
            edit_tensor(f"{DOWN}.qweight", lambda t: t.astype(np.float32)),
            f"{DOWN}.qweight has type float32, expected int",
        ),
        (edit_tensor(f"{DOWN}.scales", filled(np.nan)), "down_proj: expected every scale to be finite"),
        (add_tensor(f"{DOWN}.channel_scale"), rf"1 tensors have no place .* \({DOWN}.channel_scale\)"),
        (edit_tensor(f"{DOWN}.bias", filled(0.5)), f"{DOWN}.bias is not zero"),
        (edit_tensor(f"{DOWN}.qzeros", filled(-1)), f"{DOWN}.qzeros has a stored zero point of 15.*save .* as gptq_v2"),
        (edit_tensor(f"{DOWN}.g_idx", filled(3)), f"{DOWN}.g_idx has 3..3, expected groups 0..2"),
        (
            edit_tensor(f"{DOWN}.g_idx", lambda t: t.astype(np.float16)),
            f"{DOWN}.g_idx has type F16, expected one of I32, I64",
        ),
    ],
)
def test_unfit_quantised_checkpoint_is_refused(
    edit: Callable[[Path], None], message: str, sound: Path, tmp_path: Path
) -> None:
    shutil.copytree(sound, tmp_path / "checkpoint")
    edit(tmp_path / "checkpoint")
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path / "checkpoint", tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
