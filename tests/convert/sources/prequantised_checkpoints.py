# SPDX-License-Identifier: Apache-2.0
"""Writes quantised checkpoints of transformers' models, as AutoAWQ, AutoGPTQ and others lay them out."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from onnxruntime.capi._pybind_state import quantize_matmul_bnb4
from safetensors.numpy import load_file, save_file

from flownpu.ops import q4nx
from tests.convert.conftest import TinyModel, is_projection, write_tiny
from tests.fuzz.reference.products import BNB4_VALUES

# Multiples of 128, the largest group of columns, and of 8, the codes in a word.
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Floats = NDArray[np.float32]
Tensors = dict[str, NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class Form:
    """How a test's checkpoint is quantised."""

    method: str = "gptq"
    """"awq", "gptq", "compressed-tensors", "int8" for its format int-quantized, or "nf4" or "fp4" of bitsandbytes."""
    group: int = 128
    version: str = "gptq"
    """GPTQ's format; or "nested", if the scales of bitsandbytes are quantised, too."""
    symmetric: bool = False
    order: str = "none"
    """Order of GPTQ's columns: "none" (no g_idx), "plain", or "act"."""
    exact: bool = True
    """Whether scales have 4 significant bits, so that a product of 4 bits with a scale has 8 and bfloat16 holds it."""
    bits: int = 4

    def config(self) -> dict[str, Any]:
        if self.method in ("compressed-tensors", "int8"):
            strategy = {"strategy": "group", "group_size": self.group} if self.group > 0 else {"strategy": "channel"}
            weights = {"num_bits": self.bits, "type": "int", "symmetric": self.symmetric, **strategy}
            groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
            form = "int-quantized" if self.method == "int8" else "pack-quantized"
            return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
        if self.method in BNB4_VALUES:
            return {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": self.method}
        if self.method == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": self.group, "zero_point": True, "version": "gemm"}
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group,
            "desc_act": self.order == "act",
            "sym": self.symmetric,
            "checkpoint_format": self.version,
        }


