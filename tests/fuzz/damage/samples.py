# SPDX-License-Identifier: Apache-2.0
"""Small intact files and folders of every kind that FlowNPU reads, to be damaged; each is made by a function."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.helper
import onnxruntime
from numpy.typing import NDArray
from safetensors.numpy import save_file

from flownpu.convert import convert
from flownpu.convert.export_q4nx import export_q4nx
from flownpu.convert.families import read_decoder
from flownpu.convert.vision.configuration import read_vision
from flownpu.convert.vision.weights import DenseWeight, vision_weight_plan
from flownpu.convert.weights import ProjectionWeight, weight_plan
from flownpu.npu.artifacts import build_artifacts

Tensors = dict[str, NDArray[Any]]

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
_PLAIN = {key: value for key, value in LLAMA.items() if key != "rope_scaling"}
GEMMA3 = _PLAIN | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 16,
    "rope_parameters": {
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
}
QWEN3 = _PLAIN | {
    "model_type": "qwen3",
    "tie_word_embeddings": True,
    "use_sliding_window": True,
    "max_window_layers": 0,
    "sliding_window": 8,
}
PICTURES = {
    "model_type": "gemma3",
    "text_config": {**GEMMA3, "model_type": "gemma3_text"},
    "vision_config": {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 32,
        "patch_size": 2,
    },
    "mm_tokens_per_image": 256,
    "image_token_index": 5,
    "boi_token_index": 6,
    "eoi_token_index": 7,
}
# Sizes that the NPU's designs for single tokens support. The designs for prompts do not, so the files are half as
# large.
NPU = _PLAIN | {
    "hidden_size": 160,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 64,
}
CONTEXT = 64


def make(name: str, folder: str) -> None:
    """Writes a sample's files into a folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    MAKERS[name](Path(folder))


def _random(shape: tuple[int, ...], dtype: Any = ml_dtypes.bfloat16) -> NDArray[Any]:
    generator = np.random.default_rng(len(shape) + sum(shape))
    return (generator.standard_normal(shape) / 8).astype(dtype)


def _tensors(config: dict[str, Any]) -> Tensors:
    """Random tensors of a checkpoint, by transformers' names."""
    tensors: Tensors = {}
    for weight in weight_plan(read_decoder(config)):
        if isinstance(weight, ProjectionWeight):
            for source in weight.sources:
                prefix = "" if source.tensor == "lm_head.weight" else "model."
                tensors[prefix + source.tensor] = _random((source.rows, weight.columns))
        else:
            tensors[f"model.{weight.tensor}"] = _random((weight.size,))
    return tensors


def _write_checkpoint(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2], "top_k": 4, "temperature": 0.5}))
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GemmaTokenizer"}))
    save_file(tensors, folder / "model.safetensors")


