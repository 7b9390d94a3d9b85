# SPDX-License-Identifier: Apache-2.0
"""llama.cpp on the CPU: Q4_0 weights, which it repacks for this processor when it loads them, and flash attention.

It is built from llama-cpp-python's source package, with the compiler's native flags or for AVX2 only, and called
through that package's ctypes bindings, so that it can be fed random token ids like all engines.

`convert` and `Engine` run in this peer's own environment.
"""

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.peers.exported import ExportedModel

REQUIREMENTS = ("numpy", "gguf==0.19.0", "llama-cpp-python==0.3.36")
FROM_SOURCE = ("llama-cpp-python",)
_LIBRARY_ALONE = "-DLLAMA_BUILD_TOOLS=OFF -DMTMD_BUILD=OFF -DLLAVA_BUILD=OFF"
BUILD_ENVIRONMENT = {"CMAKE_ARGS": f"-DGGML_NATIVE=ON {_LIBRARY_ALONE}"}
# The instruction sets of processors with AVX2 and without AVX-512, and nothing newer (AVX-VNNI).
_AVX2 = " ".join(f"-DGGML_{name}=ON" for name in ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2"))
_NEWER = " ".join(f"-DGGML_{name}=OFF" for name in ("NATIVE", "AVX_VNNI", "AVX512"))
AVX2_BUILD_ENVIRONMENT = {"CMAKE_ARGS": f"{_NEWER} {_AVX2} {_LIBRARY_ALONE}"}

_GROUP = 32
_FILE = "model-q4_0.gguf"
# llama.cpp's architectures, by family and by whether the model has experts.
_ARCHITECTURES = {
    ("gemma3_text", False): "gemma3",
    ("llama", False): "llama",
    ("olmo", True): "olmoe",
    ("qwen3", False): "qwen3",
    ("qwen3", True): "qwen3moe",
}
# Architectures with experts: whether llama.cpp scales the weights of a token's experts to the sum 1; no field of a file
# says so.
_NORMALIZED = {"olmoe": False, "qwen3moe": True}
# Most tokens of one call of llama_decode, and of one graph that it computes: llama-bench's defaults.
_BATCH, _MICRO_BATCH = 2048, 512
# A checkpoint's names of a layer's weights, by llama.cpp's names.
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_FEED_FORWARD = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {f"{name}_exps": source.replace("mlp.", "mlp.experts.") for name, source in _FEED_FORWARD.items()}


def q4_0(codes: Any, scales: Any) -> Any:
    """Packed codes and scales as blocks of GGUF's Q4_0, uint8 [rows, columns / 32 * 18].

    A block is the float16 scale and 16 bytes; byte j holds column j in its low nibble, column j + 16 in its high one.
    """
    rows, groups = scales.shape
    packed = np.asarray(codes).reshape(rows, groups, _GROUP // 2)
    by_column = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, groups, 2, _GROUP // 2)
    blocks = np.empty((rows, groups, 2 + _GROUP // 2), np.uint8)
    blocks[..., :2] = np.ascontiguousarray(scales).view(np.uint8).reshape(rows, groups, 2)
    blocks[..., 2:] = by_column[:, :, 0] | by_column[:, :, 1] << 4
    return blocks.reshape(rows, -1)


def convert_served(model: "ExportedModel", output: Path) -> None:
    """Writes a GGUF file for llama.cpp's server, which needs a text for each token: that of token 700 is "<700>".

    Its tokenizer also needs tokens for all bytes: they are tokens 3 to 258.

    Raises:
        ValueError: the vocabulary is too small, or see `convert`.
    """
    if model.vocabulary_size < 259:
        raise ValueError(f"llama.cpp's server needs a vocabulary of 259 tokens, this one has {model.vocabulary_size}")
    texts = ["<pad>", "<eos>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    convert(model, output, [*texts, *(f"<{token}>" for token in range(len(texts), model.vocabulary_size))])


def _architecture(model: "ExportedModel") -> str:
    """llama.cpp's name of the model's architecture; raises ValueError if it cannot run the model."""
    architecture = _ARCHITECTURES.get((model.family, model.experts > 0))
    if architecture is None:
        experts = " with experts" if model.experts else ""
        raise ValueError(f"this converter knows no architecture of llama.cpp's for {model.family}{experts}")
    if abs(model.attention_scale * model.head_size**0.5 - 1) > 1e-6:
        raise ValueError(f"llama.cpp scales attention by 1 / sqrt({model.head_size}), not by {model.attention_scale}")
    if model.attention_softcap or model.logit_softcap:
        raise ValueError("this converter writes no soft caps")
    if model.experts and model.normalized_experts != _NORMALIZED[architecture]:
        raise ValueError(f"llama.cpp's {architecture} has other weights of experts (normalised or not) than this model")
    if model.norms_of_all_heads != (architecture == "olmoe"):
        raise ValueError(f"llama.cpp's {architecture} normalises other heads together than this model")
    return architecture


def convert(model: "ExportedModel", output: Path, texts: "Sequence[str]" = ()) -> None:
    """Writes a GGUF file; without `texts`, one for each token, the file has no tokenizer.

    Raises:
        ValueError: llama.cpp or this converter does not take such a model.
    """
    import gguf  # noqa: PLC0415 only this peer's environment has it

    architecture = _architecture(model)
    writer = gguf.GGUFWriter(output / _FILE, architecture)
    _write_settings(writer, model, architecture)
    _write_tokenizer(writer, texts)
    norms = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    if model.sandwich_norms:
        norms |= {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
    if model.qk_norm:
        norms |= {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}

    def weight(name: str, source: str, heads: int = 0, experts: int = 0) -> None:
        codes, scales = model.codes(source), model.scales(source)
        if heads:
            codes, scales = _interleave(codes, heads), _interleave(scales, heads)
        blocks = q4_0(codes, scales)
        if experts:
            blocks = blocks.reshape(experts, -1, blocks.shape[1])
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    weight("token_embd.weight", "embed_tokens")
    for i in range(len(model.windows)):
        if model.experts:
            writer.add_tensor(f"blk.{i}.ffn_gate_inp.weight", model.vector(f"layers.{i}.mlp.router"))
        for name, source in (_ATTENTION | (_EXPERTS if model.experts else _FEED_FORWARD)).items():
            # In this architecture llama.cpp rotates pairs of neighbouring columns, where checkpoints pair the halves.
            rotated = {"attn_q": model.heads, "attn_k": model.kv_heads} if architecture == "llama" else {}
            experts = model.experts if name in _EXPERTS else 0
            weight(f"blk.{i}.{name}.weight", f"layers.{i}.{source}", rotated.get(name, 0), experts)
        for name, source in norms.items():
            writer.add_tensor(f"blk.{i}.{name}.weight", model.vector(f"layers.{i}.{source}"))
    writer.add_tensor("output_norm.weight", model.vector("norm"))
    if not model.tied_embeddings:
        weight("output.weight", "lm_head")
    if architecture == "llama":
        # llama.cpp divides the frequencies of the plain rotary embedding by these; all 1 without Llama 3's scaling.
        writer.add_tensor("rope_freqs.weight", _frequency_factors(model, 0).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleave(rows: Any, heads: int) -> Any:
    halves = np.asarray(rows).reshape(heads, 2, -1, rows.shape[1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _theta(frequencies: Any) -> float:
    """The base of a rotary embedding, to four digits, from frequencies that a linear scaling may have divided."""
    return float(f"{(float(frequencies[0]) / float(frequencies[1])) ** len(frequencies):.4g}")


def _frequency_factors(model: "ExportedModel", index: int) -> Any:
    """By what the frequencies of the plain rotary embedding, theta^(-2i/d), are divided: float64 [d / 2]."""
    frequencies = model.vector(f"rotary.{index}").astype(np.float64)
    return _theta(frequencies) ** (-np.arange(len(frequencies)) / len(frequencies)) / frequencies


def _write_settings(writer: Any, model: "ExportedModel", architecture: str) -> None:
    writer.add_context_length(model.context_length)
    writer.add_embedding_length(model.hidden_size)
    writer.add_block_count(len(model.windows))
    writer.add_feed_forward_length(model.feed_forward_size)
    if model.experts:
        writer.add_expert_count(model.experts)
        writer.add_expert_used_count(model.experts_per_token)
        writer.add_expert_feed_forward_length(model.feed_forward_size)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_key_length(model.head_size)
    writer.add_value_length(model.head_size)
    writer.add_layer_norm_rms_eps(model.norm_epsilon)
    writer.add_vocab_size(model.vocabulary_size)
    writer.add_rope_dimension_count(model.head_size)
    writer.add_file_type(2)  # mostly Q4_0
    wide = next((i for i, window in enumerate(model.windows) if window < 0), 0)
    frequencies = model.vector(f"rotary.{model.rotaries[wide]}")
    writer.add_rope_freq_base(_theta(frequencies))
    if architecture == "gemma3":
        local = next((i for i, window in enumerate(model.windows) if window >= 0), wide)
        writer.add_float32("gemma3.rope.freq_base_swa", _theta(model.vector(f"rotary.{model.rotaries[local]}")))
        writer.add_sliding_window(max(model.windows))
        writer.add_array("gemma3.attention.sliding_window_pattern", [window >= 0 for window in model.windows])
        if frequencies[0] < 1:
            writer.add_string("gemma3.rope.scaling.type", "linear")
            writer.add_float32("gemma3.rope.scaling.factor", float(f"{1 / float(frequencies[0]):.4g}"))
    elif architecture != "llama" and abs(_frequency_factors(model, 0) - 1).max() > 1e-3:
        raise ValueError(f"this converter writes no scaled rotary embedding for {architecture}")


def _write_tokenizer(writer: Any, texts: "Sequence[str]") -> None:
    if not texts:
        writer.add_tokenizer_model("none")
        return
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores([0.0] * len(texts))
    control, normal, byte = 3, 1, 6  # llama.cpp's kinds of tokens
    writer.add_token_types([control] * 3 + [byte] * 256 + [normal] * (len(texts) - 259))
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


class Engine:
    """A GGUF file opened in llama.cpp."""

    def __init__(self, folder: Path, *, threads: int, context: int, options: dict[str, str]) -> None:
        del options  # there are none
        import llama_cpp  # noqa: PLC0415 only this peer's environment has it

        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self._llama: Any = llama_cpp
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(
            str(folder / _FILE).encode(), llama_cpp.llama_model_default_params()
        )
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = context
        parameters.n_batch, parameters.n_ubatch = _BATCH, _MICRO_BATCH
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.flash_attn_type = 1  # on
        # Layers with a window keep a cache of the window's size only, the default of llama.cpp's own programs.
        parameters.swa_full = False
        self._context = llama_cpp.llama_init_from_model(model, parameters)
        if not self._context:
            raise RuntimeError("llama.cpp could not load the model; what it says is above")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def start(self, length: int) -> None:
        """Begins a sequence."""
        del length  # the context has room for the longest
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)
        self._pending: list[int] = []

    def read(self, tokens: Any) -> None:
        """Computes tokens, up to the logits of the last."""
        for first in range(0, len(tokens), _BATCH):
            part = np.ascontiguousarray(tokens[first : first + _BATCH], dtype=np.int32)
            ids = part.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            status = self._llama.llama_decode(self._context, self._llama.llama_batch_get_one(ids, len(part)))
            if status:
                raise RuntimeError(f"llama_decode returned {status}")

    def generate_next(self) -> int:
        """Generates the likeliest token; like GenAI, it first computes the token that was generated before."""
        self.read(self._pending)
        token = int(self.logits().argmax())
        self._pending = [token]
        return token

    def logits(self) -> Any:
        """The last token's logits, float32 [V]."""
        pointer = self._llama.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(pointer, (self._vocabulary,))