def pack(values: NDArray[np.uint8], bits: int, order: Any = None) -> NDArray[np.int32]:
    """Packs values along the last axis into words; `order` lists the indices of a word's from the lowest bits up."""
    each = 32 // bits
    words = np.zeros((*values.shape[:-1], values.shape[-1] // each), np.uint32)
    for place, index in enumerate(order or range(each)):
        words |= values[..., index::each].astype(np.uint32) << np.uint32(bits * place)
    return words.view(np.int32)


def quantised(weight: Floats, form: Form) -> tuple[Tensors, Floats]:
    """The tensors of a weight [M, K], by the ends of their names, and the float32 values [M, K] that they stand for."""
    if form.method in BNB4_VALUES:
        return of_bitsandbytes(weight, form)
    rows, columns = weight.shape
    size = columns if form.group < 0 else form.group
    groups, last, half = -(-columns // size), (1 << form.bits) - 1, 1 << form.bits - 1
    group_of = np.arange(columns) // size
    if form.order == "act":
        group_of = np.random.default_rng(columns).permutation(group_of)
    scale, zero = np.empty((rows, groups), np.float16), np.empty((rows, groups), np.uint8)
    for group in range(groups):
        part = weight[:, group_of == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        exact = 2 * np.maximum(-low, high) / last if form.symmetric else (high - low) / last
        mantissa, exponent = np.frexp(exact)
        scale[:, group] = np.ldexp(np.ceil(mantissa * 16) / 16, exponent) if form.exact else exact
        if form.symmetric:
            zero[:, group] = half
            continue
        # 8-bit zero points are within 7 of the middle, so that the product with a scale of 4 bits has 8 as well.
        least, most = (1, 15) if form.bits == 4 else (half - 7, half + 7)
        zero[:, group] = np.clip(np.rint(-low / scale[:, group].astype(np.float32)), least, most)
    step, middle = scale[:, group_of].astype(np.float32), zero[:, group_of].astype(np.float32)
    codes = np.clip(np.rint(weight / step) + middle, 0, last).astype(np.uint8)
    values = step * (codes - middle)
    if form.method == "int8":
        tensors: Tensors = {"weight": (codes ^ 128).view(np.int8), "weight_scale": scale}
        return tensors if form.symmetric else tensors | {"weight_zero_point": (zero ^ 128).view(np.int8)}, values
    if form.method == "compressed-tensors":
        tensors = {
            "weight_packed": pack(codes, form.bits),
            "weight_scale": scale,
            "weight_shape": np.array(codes.shape),
        }
        if not form.symmetric:
            tensors["weight_zero_point"] = np.ascontiguousarray(pack(zero.T, form.bits).T)
        return tensors, values
    order = AWQ_ORDER if form.method == "awq" else None
    stored_zero = zero - (form.version == "gptq" and form.method == "gptq")
    tensors = {"scales": np.ascontiguousarray(scale.T), "qzeros": pack(stored_zero.T, form.bits, order)}
    if form.method == "awq":
        tensors["qweight"] = pack(codes.T, form.bits, order)
    else:
        tensors["qweight"] = np.ascontiguousarray(pack(codes, form.bits).T)
        tensors["bias"] = np.zeros(rows, np.float16)  # as some tools write it if there is none
    if form.order != "none":
        tensors["g_idx"] = group_of.astype(np.int32)
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, values


def of_bitsandbytes(weight: Floats, form: Form) -> tuple[Tensors, Floats]:
    """As `quantised`, with codes that ONNX Runtime finds; with `exact`, values are those of Q4NX's int8 table."""
    packed, scale = np.zeros(weight.size // 2, np.uint8), np.zeros(weight.size // form.group, np.float32)
    quantize_matmul_bnb4(
        packed,
        np.ascontiguousarray(weight),
        scale,
        form.group,
        list(BNB4_VALUES).index(form.method),
        *weight.shape[::-1],
    )
    tensors: Tensors = {"weight": packed[:, None], "weight.absmax": scale}
    state: dict[str, Any] = {"quant_type": form.method, "blocksize": form.group, "shape": weight.shape}
    if form.version == "nested":
        places = np.linspace(-1, 1, 256, dtype=np.float32)
        parts = np.split(scale - scale.mean(), range(256, scale.size, 256))
        factors = np.array([np.abs(part).max() for part in parts], np.float32)
        nearest = [np.abs(part[:, None] / most - places).argmin(1) for part, most in zip(parts, factors, strict=True)]
        state |= {"nested_blocksize": 256, "nested_offset": float(scale.mean())}
        scale = np.concatenate([most * places[found] for most, found in zip(factors, nearest, strict=True)])
        scale = scale + np.float32(state["nested_offset"])
        tensors["weight.absmax"] = np.concatenate(nearest).astype(np.uint8)
        tensors |= {"weight.nested_absmax": factors, "weight.nested_quant_map": places}
    table = np.array(BNB4_VALUES[form.method], np.float32)
    tensors["weight.quant_map"] = table
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors[f"weight.quant_state.bitsandbytes__{form.method}"] = text
    if form.exact:
        table, scale = np.rint(127 * table), (scale / 127).astype(q4nx.BFLOAT16).astype(np.float32)
    codes = np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1, form.group)
    return tensors, (scale[:, None] * table[codes]).reshape(weight.shape)


def write_float8(folder: Path, family: str, block: tuple[int, int] | None, **changes: Any) -> TinyModel:
    """Writes an FP8 checkpoint; returns transformers' model with the values of its floats.

    Args:
        folder: where "checkpoint" is made.
        family: the model's family.
        block: how many rows and columns share a scale, in the form of DeepSeek; None: a row, in compressed-tensors.
        changes: settings of the model.
    """
    tiny = write_tiny(family, folder / "checkpoint", **SIZES, **changes)
    path = tiny.folder / "model.safetensors"
    tensors = load_file(path)
    name_of_scale = "weight_scale_inv" if block else "weight_scale"
    original = transformers.AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.float32)
    for name, parameter in original.named_parameters():
        if name.endswith("_proj.weight"):
            weight = parameter.detach().numpy()
            height, width = block or (1, weight.shape[1])
            parts = weight.reshape(weight.shape[0] // height, height, weight.shape[1] // width, width)
            scale = np.abs(parts).max(axis=(1, 3)) / np.float32(448)  # the largest float8_e4m3fn
            spread = np.repeat(np.repeat(scale, height, axis=0), width, axis=1)
            tensors[name] = (weight / spread).astype(ml_dtypes.float8_e4m3fn)
            tensors[name.removesuffix("weight") + name_of_scale] = scale
            parameter.data = torch.from_numpy(tensors[name].astype(np.float32) * spread)
    save_file(tensors, path)
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    compressed = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    settings = {"quant_method": "fp8", "weight_block_size": list(block)} if block else compressed
    change_config(tiny.folder, quantization_config=settings)
    return dataclasses.replace(tiny, reference=original)


def write_prequantised(folder: Path, family: str, form: Form, **changes: Any) -> TinyModel:
    """Writes a quantised checkpoint; returns transformers' model with the weights that Q4NX should hold."""
    tiny = write_tiny(family, folder / "checkpoint", **SIZES, **changes)
    path = tiny.folder / "model.safetensors"
    tensors = load_file(path)
    with torch.no_grad():
        for name, parameter in tiny.reference.named_parameters():
            if name.endswith("_proj.weight"):
                # Tolerances are for the other tiny models' sums of 96 terms; here are 128, so weights are smaller.
                weight = tensors.pop(name).astype(np.float32) * np.float32((96 / 128) ** 0.5)
                parts, values = quantised(weight, form)
                tensors.update({name.removesuffix("weight") + part: tensor for part, tensor in parts.items()})
                if form.order == "act":
                    values = q4nx.dequantize_codes(q4nx.quantize(values))
                parameter.copy_(torch.from_numpy(values))
            elif not is_projection(name):
                tensors[name] = tensors[name].astype(np.float16)
                parameter.copy_(torch.from_numpy(tensors[name].astype(np.float32)))
    save_file(tensors, path)
    change_config(tiny.folder, quantization_config=form.config())
    return tiny


def change_config(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
