# SPDX-License-Identifier: Apache-2.0
"""What the NPU's designs need to know of a model's decoder.

Whether a graph is one, and of which sizes, is for the execution provider to say (ops/layers/decoder_matcher.h).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flownpu.aie.programs.decoder_shape import DecoderShape
from flownpu.errors import FlowNPUError
from flownpu.generate.image_prompts import TOKENS_PER_IMAGE
from flownpu.model.folder import onnx_path, read_genai_config
from flownpu.model.onnx_file import load_model, reading

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["decoder_of_model", "read_decoder"]


def read_decoder(folder: Path) -> DecoderShape:
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


def decoder_of_model(model: Any, positions: int) -> DecoderShape:
    """Reads a model (onnx_ir's) of a decoder that is made for so many positions.

    Raises:
        ValueError: an NPU would not compute it; with the reason that a session tells.
    """
    from flownpu.graph_rewrites.native_graph import describe_decoder  # noqa: PLC0415 needs the extra "convert"

    return DecoderShape.of(describe_decoder(model), positions, TOKENS_PER_IMAGE)
