# SPDX-License-Identifier: Apache-2.0
"""Writes GGUF files of transformers' models with the gguf package, as llama.cpp's converter lays them out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import ml_dtypes
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from flownpu.ops import q4nx
from tests.convert.conftest import TinyModel, by_columns, is_projection, write_tiny

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import transformers
    from numpy.typing import NDArray

ARCHITECTURES = {"gemma2": "gemma2", "gemma3_text": "gemma3", "llama": "llama", "qwen3": "qwen3"}
# For these forms, only the model of the GGUF file is compared with that of the checkpoint.
OTHER_ARCHITECTURES = {name: name for name in ("gemma", "granite", "mistral", "olmo2", "phi3", "qwen2", "smollm3")}
OTHER_ARCHITECTURES["mistral"] = "llama"
OTHER_ARCHITECTURES |= {"mixtral": "llama", "olmoe": "olmoe", "granitemoe": "granitemoe", "qwen3_moe": "qwen3moe"}
OTHER_ARCHITECTURES |= {"lfm2": "lfm2", "lfm2_moe": "lfm2moe", "qwen3_5_text": "qwen35", "qwen3_next": "qwen3next"}
OTHER_ARCHITECTURES |= {"qwen3_5_moe_text": "qwen35moe", "gpt_oss": "gpt-oss"}
OTHER_ARCHITECTURES |= {"gemma4_text": "gemma4", "gemma4_unified_text": "gemma4"}
INTERLEAVED = ("llama", "granite", "granitemoe", "smollm3")
# Names that the gguf package's table of Gemma 4 does not have.
_GEMMA4 = {"router.scale": "blk.{}.ffn_gate_inp.scale", "router.per_expert_scale": "blk.{}.ffn_down_exps.scale"}
# The byte offset of a block's float16 scale, of types whose blocks are random bytes.
RANDOM = {
    GGMLQuantizationType.Q3_K: 108,
    GGMLQuantizationType.Q6_K: 208,
    GGMLQuantizationType.IQ4_NL: 0,
    GGMLQuantizationType.IQ4_XS: 0,
}
# Codes of types that the gguf package does not write.
K_QUANTS = {GGMLQuantizationType.Q4_K: 16, GGMLQuantizationType.Q5_K: 32}
# Bytes of a block's float16 parameters, with which it begins.
PARAMETERS = {
    GGMLQuantizationType.Q4_0: 2,
    GGMLQuantizationType.Q4_1: 4,
    GGMLQuantizationType.Q5_0: 2,
    GGMLQuantizationType.Q5_1: 4,
    GGMLQuantizationType.Q8_0: 2,
    GGMLQuantizationType.IQ4_NL: 2,
    GGMLQuantizationType.IQ4_XS: 2,
    GGMLQuantizationType.MXFP4: 0,
}
# A GGUF file of a Gemma cannot state an attention scale: it is 1 / sqrt(head size), as in the public ones up to 12B.
PLAIN_SCALE: dict[str, Any] = {"gemma2": {"query_pre_attn_scalar": 16}, "gemma3_text": {"query_pre_attn_scalar": 16}}


def q4_0_everywhere(_name: str) -> GGMLQuantizationType:
    return GGMLQuantizationType.Q4_0


def write_model(
    folder: Path, family: str = "llama", changes: dict[str, Any] | None = None, **options: Any
) -> TinyModel:
    """Writes model.gguf into a folder; returns transformers' model with the weights that Q4NX makes of the file's."""
    tiny = write_tiny(family, folder / "checkpoint", **{**PLAIN_SCALE.get(family, {}), **(changes or {})})
    write_gguf(folder / "model.gguf", tiny.reference, **options)
    return tiny


def write_gguf(
    path: Path,
    model: transformers.PreTrainedModel,
    type_of: Callable[[str], GGMLQuantizationType] = q4_0_everywhere,
    *,
    bits_of: Callable[[str], int] = lambda _name: 4,
    scales_in_bf16: bool = True,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    edit: Callable[[gguf.GGUFWriter], None] = lambda _writer: None,
) -> None:
    """Writes a model, and sets its parameters to the values that Q4NX makes of the file's.

    Args:
        path: the file.
        model: in float32; its projections are quantised.
        type_of: the type of a projection, by its name in the checkpoint.
        bits_of: in how many bits a projection whose codes are not kept is quantised again.
        scales_in_bf16: round the scales of types whose codes are kept so that bfloat16 holds them exactly.
        tokenizer: adds a tokenizer; None: one of bytes.
        edit: adds settings or tensors, or changes them.
    """
    config = model.config
    architecture = (ARCHITECTURES | OTHER_ARCHITECTURES)[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    write_settings(writer, config)
    (tokenizer or byte_tokenizer)(writer)
    names = gguf.get_tensor_name_map(
        {name: value for value, name in gguf.MODEL_ARCH_NAMES.items()}[architecture], config.num_hidden_layers
    )
    with torch.no_grad():
        for name, parameter, rows in stored_parameters(model):
            if ".experts." in name:
                add_experts(
                    writer, name, by_columns(parameter, name, config), type_of, in_turns=hasattr(config, "swiglu_limit")
                )
                continue
            if name.endswith(("mlp.gate.weight", "router.weight", "feed_forward.gate.weight", "router.bias")):
                part = name.rpartition(".")[2]
                writer.add_tensor(f"blk.{name.split('.')[2]}.ffn_gate_inp.{part}", parameter.numpy().copy())
                continue
            stored = _GEMMA4.get(name.split(".", 3)[-1]) or names.get_name(name, try_suffixes=(".weight", ".bias"))
            stored = stored.format(*name.split(".")[2:3])
            values = parameter.numpy()[rows]
            if is_projection(name):
                values = permuted(values, name, config)
                data, made = quantized(values, type_of(name), scales_in_bf16=scales_in_bf16, bits=bits_of(name))
                writer.add_tensor(stored, data, raw_dtype=type_of(name))
                parameter[rows] = torch.from_numpy(unpermuted(made, name, config))
            elif "linear_attn." in name:
                writer.add_tensor(stored, of_linear_attention(values, name, config))
            elif name.endswith(".bias"):
                writer.add_tensor(stored, permuted(values[:, None], name, config)[:, 0])
            elif "conv." in name:
                writer.add_tensor(stored, values[:, 0])
            else:
                has_offset = architecture.startswith(("gemma", "qwen35", "qwen3next")) and architecture != "gemma4"
                is_offset = has_offset and name.endswith("norm.weight")
                writer.add_tensor(stored, values + np.float32(is_offset))
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored_parameters(model: transformers.PreTrainedModel) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """Parameters with the names that llama.cpp's converter looks up, and the rows that are a tensor of the file."""
    config, every = model.config, slice(None)
    for name, parameter in model.named_parameters():
        if not name.endswith("in_proj_qkvz.weight"):
            # llama.cpp's converter adds the end to the names of sinks.
            stored = f"{name}.weight" if name.endswith("sinks") else name.replace(".dt_bias", ".dt_proj.bias")
            yield stored, parameter, every
            continue
        # In each key head: its queries, keys, values and gates.
        keys = config.linear_key_head_dim
        values = config.linear_value_head_dim * config.linear_num_value_heads // config.linear_num_key_heads
        heads = np.arange(len(parameter)).reshape(config.linear_num_key_heads, -1)
        parts = np.split(heads, np.cumsum([keys, keys, values]), axis=1)
        joined = np.concatenate([part.reshape(-1) for part in parts[:3]])
        yield name.replace("qkvz", "qkv"), parameter, joined
        yield name.replace("qkvz", "z"), parameter, parts[3].reshape(-1)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            yield f"{name}.bias", buffer, every
        if name.endswith("layer_scalar"):
            yield f"{name}.weight", buffer, every


