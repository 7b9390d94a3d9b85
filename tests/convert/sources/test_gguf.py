# SPDX-License-Identifier: Apache-2.0
"""GGUF files become models that compute what transformers computes with the file's weights."""

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import transformers
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from flownpu.convert import ConversionError, convert
from flownpu.convert.progress import Progress
from flownpu.ops import q4nx
from tests.convert.conftest import write_tiny
from tests.convert.running import check_logits
from tests.convert.sources.gguf_files import (
    ARCHITECTURES,
    PLAIN_SCALE,
    add_scaling,
    unpermuted,
    write_gguf,
    write_model,
)

FAMILIES = tuple(ARCHITECTURES)
# Forms of the other families that a GGUF file can hold: no RoPE in every fourth layer, Mistral without a window, Llama
# without biases in its feed-forward, and multipliers that float32 holds exactly.
OTHER_FORMS: dict[str, dict[str, Any]] = {
    "gemma": {},
    "gemma4_text": {},
    "gemma4_unified_text": {},
    "gemma4_text with experts": {},
    "gpt_oss": {"swiglu_limit": 7.0},
    "granite": {"attention_multiplier": 0.3125, "residual_multiplier": 0.25, "rms_norm_eps": 2.0**-16},
    "granitemoe": {"attention_multiplier": 0.3125, "residual_multiplier": 0.25, "rms_norm_eps": 2.0**-16},
    "llama with biases": {"mlp_bias": False},
    "lfm2": {},
    "lfm2_moe": {},
    "mistral without window": {},
    "mixtral": {},
    "olmo2": {},
    "olmoe": {},
    "phi3": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.75}},
    "qwen2": {},
    "qwen3_moe": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "qwen3_next": {},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "layer_types": ["full_attention"] * 4},
}
# K-quants come in blocks of 256 columns.
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 16}

Edit = Callable[[gguf.GGUFWriter], None]


def blocks_of(folder: Path) -> dict[str, np.ndarray]:
    graph = ir.load(folder / "model.onnx").graph
    values = {name: value.const_value for name, value in graph.initializers.items() if value.const_value is not None}
    return {name: tensor.numpy() for name, tensor in values.items() if tensor.dtype == ir.DataType.UINT8}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_same_model_from_file(family: str, tmp_path: Path) -> None:
    """transformers' reader of GGUF files agrees about every weight, so the tests' files have the common form."""
    tiny = write_model(tmp_path, family)
    read = load_gguf_checkpoint(str(tmp_path / "model.gguf"), return_tensors=True, model_to_load=tiny.reference)
    for name, parameter in tiny.reference.named_parameters():
        # Gemma's norms were stored with 1 added, and 1 is taken off again: two roundings of values up to 2.
        actual = read["tensors"][name].numpy().astype(np.float32)
        np.testing.assert_allclose(actual, parameter.detach(), rtol=0, atol=2.0**-22, err_msg=name)


@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_FORMS])
def test_unquantised_gguf_equals_checkpoint(family: str, tmp_path: Path) -> None:
    # Llama without scaled RoPE: a GGUF file holds that as factors of the frequencies.
    changes = {"llama": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, **OTHER_FORMS}.get(family, {})
    tiny = write_tiny(family, tmp_path / "checkpoint", **PLAIN_SCALE.get(family, {}), **changes)
    original = transformers.AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.float32)
    scale = functools.partial(add_scaling, config=original.config)
    write_gguf(tmp_path / "model.gguf", original, type_of=lambda _: Type.BF16, edit=scale)
    convert(tmp_path / "model.gguf", tmp_path / "gguf")
    convert(tmp_path / "checkpoint", tmp_path / "huggingface")
    # A GGUF file does not tell Mistral from Llama, so the graph and genai_config.json name another family.
    named = () if family.startswith("mistral") else ("model.onnx", "genai_config.json")
    for name in ("model.onnx.data", *named):
        assert (tmp_path / "gguf" / name).read_bytes() == (tmp_path / "huggingface" / name).read_bytes(), name


