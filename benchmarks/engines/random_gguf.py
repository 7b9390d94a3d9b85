# SPDX-License-Identifier: Apache-2.0
"""Writes a GGUF file of random weights in the shape of a public model, for engines that read such files.

    python -m benchmarks.engines.random_gguf llama3.2-1b Q4_K_M llama.gguf
    flownpu convert llama.gguf llama
    python -m benchmarks.engines.decoders llama --llama-cpp llama.gguf --openvino llama.gguf

runs at the root of the repository. The codes of blocks are random bytes; their scales give weights of K columns about
the variance 1/K. Q4_K_M has the types that llama.cpp's quantiser chooses. The tokenizer is one of bytes, without words.
"""

import math
from pathlib import Path
from typing import Annotated, NamedTuple

import gguf
import numpy as np
import torch
import transformers
import typer
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

from flownpu.model.shapes import SHAPES
from tests.convert.conftest import by_columns, is_projection
from tests.convert.sources.gguf_files import (
    ARCHITECTURES,
    OTHER_ARCHITECTURES,
    add_scaling,
    stored_parameters,
    write_settings,
)

_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")


class _Scales(NamedTuple):
    """The bytes of a block at which its float16 scales begin, and the scales of weights with a deviation of 1.

    Codes of 4 bits are from 0 to 15 (Q4_0: less 8), of 8 bits from -128 to 127; a K-quant's are multiplied by others:
    Q6_K's from -32 to 31 by those of 8 bits; Q4_K's by 6 bits, and 6 bits times the second scale are subtracted, here
    7.5 times the first, so that the mean is 0.
    """

    place: int
    scales: tuple[float, ...]


_BYTE, _SIX, _FOUR = (math.sqrt((values**2 - 1) / 12) for values in (256, 64, 16))
_Q4_K = 1 / math.hypot(math.hypot(31.5, _SIX) * _FOUR, 7.5 * _SIX * math.sqrt(2))
_SCALES = {
    GGMLQuantizationType.Q4_0: _Scales(0, (1 / _FOUR,)),
    GGMLQuantizationType.Q8_0: _Scales(0, (1 / _BYTE,)),
    GGMLQuantizationType.Q6_K: _Scales(208, (1 / (_SIX * _BYTE),)),
    GGMLQuantizationType.Q4_K: _Scales(0, (_Q4_K, 7.5 * _Q4_K)),
}
# MXFP4 has it for experts alone, as gpt-oss's files.
KINDS = ("Q4_0", "Q8_0", "Q6_K", "Q4_K_M", "MXFP4")
# The root of the mean square of MXFP4's sixteen values: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same negated.
_MXFP4 = math.sqrt(68.5 / 8)


def type_of(kind: str, name: str, layers: int) -> GGMLQuantizationType:
    """The type of a weight of a checkpoint's name in a file of this kind."""
    if kind == "MXFP4":
        return GGMLQuantizationType.MXFP4 if ".experts." in name else GGMLQuantizationType.Q8_0
    if kind != "Q4_K_M":
        return GGMLQuantizationType[kind]
    layer = int(name.split(".")[2]) if ".layers." in name else 0
    # As in llama.cpp: the first and the last eighth of layers, and every third of the others, have more bits.
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    is_large = not name.startswith("model.layers.") or (more and name.endswith(("v_proj.weight", "down_proj.weight")))
    return GGMLQuantizationType.Q6_K if is_large else GGMLQuantizationType.Q4_K


