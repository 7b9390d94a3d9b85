# SPDX-License-Identifier: Apache-2.0
"""What the NPU's designs need to know of a model's decoder.

Whether a graph is one, and of which sizes, is for the execution provider to say (ops/npu/decoder_layers_match.h).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import ceil_div
from flownpu.aie.designs.decode_layer_shape import LayerShape
from flownpu.errors import FlowNPUError
from flownpu.model_folder import onnx_path, read_genai_config
from flownpu.onnx_file import load_model, reading

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Decoder", "decoder_of_model", "read_decoder"]

# The dequantisation engine weaves 64 columns of a gate and of its up projection (designs/dequant_engine.py).
_GATE_COLUMNS = 64


@dataclass(frozen=True)
class Decoder:
    """What a decoder's calls depend on; see DecoderShape in ops/npu/decoder_shape.h.

    Attributes:
        shape: of a layer.
        epsilon: of all norms.
        scale: of the scores.
        windows: of each layer; 0: all keys.
        tables: of each layer.
        vocabulary: rows of the LM head.
        positions: the longest context that the model is made for.
    """

    shape: LayerShape
    epsilon: float
    scale: float
    windows: tuple[int, ...]
    tables: tuple[int, ...]
    vocabulary: int
    positions: int

    @property
    def table_count(self) -> int:
        """Rotary tables of the model."""
        return max(self.tables) + 1


def read_decoder(folder: Path) -> Decoder:
    """The decoder of a model's folder.

    Raises:
        FlowNPUError: there is none, or the NPU's designs have no place for it; says why.
        MissingDependencyError: onnx_ir is not installed.
    """
    settings = read_genai_config(folder)
    path = onnx_path(folder, settings)
    model = load_model(path, purpose="flownpu build MODEL")
    with reading(path):
        try:
            return decoder_of_model(model, settings["model"]["context_length"])
        except ValueError as error:
            raise FlowNPUError(f"{path}: the NPU's designs have no place for its layers: {error}") from error


def decoder_of_model(model: Any, positions: int) -> Decoder:
    """Reads a model (onnx_ir's) of a decoder that is made for so many positions.

    Raises:
        ValueError: an NPU would not compute it; with the reason that a session tells.
    """
    from flownpu.graph_rewrites.native_graph import describe_decoder  # noqa: PLC0415 needs the extra "convert"

    sizes = describe_decoder(model)
    shape = LayerShape(
        sizes["hidden"],
        sizes["heads"],
        sizes["kv_heads"],
        sizes["head_size"],
        ceil_div(sizes["feed_forward"], _GATE_COLUMNS) * _GATE_COLUMNS,
        sizes["activation"],
        post_norms=bool(sizes["post_norms"]),
        qk_norm=bool(sizes["qk_norm"]),
    )
    windows, tables = tuple(sizes["windows"]), tuple(sizes["tables"])
    return Decoder(shape, sizes["epsilon"], sizes["scale"], windows, tables, sizes["vocabulary"], positions)
