# SPDX-License-Identifier: Apache-2.0
"""A tiny random Gemma3 with a vision tower, and transformers' model of it with the weights that a folder holds."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from flownpu.ops import q4nx
from tests.convert.conftest import is_projection

TOPICS = Path(__file__).parents[1] / "fixtures" / "gemma3-topics"
SPECIAL = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
# Pictures of 32 x 32 patches, of which 2 x 2 become one of GenAI's 256 tokens; heads of 72 as in SigLIP-So400m. The
# text's window is shorter than a picture's block.
VISION: dict[str, Any] = {
    "hidden_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 288,
    "image_size": 128,
    "patch_size": 4,
    "vision_use_head": False,
}
TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 224,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "vocab_size": 4128,
    "max_position_embeddings": 1024,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "bos_token_id": 2,
    "eos_token_id": 1,
    # With tied embeddings a random model would answer each token with itself.
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}


def write_pictures_checkpoint(folder: Path, **changes: Any) -> None:
    """Writes a random checkpoint in bfloat16 with its tokenizer and picture settings.

    Args:
        folder: where to write it.
        changes: settings of the outer configuration.
    """
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer.from_file(str(TOPICS / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes((TOPICS / "tokenizer_config.json").read_bytes())
    boi, eoi, image = (tokenizer.token_to_id(text) for text in SPECIAL)
    config = transformers.Gemma3Config(
        text_config=TEXT,
        vision_config=VISION,
        mm_tokens_per_image=256,
        boi_token_index=boi,
        eoi_token_index=eoi,
        image_token_index=image,
        tie_word_embeddings=False,
        **changes,
    )
    torch.manual_seed(11)
    model = transformers.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.15 if parameter.ndim == 1 or "language_model" in name else 0.08
            parameter.add_(torch.randn_like(parameter), alpha=spread)
    model.bfloat16().save_pretrained(folder)
    settings = {
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 2,
        "size": {"height": VISION["image_size"], "width": VISION["image_size"]},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def reference(checkpoint: Path, model: Path) -> transformers.Gemma3ForConditionalGeneration:
    """transformers' model in float32, with the matrices that a converted folder holds."""
    tower = transformers.Gemma3ForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    stored = stored_matrices(model / "vision.onnx")
    with torch.no_grad():
        for name, parameter in tower.named_parameters():
            if ("language_model" in name or name.startswith("lm_head")) and is_projection(name):
                quantized = q4nx.quantize(parameter.numpy())
                parameter.copy_(torch.from_numpy(q4nx.dequantize_codes(quantized)))
            elif (matrix := _stored(stored, name.removeprefix("model."))) is not None:
                assert matrix.shape == tuple(parameter.shape)
                parameter.copy_(torch.from_numpy(matrix))
    return tower


def stored_matrices(path: Path) -> dict[str, NDArray[np.float32]]:
    """The weights [M, K] of a vision graph's products, dequantised here, by the names of its nodes."""
    found = {}
    for node in ir.load(path).graph:
        if node.op_type == "Q4NXMatMul":
            rows, columns = (node.attributes[name].as_int() for name in ("M", "K"))
            found[str(node.name)] = q4nx.dequantize(_constant(node, 1), rows, columns)
        elif node.op_type == "DenseMatMul":
            scale = 1 if node.inputs[2] is None else _constant(node, 2)
            found[str(node.name)] = (_constant(node, 1).astype(np.float32) * scale).T
    return {name.removeprefix("/"): value for name, value in found.items()}


def _constant(node: ir.Node, index: int) -> NDArray[Any]:
    value = node.inputs[index]
    assert value is not None
    assert value.const_value is not None
    array = value.const_value.numpy()
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array


def _stored(matrices: dict[str, NDArray[np.float32]], parameter: str) -> NDArray[np.float32] | None:
    """The matrix stored for a parameter of transformers' model: a node's weight, a third of a packed QKV, or None."""
    name = parameter.removesuffix(".weight")
    if name.endswith("mm_input_projection_weight"):
        return np.ascontiguousarray(matrices[name.removesuffix("_weight")].T)
    for index, part in enumerate(("q_proj", "k_proj", "v_proj")):
        if parameter.endswith(f"{part}.weight"):
            return np.split(matrices[name.replace(part, "qkv_proj")], 3)[index]
    return matrices.get(name) if parameter.endswith(".weight") else None


@dataclass(frozen=True)
class Prompt:
    """A text with a mark for each of its pictures."""

    text: str
    pictures: list[Path]


def draw_pictures(folder: Path, count: int) -> list[Path]:
    """Pictures of random blocks, larger and smaller than what the tower takes, as PNG files."""
    random = np.random.default_rng(3)
    paths = []
    for index in range(count):
        coarse = Image.fromarray(random.integers(0, 256, (4 + index, 5, 3), np.uint8))
        paths.append(folder / f"{index}.png")
        coarse.resize((90 + 37 * index, 70 + 41 * index), Image.Resampling.NEAREST).save(paths[-1])
    return paths