def _sharded(folder: Path) -> None:
    tensors = _tensors(LLAMA)
    _write_checkpoint(folder, LLAMA, tensors)
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _quantised(folder: Path, method: str) -> None:
    config = _PLAIN | {"quantization_config": {"quant_method": method, "bits": 4, "group_size": 32}}
    if method == "gptq":
        config["quantization_config"] |= {"desc_act": True, "checkpoint_format": "gptq_v2"}
    tensors = _tensors(_PLAIN)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors.pop(name).shape
        part = name.removesuffix("weight")
        generator = np.random.default_rng(rows + columns)
        shape = (columns // 8, rows) if method == "gptq" else (columns, rows // 8)
        tensors[f"{part}qweight"] = generator.integers(0, 2**31, shape, np.int32)
        tensors[f"{part}qzeros"] = generator.integers(0, 2**31, (columns // 32, rows // 8), np.int32)
        tensors[f"{part}scales"] = np.full((columns // 32, rows), 0.125, np.float16)
        if method == "gptq":
            tensors[f"{part}g_idx"] = np.zeros(columns, np.int32)
    _write_checkpoint(folder, config, tensors)


def _pictures(folder: Path) -> None:
    decoder = read_decoder(PICTURES)
    tensors = {f"language_model.{name}": tensor for name, tensor in _tensors(PICTURES["text_config"]).items()}
    for weight in vision_weight_plan(read_vision(PICTURES, decoder.hidden_size)):
        for source in weight.sources:
            if isinstance(weight, DenseWeight):
                rows = weight.rows // len(weight.sources)
                shape: tuple[int, ...] = (weight.columns, rows) if weight.transposed else (rows, weight.columns)
            else:
                shape = (weight.shape[0] // len(weight.sources), *weight.shape[1:])
            inner = source.replace("vision_tower.", "vision_tower.vision_model.", 1)
            tensors[inner] = _random(shape)
    _write_checkpoint(folder, PICTURES, tensors)
    settings = {"do_resize": True, "resample": 2, "size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | {"image_std": [0.5] * 3}))


# --- GGUF -------------------------------------------------------------------------------------------------------------


def _gguf(folder: Path, config: dict[str, Any], architecture: str) -> None:
    import gguf

    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    writer.add_custom_alignment(32)  # the default
    writer.add_uint16("split.count", 1)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    special = ["<unk>", "<s>", "</s>", "<end_of_turn>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(32)), *map(chr, range(97, 123))]
    writer.add_token_list(tokens)
    writer.add_token_types([2, 3, 3, 3] + [6] * 32 + [1] * 26)
    if architecture == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_array("gemma3.attention.sliding_window_pattern", [True, False])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([0.0] * len(tokens))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("llama-bpe" if architecture == "llama" else "qwen2")
        writer.add_token_merges(["a b", "b c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    names = gguf.get_tensor_name_map(
        {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[architecture], config["num_hidden_layers"]
    )
    kinds = [gguf.GGMLQuantizationType[kind] for kind in ("Q4_0", "Q4_1", "Q8_0", "F16", "F32", "Q5_1")]
    for i, (name, tensor) in enumerate(_tensors(config).items()):
        stored, values = names.get_name(name, try_suffixes=(".weight",)), tensor.astype(np.float32)
        kind = kinds[i % len(kinds)]
        if tensor.ndim == 2:
            writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, values)
    if architecture == "llama":
        writer.add_tensor("rope_freqs.weight", np.ones(config["head_dim"] // 2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- Exports ----------------------------------------------------------------------------------------------------------


def _save(folder: Path, graph: str, arrays: Tensors) -> None:
    """Writes a model with external data, from its graph in ONNX's text syntax."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> {graph}')
    for name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    location = "model.onnx.data"
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location=location, size_threshold=0)


def _genai(folder: Path) -> None:
    graph = """g (float[B,S,64] x) => (float[B,S,32] y) {
        y = com.microsoft.MatMulNBits <K = 64, N = 32, block_size = 32, bits = 4> (x, codes, scales, zero_points)
    }"""
    codes = np.random.default_rng(0).integers(0, 256, (32, 2, 16), np.uint8)
    arrays = {"codes": codes, "scales": np.full(64, 0.125, np.float32), "zero_points": codes[:, 0, :1].copy()}
    _save(folder, graph, arrays)
    decoder = {
        "filename": "model.onnx",
        "head_size": 16,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "session_options": {"provider_options": []},
        "sliding_window": {"window_size": 8, "slide_key_value_cache": False, "layers": [0]},
        "inputs": {"input_ids": "x"},
    }
    model = {"type": "llama", "context_length": 64, "vocab_size": 32, "eos_token_id": [1], "decoder": decoder}
    (folder / "genai_config.json").write_text(json.dumps({"model": model, "search": {"max_length": 64}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))


def _optimum(folder: Path) -> None:
    _save(
        folder, "g (float[B,S,64] x) => (float[B,S,32] y) { y = MatMul (x, w) }", {"w": _random((64, 32), np.float32)}
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "max_position_embeddings": 64}))


# --- What FlowNPU writes ----------------------------------------------------------------------------------------------


def _converted(folder: Path, config: dict[str, Any]) -> None:
    source = folder.with_name(folder.name + "-source")
    _write_checkpoint(source, config, _tensors(config))
    convert(source, folder, force=True)


def _with_pictures(folder: Path) -> None:
    source = folder.with_name(folder.name + "-source")
    _pictures(source)
    convert(source, folder, force=True)


def _artifacts(folder: Path) -> None:
    _converted(folder, NPU)
    build_artifacts(folder, context=CONTEXT)


def _built(folder: Path) -> None:
    _artifacts(folder)
    build_artifacts(folder, kind="xclbin", context=CONTEXT)


def _compiled(folder: Path) -> None:
    """A compiled graph of many operators, attributes and types of constants: that of the tests of compiled models."""
    from tests.ep.context.test_compiled_models import GRAPH

    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> {GRAPH}')
    onnx.save(model, folder / "source.onnx")
    compile_model(folder / "source.onnx", folder / "model.onnx", {})


def _compiled_decoder(folder: Path, config: dict[str, Any], options: dict[str, str]) -> None:
    source = folder.with_name(folder.name + "-converted")
    _converted(source, config)
    if options.get("device") == "emulate":
        build_artifacts(source, context=CONTEXT, output=source / "artifacts" / "emulate")
        build_artifacts(source, context=CONTEXT, output=folder / "artifacts" / "emulate")
    compile_model(source / "model.onnx", folder / "model.onnx", options)


def compile_model(source: Path, target: Path, options: dict[str, str]) -> None:
    """Compiles a model on FlowNPU, like `flownpu compile`."""
    session = onnxruntime.SessionOptions()
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == "FlowNPUExecutionProvider"]
    session.add_provider_for_devices(devices[:1], options)
    onnxruntime.ModelCompiler(session, str(source)).compile_to_file(str(target))


def _q4nx(folder: Path) -> None:
    source = folder.with_name(folder.name + "-converted")
    _converted(source, _PLAIN)
    export_q4nx(source, folder / "model.q4nx", force=True)


def _images(folder: Path) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (12, 10, 3), np.uint8)
    for kind, options in {
        "png": {},
        "jpeg": {},
        "webp": {},
        "gif": {},
        "bmp": {},
        "tiff": {"compression": "tiff_lzw"},
        "avif": {},
    }.items():
        image = Image.fromarray(pixels)
        buffer = io.BytesIO()
        image.save(buffer, kind, **options)
        (folder / f"picture.{kind}").write_bytes(buffer.getvalue())


MAKERS: dict[str, Callable[[Path], None]] = {
    "llama": lambda folder: _write_checkpoint(folder, LLAMA, _tensors(LLAMA)),
    "gemma3": lambda folder: _write_checkpoint(folder, GEMMA3, _tensors(GEMMA3)),
    "qwen3": lambda folder: _write_checkpoint(folder, QWEN3, _tensors(QWEN3)),
    "sharded": _sharded,
    "awq": lambda folder: _quantised(folder, "awq"),
    "gptq": lambda folder: _quantised(folder, "gptq"),
    "pictures": _pictures,
    "gguf-llama": lambda folder: _gguf(folder, _PLAIN, "llama"),
    "gguf-gemma3": lambda folder: _gguf(folder, GEMMA3, "gemma3"),
    "gguf-qwen3": lambda folder: _gguf(folder, QWEN3, "qwen3"),
    "genai": _genai,
    "optimum": _optimum,
    "converted": lambda folder: _converted(folder, GEMMA3),
    "converted-pictures": _with_pictures,
    "q4nx": _q4nx,
    "compiled": _compiled,
    "compiled-decoder": lambda folder: _compiled_decoder(folder, GEMMA3, {}),
    "compiled-emulated": lambda folder: _compiled_decoder(folder, NPU, {"device": "emulate"}),
    "artifacts": _artifacts,
    "built": _built,
    "images": _images,
}