def codes_of_file(raw: np.ndarray, kind: Type) -> np.ndarray:
    """The codes of rows of blocks, read by their places in the blocks' bytes; those of Q8_0 are signed, and places in
    tables are looked up."""
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = raw.reshape(-1, block_bytes)
    if kind == Type.Q8_0:
        return blocks[:, 2:].view(np.int8).reshape(len(raw), -1)
    # The low nibbles of 16 bytes are 16 codes, and the high ones the next 16; in K-quants 32 bytes hold 32 and 32.
    run = 16 if per_block == 32 or kind in TABLES else 32
    packed = blocks[:, -per_block // 2 :].reshape(len(blocks), -1, run)
    codes = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(blocks), -1)
    high = blocks[:, -per_block // 2 - per_block // 8 : -per_block // 2]
    if kind == Type.Q5_K:  # byte j has the bits of code j of each 32
        bits = np.unpackbits(high[:, None], axis=1, bitorder="little")
        codes |= bits.reshape(len(blocks), -1) << 4
    if kind in (Type.Q5_0, Type.Q5_1):
        codes |= np.unpackbits(high, axis=1, bitorder="little") << 4
    return (TABLES[kind][codes] if kind in TABLES else codes).reshape(len(raw), -1)


# llama.cpp's table; and E2M1 of the OCP's microscaling formats, doubled: bits s e e m are (-1)^s 2^(max(e, 1) - 1)
# ((e > 0) + m / 2).
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_E2M1 = [(-1) ** (c >> 3) * 2 ** max(c >> 1 & 3, 1) * (int(c >> 1 & 3 > 0) + (c & 1) / 2) for c in range(16)]
TABLES = {Type.IQ4_NL: _IQ4, Type.IQ4_XS: _IQ4, Type.MXFP4: np.array(_E2M1, np.int8)}


# The code of Q4NX for a code of 0 in the file, and the code that bears no part of the scale's error: where it is None,
# the minimum makes up for the part of the mean code.
ZEROS: dict[Type, tuple[int, int | None]] = {
    Type.Q4_0: (0, 8),
    Type.Q4_1: (0, 0),
    Type.Q4_K: (0, None),
    Type.Q5_0: (-16, 0),
    Type.Q5_1: (-16, None),
    Type.Q5_K: (-16, None),
    Type.Q8_0: (0, 0),
    Type.IQ4_NL: (0, 0),
    Type.IQ4_XS: (0, 0),
    Type.MXFP4: (0, 0),
}


@pytest.mark.parametrize("kind", ZEROS)
def test_gguf_codes_are_kept_and_only_scales_are_rounded(kind: Type, tmp_path: Path) -> None:
    """A projection is tested, and the queries' rows, whose order changes and which share blocks with others."""
    tiny = write_model(tmp_path, changes=WIDE, type_of=lambda _: kind, scales_in_bf16=False)
    convert(tmp_path / "model.gguf", tmp_path / "model")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    blocks = blocks_of(tmp_path / "model")
    manifest = json.loads((tmp_path / "model" / "flownpu_manifest.json").read_text())["quantisation"]
    for stored, name in (("ffn_down", "mlp.down_proj"), ("attn_q", "self_attn.qkv_proj")):
        raw = tensors[f"blk.1.{stored}.weight"].data
        zero, center = ZEROS[kind]
        exact, codes = gguf.quants.dequantize(raw, kind), codes_of_file(raw, kind).astype(np.int8) + zero
        made = q4nx.unpack(blocks[f"layers.1.{name}"][: len(exact) // 32], *exact.shape)
        if stored == "attn_q":
            exact, codes = (unpermuted(rows, "q_proj.weight", tiny.reference.config) for rows in (exact, codes))
        np.testing.assert_array_equal(made.codes, codes)
        scale, minimum = (np.repeat(np.abs(p.astype(np.float32)), 32, axis=1) for p in (made.scale, made.minimum))
        # bfloat16 has 8 bits: half a step is at most 2^-8 of a number, and 2^-8 (1 + 2^-8) of the rounded number. The
        # minimum is rounded as well, except Q4_0's, which is exactly -8 scales. float32 sums are rounded to 2^-24.
        half_step = 2.0**-8 * (1 + 2.0**-8)
        mean = np.repeat(codes.reshape(len(codes), -1, 32).mean(axis=-1), 32, axis=1)
        from_center = np.abs(codes - (mean if center is None else np.float64(center)))
        bound = half_step * (scale * from_center + (0 if kind == Type.Q4_0 else minimum))
        difference = np.abs(q4nx.dequantize_codes(made) - exact)
        assert (difference <= bound + 2.0**-22 * (scale * np.abs(codes) + minimum)).all()
        assert difference.any() != (kind == Type.MXFP4), "these scales happen to be bfloat16's"
        if kind in TABLES:
            assert q4nx.layout_of(blocks[f"layers.1.{name}"]) == q4nx.TABLE
        if stored == "ffn_down":
            error = q4nx.relative_error(exact, q4nx.dequantize_codes(made))
            assert manifest["relative_error"][f"layers.1.{name}"] == pytest.approx(error, abs=1e-6)


# The type of each projection, and its bits in Q4NX; queries, keys and values have those of the keys.
MIXED = {
    "embed_tokens": (Type.Q6_K, 8),
    "lm_head": (Type.F16, 4),
    "q_proj": (Type.F32, 8),
    "k_proj": (Type.Q8_0, 8),
    "v_proj": (Type.Q4_1, 8),
    "o_proj": (Type.BF16, 4),
    "gate_proj": (Type.Q4_0, 4),
    "up_proj": (Type.Q4_K, 4),
    "down_proj": (Type.Q3_K, 4),
}


def test_gguf_types_quantised_again_are_logged(
    tmp_path: Path, ep_devices: list[onnxruntime.OrtEpDevice], caplog: pytest.LogCaptureFixture
) -> None:
    """Types differ between the parts of a packed QKV and of a gated pair too."""

    def part(place: int) -> Callable[[str], Any]:
        return lambda name: MIXED[name.split(".")[-2]][place]

    tiny = write_model(tmp_path, changes=WIDE, type_of=part(0), bits_of=part(1))
    with caplog.at_level(logging.INFO, "flownpu"):
        convert(tmp_path / "model.gguf", tmp_path / "model", kv_dtype="fp32")
    assert sorted((record.levelname, record.getMessage()) for record in caplog.records) == [
        ("INFO", "Q4_0: 3 weights: codes unchanged, scales rounded to bf16"),
        ("INFO", "Q4_1: 3 weights: codes unchanged, scales and minima rounded to bf16"),
        ("INFO", "Q4_K: 3 weights: codes unchanged, scales and minima rounded to bf16"),
        ("INFO", "Q8_0: 3 weights: codes unchanged, scales rounded to bf16"),
        ("WARNING", "BF16: 3 weights: quantised to Q4NX"),
        ("WARNING", "F16: 1 weight: quantised to Q4NX"),
        ("WARNING", "F32: 3 weights: quantised to Q4NX of 8 bits"),
        ("WARNING", "Q3_K: 3 weights: dequantised, and quantised again to Q4NX"),
        ("WARNING", "Q6_K: 1 weight: dequantised, and quantised again to Q4NX of 8 bits"),
    ]
    weights = json.loads((tmp_path / "model" / "flownpu_manifest.json").read_text())["quantisation"]["weights"]
    assert weights["Q3_K"] == "3 weights: dequantised, and quantised again to Q4NX"
    check_logits(tmp_path / "model", tiny, ep_devices)


def test_mxfp4_equals_transformers(tmp_path: Path, ep_devices: list[onnxruntime.OrtEpDevice]) -> None:
    """Queries, keys and values of one table share blocks; the embedding is looked up in blocks with tables."""
    tiny = write_model(tmp_path, changes=WIDE, type_of=lambda _: Type.MXFP4)
    convert(tmp_path / "model.gguf", tmp_path / "model", kv_dtype="fp32")
    layouts = {q4nx.layout_of(blocks) for blocks in blocks_of(tmp_path / "model").values()}
    assert layouts == {q4nx.TABLE}
    check_logits(tmp_path / "model", tiny, ep_devices)


def test_table_and_other_codes_share_8_bits(tmp_path: Path, ep_devices: list[onnxruntime.OrtEpDevice]) -> None:
    kinds = {"q_proj": Type.MXFP4, "k_proj": Type.IQ4_NL, "v_proj": Type.Q4_0}
    tiny = write_model(tmp_path, changes=WIDE, type_of=lambda name: kinds.get(name.split(".")[-2], Type.Q4_0))
    convert(tmp_path / "model.gguf", tmp_path / "model", kv_dtype="fp32")
    assert q4nx.layout_of(blocks_of(tmp_path / "model")["layers.0.self_attn.qkv_proj"]) == q4nx.EIGHT_BITS
    check_logits(tmp_path / "model", tiny, ep_devices)


def test_linear_rope_scaling_equals_transformers(tmp_path: Path, ep_devices: list[onnxruntime.OrtEpDevice]) -> None:
    rope = {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    tiny = write_model(tmp_path, changes={"rope_parameters": rope}, edit=edit)
    convert(tmp_path / "model.gguf", tmp_path / "model", kv_dtype="fp32")
    check_logits(tmp_path / "model", tiny, ep_devices)


def test_gguf_configuration_equals_original(tmp_path: Path) -> None:
    write_model(tmp_path, "gemma3_text")
    convert(tmp_path / "model.gguf", tmp_path / "model", context_length=64)
    model = json.loads((tmp_path / "model" / "genai_config.json").read_text())["model"]
    assert (model["type"], model["vocab_size"], model["context_length"]) == ("gemma3_text", 300, 64)
    # The file names 1 as the token that ends a text; 3 is recognised by its text, <end_of_turn>.
    assert (model["bos_token_id"], model["eos_token_id"], model["pad_token_id"]) == (2, [1, 3], 0)
    source = json.loads((tmp_path / "model" / "flownpu_manifest.json").read_text())["source"]
    assert (source["kind"], source["name"], [*source["files"]]) == ("gguf", "model.gguf", ["model.gguf"])


def test_progress_reaches_its_end(tmp_path: Path) -> None:
    write_model(tmp_path)
    heard = list[Progress]()
    convert(tmp_path / "model.gguf", tmp_path / "model", progress=heard.append)
    assert {report.stage for report in heard} == {"quantise", "sum"}
    for stage in ("quantise", "sum"):
        last = [report for report in heard if report.stage == stage][-1]
        assert last.done == last.total


def set_pair(key: str, value: Any, kind: gguf.GGUFValueType) -> Edit:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, value, kind)

    return edit


def drop_pair(key: str) -> Edit:
    return lambda writer: writer.kv_data[0].pop(key) and None


def add_tensor(name: str, values: Any) -> Edit:
    return lambda writer: writer.add_tensor(name, np.asarray(values, np.float32))


def set_values(name: str, values: list[float]) -> Edit:
    return lambda writer: setattr(writer.tensors[0][name], "tensor", np.asarray(values, np.float32))


def drop_tensor(name: str) -> Edit:
    return lambda writer: writer.tensors[0].pop(name) and None


def set_type(name: str, kind: int) -> Edit:
    """Gives a tensor of [160, 96] another type in the header, and 4 bytes for each value."""

    def edit(writer: gguf.GGUFWriter) -> None:
        tensor = writer.tensors[0][name]
        tensor.shape, tensor.tensor = (160, 96), np.zeros((160, 96), np.int32)
        tensor.nbytes, tensor.dtype = tensor.tensor.nbytes, kind

    return edit


GEMMA4 = "gemma4_unified_text"
U32, F32, TEXT, BOOL, ARRAY = (gguf.GGUFValueType[name] for name in ("UINT32", "FLOAT32", "STRING", "BOOL", "ARRAY"))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (set_pair("general.architecture", "mamba", TEXT), "qwen3next, smollm3, got \"mamba\"; a model of another"),
        (set_pair("llama.expert_count", 8, U32), "llama.expert_used_count is missing"),
        (set_pair("llama.logit_scale", 8.0, F32), "llama.logit_scale is 8.0"),
        (set_pair("llama.attention.scale", 0.5, F32), "llama.attention.scale is 0.5, and only models that have 0.25"),
        (set_pair("llama.attention.causal", False, BOOL), "llama.attention.causal is False"),
        (set_pair("llama.attention.value_length", 8, U32), "attention.value_length is 8, .* the head's size, 16"),
        (set_pair("llama.rope.dimension_count", 8, U32), "rope.dimension_count is 8, .* the head's size, 16"),
        (set_pair("llama.rope.scaling.type", "yarn", TEXT), 'rope.scaling.type none or linear, got "yarn"'),
        (set_pair("llama.block_count", 0, U32), "expected llama.block_count of at least 1, got 0"),
        (set_pair("split.count", 3, U32), "one of 3 parts of a model; join them with llama-gguf-split --merge"),
        (drop_pair("llama.embedding_length"), "llama.embedding_length is missing"),
        (set_pair("llama.block_count", "three", TEXT), "the metadata is damaged: invalid literal for int"),
        (set_pair("llama.block_count", [[3]], ARRAY), "expected an array of numbers or strings .*, got type 9"),
        (set_pair("tokenizer.ggml.token_type", [3], ARRAY), "the metadata is damaged: "),
        (set_pair("general.alignment", "wide", TEXT), "general.alignment to be an integer of at least 1, got 'wide'"),
        (set_pair("general.alignment", 0, U32), "general.alignment to be an integer of at least 1, got 0"),
        (set_pair("llama.feed_forward_length", 161, U32), r"ffn_gate.weight has shape \[160, 96\], expected \[161,"),
        (drop_tensor("blk.2.ffn_up.weight"), "tensor blk.2.ffn_up.weight is missing"),
        (drop_tensor("token_embd.weight"), "tensor token_embd.weight is missing"),
        (add_tensor("blk.0.attn_q.bias", [0.0] * 96), r"1 tensors have no place .* \(blk.0.attn_q.bias\)"),
        (add_tensor("blk.7.attn_q.weight", [[0.0]]), r"1 tensors have no place .* \(blk.7.attn_q.weight\)"),
        (set_type("blk.2.ffn_up.weight", Type.I32), "ffn_up.weight has type I32, which the gguf package cannot deq"),
        (set_type("blk.2.ffn_up.weight", 4), "ffn_up.weight has type 4, which the installed gguf package does not kn"),
        (lambda w: w.tensors[0]["rope_freqs.weight"].__setattr__("shape", (4,)), "expected 8 positive values in rope_"),
    ],
)  # fmt: skip
def test_unfit_gguf_file_is_refused(edit: Edit, message: str, tmp_path: Path) -> None:
    write_model(tmp_path, edit=edit)
    with pytest.raises(ConversionError, match=message) as raised:
        convert(tmp_path / "model.gguf", tmp_path / "model")
    assert "model.gguf" in str(raised.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "model.gguf"]


def test_damaged_gguf_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for contents, message in (
        (b"", "expected a GGUF file, which begins with the letters GGUF, got b''"),
        (b"PK\x03\x04....", "got b'PK"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(16), "expected GGUF version 2 or 3 .*, got version 1"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(16), "got version 3 in big-endian bytes"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16, "expected a count before byte 16"),
    ):
        path.write_bytes(contents)
        with pytest.raises(ConversionError, match=message):
            convert(path, tmp_path / "model")


@pytest.mark.parametrize("kept", [3, 8, 23, 24, 100, 3000, 0.5, 0.999])
def test_truncated_file_is_refused(kept: float, tmp_path: Path) -> None:
    write_model(tmp_path)
    path = tmp_path / "model.gguf"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if kept < 1 else int(kept)])
    with pytest.raises(ConversionError, match=r"model.gguf: (expected|tensor)"):
        convert(path, tmp_path / "model")


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("small")
    sizes = {"vocab_size": 292, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    write_model(folder, changes={"num_hidden_layers": 1, **sizes})
    return (folder / "model.gguf").read_bytes()


@pytest.mark.parametrize(
    ("family", "edit", "message"),
    [
        ("qwen3", set_pair("qwen3.expert_count", 8, U32), "qwen3.expert_count is 8, and only models that have 0 there"),
        ("mixtral", set_pair("llama.expert_gating_func", 2, U32), "llama.expert_gating_func is 2, .* have 1 there"),
        ("olmoe", set_pair("olmoe.expert_shared_count", 1, U32), "olmoe.expert_shared_count is 1, .* have 0 there"),
        ("olmoe", drop_tensor("blk.1.ffn_up_exps.weight"), "tensor blk.1.ffn_up_exps.weight is missing"),
        (
            "olmoe",
            set_pair("olmoe.expert_count", 4, U32),
            r"ffn_gate_inp.weight has shape \[5, 96\], expected \[4, 96\]",
        ),
        (GEMMA4, set_pair("gemma4.rope.dimension_count_swa", 8, U32), "rope.dimension_count_swa is 8, .* size, 16"),
        (GEMMA4, set_pair("gemma4.attention.shared_kv_layers", 6, U32), "expected layers with a window and layers"),
        (GEMMA4, set_values("rope_freqs.weight", [1.0, 2.0] * 8), "expected rope_freqs.weight to be 1 for the first"),
        (GEMMA4, drop_tensor("rope_freqs.weight"), "tensor rope_freqs.weight is missing"),
    ],
)
def test_unfit_gguf_model_is_refused(family: str, edit: Edit, message: str, tmp_path: Path) -> None:
    write_model(tmp_path, family, edit=edit)
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path / "model.gguf", tmp_path / "model")