def of_linear_attention(values: NDArray[np.float32], name: str, config: Any) -> NDArray[np.float32]:
    """A tensor that is not quantised: logarithms are applied, the convolution's middle axis dropped."""
    if name.endswith("A_log"):
        values = -np.exp(values)
    values = values[:, 0] if "conv1d" in name else values
    return permuted(values[:, None], name, config)[:, 0] if values.ndim == 1 else permuted(values, name, config)


def add_experts(
    writer: gguf.GGUFWriter,
    name: str,
    parameter: torch.Tensor,
    type_of: Callable[[str], GGMLQuantizationType],
    *,
    in_turns: bool,
) -> None:
    """Adds the projections or biases of all experts, [experts, rows, columns] or [experts, rows] each.

    Gate and up become two tensors; `in_turns`: their rows take turns.
    """
    parts = {"gate": 0, "up": 1} if "gate_up_proj" in name else {"down": 0}
    if name.split(".")[3] == "experts" and len(parts) == 2:  # Gemma 4: they stay one tensor
        parts = {"gate_up": 0}
    rows = parameter.shape[1] // len(parts)
    for part, place in parts.items():
        values = parameter[:, place :: len(parts)] if in_turns else parameter[:, place * rows : (place + 1) * rows]
        if name.endswith("_bias"):
            writer.add_tensor(f"blk.{name.split('.')[2]}.ffn_{part}_exps.bias", values.numpy().copy())
            continue
        kind = type_of(name)
        data, made = quantized(values.numpy().reshape(-1, values.shape[-1]), kind, scales_in_bf16=True)
        data = data.reshape(len(values), rows, -1)
        writer.add_tensor(f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight", data, raw_dtype=kind)
        values.copy_(torch.from_numpy(made).reshape(values.shape))


def write_settings(writer: gguf.GGUFWriter, config: Any) -> None:
    architecture = (ARCHITECTURES | OTHER_ARCHITECTURES)[config.model_type]
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    is_lfm2 = architecture in ("lfm2", "lfm2moe")
    if architecture == "gemma4":
        write_forms(writer, config)
    else:
        write_sizes(writer, config, architecture)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps if is_lfm2 else config.rms_norm_eps)
    write_states(writer, config)
    write_experts(writer, config)
    rope = config.rope_parameters
    if "full_attention" in rope:
        full, local = rope["full_attention"], rope["sliding_attention"]
        writer.add_rope_freq_base(full["rope_theta"])
        writer.add_rope_freq_base_swa(local["rope_theta"])
        if "factor" in full:
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(full["factor"])
    else:
        writer.add_rope_freq_base(rope["rope_theta"])
    if architecture in ("gpt-oss", "gemma2", "gemma3", "gemma4"):
        writer.add_sliding_window(config.sliding_window)
    if architecture in ("gemma2", "gemma3", "gemma4"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if architecture == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
        writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
    if architecture.startswith("granite"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if architecture in ("gemma2", "gemma4"):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if rope.get("rope_type") == "llama3":
        plain = rope["rope_theta"] ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        scaled, _ = transformers_frequencies(config)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))


