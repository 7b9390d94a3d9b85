# SPDX-License-Identifier: Apache-2.0
"""Exports checkpoints with ORT GenAI's model builder, and makes tiny random ones to export.

The builder (0.18.0) imports its own modules by bare names ("quantization", "builders"), so it runs in a process of its
own: this file is also a script that exports one folder after another. For Gemma3 it reads RoPE parameters where
transformers 5 does not keep them ("rope_type" at the top, `rope_local_base_freq`); the script puts them there.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>")

# Sizes that leave padding in blocks of 32 rows and 256 columns, and a window far below the context.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,  # five times the usual one, so that logits differ by more than rounding
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
WINDOW = 16
# Two scalings of the frequencies; the tests' texts are long enough for the second (the export chooses by an If).
LONG_ROPE = {
    "rope_theta": 1e4,
    "rope_type": "longrope",
    "type": "longrope",  # what the builder reads
    "short_factor": [1 + 0.1 * pair for pair in range(16)],
    "long_factor": [2.0 + pair for pair in range(16)],
}
# The class of the configuration in transformers, and the settings that SIZES does not have.
OTHER_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("GemmaConfig", {}),
    "granite": (
        "GraniteConfig",
        {"attention_multiplier": 0.3, "embedding_multiplier": 5.0, "residual_multiplier": 0.22, "logits_scaling": 3.0},
    ),
    "llama with biases": ("LlamaConfig", {"attention_bias": True}),
    "mistral without window": ("MistralConfig", {"sliding_window": None}),
    "phi3 with longrope": ("Phi3Config", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 24}),
    "qwen2": ("Qwen2Config", {}),
}
# Frequencies scaled as by Llama 3.1 and later; in the original context of 64 tokens most of them do not turn once.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Export:
    """One run of the builder.

    Attributes:
        checkpoint: Hugging Face checkpoint folder.
        output: folder to write.
        options: the builder's `--extra_options`; `precision=int8` stands for its `--precision`.
    """

    checkpoint: str
    output: str
    options: tuple[str, ...] = ()


def make_checkpoint(family: str, folder: Path, *, seed: int = 0) -> Path:
    """Writes a random model of a family, with a tokenizer of single bytes, in bf16."""
    import torch
    import transformers

    vocabulary = make_tokenizer(folder)
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {**SIZES, "vocab_size": vocabulary}
    model: Any
    if family == "gemma3":
        layers = ["sliding_attention", "sliding_attention", "full_attention"]
        model = transformers.Gemma3ForCausalLM(
            transformers.Gemma3TextConfig(**sizes, sliding_window=WINDOW, layer_types=layers, query_pre_attn_scalar=24)
        )
    elif family == "gemma2":
        # Caps small enough that the tiny model's scores and logits reach them.
        caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        model = transformers.Gemma2ForCausalLM(
            transformers.Gemma2Config(
                **sizes, **caps, sliding_window=WINDOW, layer_types=layers, query_pre_attn_scalar=24
            )
        )
    elif family == "llama":
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, tie_word_embeddings=False, rope_parameters=LLAMA3)
        )
    elif family == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, tie_word_embeddings=True))
    elif family in OTHER_CONFIGS:
        config, settings = OTHER_CONFIGS[family]
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**sizes, **settings))
    else:
        raise ValueError(f"family {family!r}: expected gemma2, gemma3, llama, qwen3, {', '.join(OTHER_CONFIGS)}")
    for name, parameter in model.named_parameters():
        # They start as constants, which would hide a lost or swapped weight.
        if name.endswith(("norm.weight", ".bias")):
            mean = 0.0 if family.startswith("gemma") or name.endswith(".bias") else 1.0
            torch.nn.init.normal_(parameter, mean=mean, std=0.2)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def export(*exports: Export) -> None:
    """Runs the builder: int4, for the CPU provider, blocks of 32 unless an option says otherwise.

    Raises:
        RuntimeError: the builder failed; with the end of what it printed.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "ORT_DISABLE_TELEMETRY": "1"}
    arguments = json.dumps([asdict(one) for one in exports])
    result = subprocess.run(
        [sys.executable, __file__, arguments], env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise RuntimeError(f"ORT GenAI's builder failed:\n{(result.stdout + result.stderr)[-3000:]}")


def round_scales(folder: Path) -> None:
    """Rounds an export's scales to 4 bits, so that bfloat16 holds -scale * zero point, and Q4NX loses nothing."""
    import numpy as np
    import onnx

    model = onnx.load(folder / "model.onnx")
    for tensor in model.graph.initializer:
        if tensor.name.endswith("_scales"):
            mantissa, exponent = np.frexp(onnx.numpy_helper.to_array(tensor))
            rounded = np.ldexp(np.rint(mantissa * 16) / 16, exponent).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(rounded, tensor.name))
    (folder / "model.onnx.data").unlink()
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data")


def make_tokenizer(folder: Path) -> int:
    """Writes a tokenizer of 256 bytes and the special tokens; returns the size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token"), SPECIAL_TOKENS, strict=True))
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return len(words)


def _run_builder(one: Export) -> None:
    import onnxruntime_genai

    sys.path.insert(0, str(Path(onnxruntime_genai.__file__).parent / "models"))
    import builder  # type: ignore[import-not-found] # GenAI's, found through the line above

    cache = str(Path(one.output) / "cache")
    given = dict(option.split("=", 1) for option in one.options)
    precision = given.pop("precision", "int4")
    extra = [f"{name}={value}" for name, value in given.items()]
    options = builder.parse_extra_options(one.checkpoint, one.checkpoint, one.output, precision, "cpu", cache, extra)
    config = options["hf_details"]["hf_config"]
    if config.model_type == "gemma3_text":
        by_layer_type = config.rope_parameters
        config.rope_parameters = dict(by_layer_type["full_attention"])
        config.rope_theta = by_layer_type["full_attention"]["rope_theta"]
        config.rope_local_base_freq = by_layer_type["sliding_attention"]["rope_theta"]
    builder.create_model(one.checkpoint, one.checkpoint, one.output, precision, "cpu", cache, **options)


if __name__ == "__main__":
    for fields in json.loads(sys.argv[1]):
        _run_builder(Export(fields["checkpoint"], fields["output"], tuple(fields["options"])))