def random_blocks(
    kind: GGMLQuantizationType, rows: int, columns: int, generator: np.random.Generator
) -> NDArray[np.uint8]:
    """Rows of a weight, uint8 [rows, bytes of a row]."""
    size, in_bytes = GGML_QUANT_SIZES[kind]
    blocks = np.frombuffer(generator.bytes(rows * columns // size * in_bytes), np.uint8).reshape(-1, in_bytes).copy()
    if kind == GGMLQuantizationType.MXFP4:  # its scales are powers of two
        blocks[:, 0] = 127 - round(math.log2(_MXFP4 * math.sqrt(columns)))
        return blocks.reshape(rows, -1)
    place, scales = _SCALES[kind]
    stored = np.frombuffer((np.array(scales) / math.sqrt(columns)).astype(np.float16).tobytes(), np.uint8)
    blocks[:, place : place + len(stored)] = stored
    return blocks.reshape(rows, -1)


def write(path: Path, config: transformers.PreTrainedConfig, kind: str, seed: int = 0) -> None:
    """Writes the file of a decoder; of those with experts, gpt-oss."""
    generator = np.random.Generator(np.random.SFC64(seed))
    architecture = (ARCHITECTURES | OTHER_ARCHITECTURES)[config.model_type]
    writer = gguf.GGUFWriter(path, architecture, use_temp_file=True)
    writer.add_file_type(gguf.LlamaFileType["MOSTLY_MXFP4_MOE" if kind == "MXFP4" else f"MOSTLY_{kind}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    write_settings(writer, config)
    add_scaling(writer, config)
    _write_tokenizer(writer, config.vocab_size)
    number = {name: value for value, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    with torch.device("meta"):  # for the names and shapes
        model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter, _ in stored_parameters(model):
        chosen = type_of(kind, name, config.num_hidden_layers)
        for stored, shape in _tensors(name, by_columns(parameter, name, config), names):
            if is_projection(name):
                *outer, rows, columns = shape
                blocks = random_blocks(chosen, math.prod(outer) * rows, columns, generator)
                writer.add_tensor(stored, blocks.reshape(*outer, rows, -1), raw_dtype=chosen)
            else:
                writer.add_tensor(stored, _plain(name, shape, generator))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(name: str, parameter: torch.Tensor, names: gguf.TensorNameMap) -> list[tuple[str, tuple[int, ...]]]:
    """The tensors of the file that a parameter becomes, and their shapes."""
    if ".experts." not in name:
        if name.endswith(("router.weight", "router.bias")):
            stored = f"blk.{name.split('.')[2]}.ffn_gate_inp.{name.rpartition('.')[2]}"
        else:
            stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        return [(stored, tuple(parameter.shape))]
    parts = ("gate", "up") if "gate_up_proj" in name else ("down",)
    experts, rows, *columns = parameter.shape
    end = "bias" if name.endswith("_bias") else "weight"
    shape = (experts, rows // len(parts), *columns)
    return [(f"blk.{name.split('.')[2]}.ffn_{part}_exps.{end}", shape) for part in parts]


def _plain(name: str, shape: tuple[int, ...], generator: np.random.Generator) -> NDArray[np.float32]:
    """A tensor that is not quantised: norms of 1, decays of 1/e at most, small weights of convolutions and rates."""
    if len(shape) == 1 or name.endswith("_bias"):
        is_factor = name.endswith(("norm.weight", "layer_scalar.weight"))
        return np.full(shape, -1.0 if name.endswith("A_log") else float(is_factor), np.float32)
    rows, columns = shape[0], shape[-1]  # a convolution has an axis of 1 between them
    return generator.standard_normal((rows, columns), dtype=np.float32) / np.float32(math.sqrt(columns))


def _write_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    """BPE over bytes, whose other tokens no text has."""
    shown = sorted(ByteLevel.alphabet())
    tokens = [*_SPECIAL, *shown, shown[0] + shown[1]]  # readers want a merge
    tokens += [f"[{i}]" for i in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(_SPECIAL) + [1] * (size - len(_SPECIAL)))
    writer.add_token_merges([f"{shown[0]} {shown[1]}"])
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)


def main(
    shape: Annotated[str, typer.Argument(help="A shape of `flownpu make-model`.")],
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}.")],
    path: Annotated[Path, typer.Argument(help="The file to write.")],
    context_length: Annotated[int, typer.Option(min=1)] = 8192,
    layers: Annotated[int | None, typer.Option(min=1, help="The first layers alone, for less memory.")] = None,
) -> None:
    """Writes the file."""
    if shape not in SHAPES or kind not in KINDS:
        raise typer.BadParameter(f"expected a shape of {', '.join(SHAPES)}, and one of {', '.join(KINDS)}")
    settings = SHAPES[shape] | {"max_position_embeddings": context_length}
    if layers is not None:
        settings["num_hidden_layers"] = layers
        if "layer_types" in settings:
            settings["layer_types"] = settings["layer_types"][:layers]
    write(path, transformers.AutoConfig.for_model(**settings), kind)


if __name__ == "__main__":
    typer.run(main)