def add_scaling(writer: gguf.GGUFWriter, config: Any) -> None:
    """Adds the settings of RoPE's scaling that `write_settings` leaves out."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))


def write_sizes(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    """Adds the sizes of feed-forward and heads of layers that are alike."""
    size = config.intermediate_size
    if architecture == "lfm2":
        size = -(-(2 * size // 3) // config.block_multiple_of) * config.block_multiple_of
    kv_heads = config.num_key_value_heads
    head_size = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_feed_forward_length(size)
    has_states = architecture in ("lfm2", "lfm2moe")
    writer.add_head_count_kv([kv_heads * (kind != "conv") for kind in config.layer_types] if has_states else kv_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)


def write_forms(writer: gguf.GGUFWriter, config: Any) -> None:
    """Adds the settings of layers of two forms, and the factors of rotary frequencies of those that see all tokens."""
    shared = config.num_kv_shared_layers
    layers = [config.per_layer_config[i] for i in range(config.num_hidden_layers)]
    local, full = (layers[config.layer_types.index(kind)].head_dim for kind in ("sliding_attention", "full_attention"))
    sizes = [config.intermediate_size] * (len(layers) - shared)
    writer.add_feed_forward_length(sizes + [config.intermediate_size << config.use_double_wide_mlp] * shared)
    writer.add_head_count_kv([layer.num_key_value_heads for layer in layers])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(getattr(config, "hidden_size_per_layer_input", 0))
    for size, add in ((full, ""), (local, "_swa")):
        for name in ("key_length", "value_length", "rope_dimension_count"):
            getattr(writer, f"add_{name}{add}")(size)
    part = config.rope_parameters["full_attention"]["partial_rotary_factor"]
    pairs = np.arange(full // 2)
    writer.add_tensor("rope_freqs.weight", np.where(pairs < part * len(pairs), 1, 1e30).astype(np.float32))


def write_states(writer: gguf.GGUFWriter, config: Any) -> None:
    """Adds the settings of layers with states."""
    if hasattr(config, "conv_L_cache"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if hasattr(config, "linear_num_value_heads"):
        heads = config.linear_num_value_heads
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * heads)
        writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
        rotated = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
        writer.add_rope_dimension_count(rotated)
        # llama.cpp reads how many pairs turn by time, height and width; a text's three positions are equal.
        if config.model_type.startswith("qwen3_5"):
            writer.add_rope_dimension_sections([rotated // 2, 0, 0, 0])


def write_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    """Adds the settings of mixtures of experts."""
    if getattr(config, "enable_moe_block", False):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
    if hasattr(config, "num_experts_per_tok"):
        writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if (
        size := getattr(config, "moe_intermediate_size", None)
        or hasattr(config, "swiglu_limit") * config.intermediate_size
    ):
        writer.add_expert_feed_forward_length(size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if hasattr(config, "num_dense_layers"):
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def byte_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Adds a SentencePiece tokenizer of bytes and 32 characters; tokens 1 and 3 end a turn."""
    tokens = ["<pad>", "<eos>", "<bos>", "<end_of_turn>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [chr(ord("A") + i) for i in range(32)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([3] * 4 + [6] * 256 + [1] * 32)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)


def transformers_frequencies(config: Any) -> tuple[NDArray[np.float64], float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scale = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return frequencies.numpy().astype(np.float64), scale


def quantized(
    values: NDArray[np.float32], kind: GGMLQuantizationType, *, scales_in_bf16: bool, bits: int = 4
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """The bytes that the file holds, and the values that Q4NX makes of them."""
    if kind in K_QUANTS:
        data = k_quant(values, kind, scales_in_bf16=scales_in_bf16)
        return data, gguf.quants.dequantize(data, kind)
    data = random_blocks(values, kind) if kind in RANDOM else gguf.quants.quantize(values, kind)
    if kind in PARAMETERS:
        if scales_in_bf16 and PARAMETERS[kind]:
            blocks, size = data.reshape(-1, GGML_QUANT_SIZES[kind][1]), PARAMETERS[kind]
            parameters = blocks[:, :size].copy().view(np.float16)
            # Both types hold these scales: bfloat16's 8 bits, float16's exponents (values are far from its subnormals).
            blocks[:, :size] = parameters.astype(ml_dtypes.bfloat16).astype(np.float16).view(np.uint8)
        return data, gguf.quants.dequantize(data, kind)
    exact = gguf.quants.dequantize(data, kind)
    return data, q4nx.dequantize_codes((q4nx.quantize if bits == 4 else q4nx.quantize_bytes)(exact))


def k_quant(
    values: NDArray[np.float32], kind: GGMLQuantizationType, *, scales_in_bf16: bool = False
) -> NDArray[np.uint8]:
    """Rounds a weight to Q4_K or Q5_K; columns are a multiple of 256.

    Each 32 weights span from their minimum, or 0 if that is above it, to their maximum, whose code is the one before
    the last: as in llama.cpp's files not all codes are used, and quantising the values again yields others. Scales and
    minima keep 6 bits. With `scales_in_bf16` the factors of these are powers of two, so that the products have 6 bits
    too.
    """
    last = K_QUANTS[kind] - 1
    groups = values.reshape(-1, 8, 32)
    minima = np.maximum(-groups.min(axis=-1), 0)
    d, s = six_bits((groups.max(axis=-1) + minima) / (last - 1), scales_in_bf16)
    n, t = six_bits(minima, scales_in_bf16)
    scale, minimum = (factor.astype(np.float32) * six for factor, six in ((d, s), (n, t)))
    rounded = np.rint((groups + minimum[..., None]) / np.maximum(scale, 2.0**-40)[..., None])
    codes = rounded.clip(0, last).astype(np.uint8)
    # The fifth bits of the 32 codes of group g are bits g of 32 bytes.
    high = np.bitwise_or.reduce(codes >> 4 << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    pairs = (codes & 15).reshape(-1, 4, 2, 32)
    parts = (
        np.concatenate([d, n], axis=-1).view(np.uint8),
        *(six[:, :4] | six[:, 4:] >> 4 << 6 for six in (s, t)),
        s[:, 4:] & 15 | t[:, 4:] << 4,
        *([high] if kind == GGMLQuantizationType.Q5_K else []),
        (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128),
    )
    return np.concatenate(parts, axis=-1).reshape(len(values), -1)


def six_bits(values: NDArray[np.float32], power_of_two: bool) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
    """Each row of values as a factor, float16 [rows, 1], and multiples of it in 0..63."""
    factor = values.max(axis=-1, keepdims=True) / 63 + np.float32(2.0**-20)  # not 0
    factor = (np.exp2(np.ceil(np.log2(factor))) if power_of_two else factor).astype(np.float16)
    return factor, np.rint(values / factor).clip(0, 63).astype(np.uint8)


def random_blocks(values: NDArray[np.float32], kind: GGMLQuantizationType) -> NDArray[np.uint8]:
    """Blocks of a type that the gguf package reads but does not write: random ones with the weight's spread."""
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    rows, columns = values.shape
    rng = np.random.default_rng(columns)
    blocks = rng.integers(0, 256, (rows * columns // per_block, block_bytes), np.uint8)
    factors = rng.uniform(-2, 2, (len(blocks), 1))
    start = RANDOM[kind]

    def scaled(scale: float) -> NDArray[np.uint8]:
        blocks[:, start : start + 2] = (factors * scale).astype(np.float16).view(np.uint8)
        return blocks.reshape(rows, -1)

    spread = gguf.quants.dequantize(scaled(2.0**-10), kind).std()
    return scaled(2.0**-10 * float(values.std() / spread))


def permuted(values: NDArray[np.float32], name: str, config: Any) -> NDArray[np.float32]:
    """Rows in llama.cpp's order for RoPE that rotates neighbours: row 2i + j of a head was row i of its half j.

    Of linear attention, value heads in an order in which the first ones of all key heads come before the second ones.
    """
    if (order := value_order(name, config)) is not None:
        return values[order]
    heads = rotated_heads(name, config)
    return values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape) if heads else values


def unpermuted(values: NDArray[np.float32], name: str, config: Any) -> NDArray[np.float32]:
    if (order := value_order(name, config)) is not None:
        back = np.empty_like(values)
        back[order] = values
        return back
    heads = rotated_heads(name, config)
    return values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape) if heads else values


def value_order(name: str, config: Any) -> Any:
    """The index by which value heads get llama.cpp's order; None: they keep theirs."""
    if "linear_attn." not in name or (ARCHITECTURES | OTHER_ARCHITECTURES)[config.model_type] == "qwen3next":
        return None
    key_heads, heads = config.linear_num_key_heads, config.linear_num_value_heads

    def tiled(size: int, first: int = 0) -> NDArray[np.int64]:
        places = np.arange(heads * size).reshape(key_heads, heads // key_heads, size)
        return np.concatenate([np.arange(first), first + places.swapaxes(0, 1).reshape(-1)])

    size = config.linear_value_head_dim
    if name.endswith("out_proj.weight"):
        return slice(None), tiled(size)
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        return tiled(size, 2 * key_heads * config.linear_key_head_dim)
    if name.endswith("in_proj_z.weight"):
        return tiled(size)
    return None if name.endswith("norm.weight") else tiled(1)


def rotated_heads(name: str, config: Any) -> int:
    if (ARCHITECTURES | OTHER_ARCHITECTURES)[config.model_type] not in INTERLEAVED:
        return 0
    return {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2], 0)
